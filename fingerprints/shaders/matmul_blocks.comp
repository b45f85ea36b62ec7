#version 450
// C = A * B in fp32, row-major, square, the size a multiple of 64.
// Register blocks: each invocation computes an 8 x 8 block of C from registers, without shared
// memory and without barriers.
// For Vulkan on a CPU, where a barrier costs a switch of coroutines.
layout(local_size_x = 8, local_size_y = 8) in;
layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) readonly buffer B { vec4 b[]; };
layout(std430, binding = 2) writeonly buffer C { vec4 c[]; };
layout(push_constant) uniform Size { uint n; };

void main()
{
    uint row = gl_GlobalInvocationID.y * 8;
    uint column = gl_GlobalInvocationID.x * 2;
    uint stride = n / 4;
    vec4 left[8];
    vec4 right[8];
    for (uint i = 0; i < 8; i++) {
        left[i] = vec4(0.0);
        right[i] = vec4(0.0);
    }
    for (uint k = 0; k < n; k++) {
        vec4 b_left = b[k * stride + column];
        vec4 b_right = b[k * stride + column + 1];
        for (uint i = 0; i < 8; i++) {
            vec4 a_value = vec4(a[(row + i) * n + k]);
            left[i] = fma(a_value, b_left, left[i]);
            right[i] = fma(a_value, b_right, right[i]);
        }
    }
    for (uint i = 0; i < 8; i++) {
        c[(row + i) * stride + column] = left[i];
        c[(row + i) * stride + column + 1] = right[i];
    }
}
