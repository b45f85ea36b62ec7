#version 450
// C = A * B in fp32, row-major, square, the size a multiple of 16.
// Shared-memory tiles: each workgroup of 16 x 16 computes one 16 x 16 tile of C.
// For devices with many lanes and fast local memory (GPUs).
layout(local_size_x = 16, local_size_y = 16) in;
layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) readonly buffer B { float b[]; };
layout(std430, binding = 2) writeonly buffer C { float c[]; };
layout(push_constant) uniform Size { uint n; };

const uint TILE = 16;
shared float a_tile[TILE][TILE];
shared float b_tile[TILE][TILE];

void main()
{
    uint row = gl_GlobalInvocationID.y;
    uint column = gl_GlobalInvocationID.x;
    uint y = gl_LocalInvocationID.y;
    uint x = gl_LocalInvocationID.x;
    float sum = 0.0;
    for (uint k = 0; k < n; k += TILE) {
        a_tile[y][x] = a[row * n + k + x];
        b_tile[y][x] = b[(k + y) * n + column];
        barrier();
        for (uint i = 0; i < TILE; i++)
            sum = fma(a_tile[y][i], b_tile[i][x], sum);
        barrier();
    }
    c[row * n + column] = sum;
}
