#version 450
// scores[i][j] = q[i] . k[j] / sqrt(WIDTH), for n rows each.
layout(local_size_x = 8, local_size_y = 8) in;
layout(std430, binding = 0) readonly buffer Q { float q[]; };
layout(std430, binding = 1) readonly buffer K { float k[]; };
layout(std430, binding = 2) writeonly buffer S { float scores[]; };
layout(push_constant) uniform Size { uint n; };

const uint WIDTH = 64;

void main()
{
    uint j = gl_GlobalInvocationID.x;
    uint i = gl_GlobalInvocationID.y;
    if (i >= n || j >= n)
        return;

    float sum = 0.0;
    for (uint c = 0; c < WIDTH; c++)
        sum = fma(q[i * WIDTH + c], k[j * WIDTH + c], sum);

    scores[i * n + j] = sum * inversesqrt(float(WIDTH));
}
