#version 450
// powers[i] = exp(scores[i]), for n elements.
layout(local_size_x = 64) in;
layout(std430, binding = 0) readonly buffer S { float scores[]; };
layout(std430, binding = 1) writeonly buffer P { float powers[]; };
layout(push_constant) uniform Size { uint n; };

void main()
{
    uint i = gl_GlobalInvocationID.x;
    if (i < n)
        powers[i] = exp(scores[i]);
}
