"""Models on OpenCL: a `.tflite` file becomes kernels by tinygrad, replayed through pyopencl."""
