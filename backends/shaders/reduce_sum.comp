#version 450
// sums[i] = the sum of row i of n elements; one workgroup a row, a tree in shared memory.
layout(local_size_x = 64) in;
layout(std430, binding = 0) readonly buffer P { float powers[]; };
layout(std430, binding = 1) writeonly buffer R { float sums[]; };
layout(push_constant) uniform Size { uint n; };

shared float part[64];

void main()
{
    uint row = gl_WorkGroupID.x;
    uint lane = gl_LocalInvocationID.x;
    float sum = 0.0;
    for (uint j = lane; j < n; j += 64)
        sum += powers[row * n + j];

    part[lane] = sum;
    barrier();
    for (uint width = 32; width > 0; width >>= 1) {
        if (lane < width)
            part[lane] += part[lane + width];
        barrier();
    }
    if (lane == 0)
        sums[row] = part[0];
}
