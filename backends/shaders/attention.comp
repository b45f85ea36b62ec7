#version 450
// o[i] = softmax(q[i] . k / sqrt(WIDTH)) v, one pass over n keys with a running maximum.
// One row an invocation, its accumulators in registers: long to compile, as real kernels are.
layout(local_size_x = 32) in;
layout(std430, binding = 0) readonly buffer Q { float q[]; };
layout(std430, binding = 1) readonly buffer K { float k[]; };
layout(std430, binding = 2) readonly buffer V { float v[]; };
layout(std430, binding = 3) writeonly buffer O { float o[]; };
layout(push_constant) uniform Size { uint n; };

const uint WIDTH = 64;

void main()
{
    uint i = gl_GlobalInvocationID.x;
    if (i >= n)
        return;

    float query[WIDTH];
    float sums[WIDTH];
    for (uint c = 0; c < WIDTH; c++) {
        query[c] = q[i * WIDTH + c] * inversesqrt(float(WIDTH));
        sums[c] = 0.0;
    }

    float greatest = -1e30;
    float total = 0.0;
    for (uint j = 0; j < n; j++) {
        float score = 0.0;
        for (uint c = 0; c < WIDTH; c++)
            score = fma(query[c], k[j * WIDTH + c], score);

        float next = max(greatest, score);
        float keep = exp(greatest - next);
        float weight = exp(score - next);
        greatest = next;
        total = fma(total, keep, weight);
        for (uint c = 0; c < WIDTH; c++)
            sums[c] = fma(sums[c], keep, weight * v[j * WIDTH + c]);
    }

    for (uint c = 0; c < WIDTH; c++)
        o[i * WIDTH + c] = sums[c] / total;
}
