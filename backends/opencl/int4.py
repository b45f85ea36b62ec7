"""Weights of four bits: groups of 32 along the sum, each with its scale and zero point.

A weight is `scale * (stored - zero_point)`. 32 weights lie in 16 bytes, the first 16 in the low
nibbles and the others in the high ones, so that one load gives two vectors that meet 16
neighbouring activations each. (Nibbles in their natural order make the kernel slower than
float.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from switchgear.backends.opencl import tinygrad_jit as jit

GROUP: Final = 32
_LEVELS: Final = 15
# Rows of activations that one work item takes along: the weights are unpacked once for all.
_ROWS_AT_ONCE: Final = 4
# Groups of a column that one step of its sum takes.
_GROUPS_AT_ONCE: Final = 4
# Work items of a group, where each has a column of its own; and where they share one.
_COLUMNS: Final = 16
_LANES: Final = 32


@dataclass(frozen=True, slots=True)
class Int4Weights:
    """`packed` [n, k/2] uint8, `scales` [n, k/32] float32, `zero_points` [n, k/32] uint8.

    k is that of the weights rounded up to whole groups.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """In the order of the kernel's arguments."""
        return self.packed, self.scales, self.zero_points


def quantise(weights: NDArray[np.float32]) -> Int4Weights:
    """The nearest weights of four bits to [n, k] of float32; zero stays exactly zero."""
    n, k = weights.shape
    padded = np.zeros((n, -(-k // GROUP) * GROUP), np.float32)
    padded[:, :k] = weights
    groups = padded.reshape(n, -1, GROUP)
    least = np.minimum(groups.min(axis=2), 0)
    scales = (np.maximum(groups.max(axis=2), 0) - least) / np.float32(_LEVELS)
    scales[scales == 0] = 1
    zero_points = np.clip(np.rint(-least / scales), 0, _LEVELS).astype(np.uint8)
    stored = np.rint(groups / scales[..., None]) + zero_points[..., None]
    values = np.clip(stored, 0, _LEVELS).astype(np.uint8)
    half = GROUP // 2
    packed = values[:, :, :half] | (values[:, :, half:] << 4)
    return Int4Weights(packed.reshape(n, -1), scales.astype(np.float32), zero_points)


def dequantise(weights: Int4Weights, k: int) -> NDArray[np.float32]:
    """The float32 weights [n, k] that these stand for."""
    n, groups = weights.scales.shape
    packed = weights.packed.reshape(n, groups, GROUP // 2)
    values = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32)
    values -= weights.zero_points[..., None]
    values *= weights.scales[..., None]
    return values.reshape(n, groups * GROUP)[:, :k]


def product(x: Any, weights: Int4Weights, *, shared: bool) -> Any:
    """`x` [rows, k] times the transposed weights, as a tensor [rows, n] of the traced function.

    `shared` has the work items of a group share a column, with activations in float: for
    devices whose neighbouring work items should read neighbouring memory. Else each has a
    column of its own, with activations of 8 bits: for processors.
    """
    rows, k = (int(size) for size in x.shape)
    n, groups = weights.scales.shape
    if k < groups * GROUP:
        x = x.pad(((0, 0), (0, groups * GROUP - k)))

    activations = x.contiguous()
    if not shared:
        shape = (rows, row_words(groups))
        kernel = activation_kernel(rows, k)
        activations = jit.own_kernel(kernel, shape, "int32", [activations])

    constants = [jit.constant(array) for array in weights.arrays]
    kernel = product_kernel(rows, n, k, shared=shared)
    return jit.own_kernel(kernel, (rows, n), "float32", [activations, *constants])


def product_kernel(rows: int, n: int, k: int, *, shared: bool) -> jit.KernelSource:
    """The kernel for weights [n, k] and `rows` rows of activations, as in `product`."""
    groups = -(-k // GROUP)
    return _shared_kernel(rows, n, groups) if shared else _column_kernel(rows, n, groups)


def row_words(groups: int) -> int:
    """32-bit words of a row: activations of 8 bits, the groups' scales, then their sums."""
    return groups * (GROUP // 4 + 2)


def activation_kernel(rows: int, k: int) -> jit.KernelSource:
    """Rounds rows of float activations to 8 bits: whole shares of each group's largest.

    The error is at most 0.4 % of the largest of 32, a fifteenth of what a weight's may be.
    """
    groups = -(-k // GROUP)
    name = f"int4_activations_{rows}_{groups}"
    source = f"""__kernel void {name}(__global int *restrict packed,
    __global const float *restrict x) {{
  int g = get_global_id(0);
  int m = get_global_id(1);
  __global const float *at = x + ((size_t)m * {groups} + g) * {GROUP};
  float16 a = vload16(0, at), b = vload16(0, at + 16);
  float16 most16 = fmax(fabs(a), fabs(b));
  float8 most8 = fmax(most16.lo, most16.hi);
  float4 most4 = fmax(most8.lo, most8.hi);
  float most = fmax(fmax(most4.x, most4.y), fmax(most4.z, most4.w));
  float share = most > 0.0f ? 127.0f / most : 0.0f;
  char16 low = convert_char16_sat_rte(a * share), high = convert_char16_sat_rte(b * share);
  __global int *row = packed + (size_t)m * {row_words(groups)};
  __global char *to = (__global char *)row + g * {GROUP};
  vstore16(low, 0, to);
  vstore16(high, 0, to + 16);
  int16 sum16 = convert_int16(low) + convert_int16(high);
  int8 sum8 = sum16.lo + sum16.hi;
  int4 sum4 = sum8.lo + sum8.hi;
  float scale = most / 127.0f;
  __global float *scales = (__global float *)(row + {groups * GROUP // 4});
  scales[g] = scale;
  scales[{groups} + g] = scale * (float)((sum4.x + sum4.y) + (sum4.z + sum4.w));
}}
"""
    return jit.KernelSource(name, source, (groups, rows, 1), (1, 1, 1))


_ARGUMENTS: Final = """
    __global const uchar *restrict w, __global const float *restrict scales,
    __global const uchar *restrict zero_points)"""

# The products of a group's 32 weights and activations, summed to eight numbers. Two
# instructions where the processor has them and the compiler says so. (It does not find them by
# itself, and two loads of 16 that it has to join cost more than all the rest.) No sum of two
# products is too large for 16 bits: 15 * 127 * 2.
_GROUP_SUMS: Final = """#if defined(__has_builtin)
#if __has_builtin(__builtin_ia32_pmaddubsw256) && defined(__AVX2__)
#define BUILTIN
typedef char NAME_half __attribute__((vector_size(16)));
typedef char NAME_weights __attribute__((vector_size(32)));
typedef char NAME_loose __attribute__((vector_size(32), aligned(1)));
typedef short NAME_pairs __attribute__((vector_size(32)));
NAME_weights NAME_unpacked(uchar16 both) {
  NAME_half low = (NAME_half)(both & (uchar16)15), high = (NAME_half)(both >> (uchar16)4);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
      15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}
int8 NAME_sums(NAME_weights weights, __global const char *at) {
  NAME_weights values = *(__global const NAME_loose *)at;
  NAME_pairs pairs = __builtin_ia32_pmaddubsw256(weights, values);
  NAME_pairs ones = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return as_int8(__builtin_ia32_pmaddwd256(pairs, ones));
}
#endif
#endif
#ifndef BUILTIN
typedef struct { short16 low, high; } NAME_weights;
NAME_weights NAME_unpacked(uchar16 both) {
  NAME_weights weights = {convert_short16(both & (uchar16)15),
      convert_short16(both >> (uchar16)4)};
  return weights;
}
int8 NAME_sums(NAME_weights weights, __global const char *at) {
  short16 pairs = weights.low * convert_short16(vload16(0, at))
      + weights.high * convert_short16(vload16(0, at + 16));
  return convert_int8(pairs.even) + convert_int8(pairs.odd);
}
#endif
#undef BUILTIN
"""


def _column_kernel(rows: int, n: int, groups: int) -> jit.KernelSource:
    """Each work item sums a column of its own: for processors, which read it in order.

    The zero point is taken out of the sum: it weighs the group's sum of activations. Several
    sums go on at once, of several rows or of several groups, so that none waits for another.
    """
    at_once = min(rows, _ROWS_AT_ONCE)
    name = f"int4_columns_{rows}_{n}_{groups}"
    each_row = range(at_once)
    # One row: the groups of a step go to sums of their own.
    lanes = 1 if at_once > 1 else _GROUPS_AT_ONCE
    starts = "\n".join(
        f"  __global const char *row{r} = (__global const char *)"
        f"(x + (size_t)min(m + {r}, {rows - 1}) * {row_words(groups)});\n"
        f"  __global const float *scales{r} ="
        f" (__global const float *)(row{r} + {groups * GROUP});\n"
        f"  float4 less{r} = (float4)0.0f;\n"
        + "".join(f"  float8 sum{r}_{i} = (float8)0.0f;\n" for i in range(lanes))
        for r in each_row
    )
    step = "\n".join(
        [
            "    float4 scale = vload4(0, scales + group);",
            "    float4 zero = scale * convert_float4(vload4(0, zero_points + group));",
            *(
                f"    less{r} = fma(zero, vload4(0, scales{r} + {groups} + g), less{r});\n"
                f"    float4 each{r} = scale * vload4(0, scales{r} + g);"
                for r in each_row
            ),
            *(
                _group_step(name, i, f".s{i}", [f"sum{r}_{i % lanes}" for r in each_row])
                for i in range(_GROUPS_AT_ONCE)
            ),
        ]
    )
    rest = "\n".join(
        [
            "    float scale = scales[group];",
            "    float zero = scale * (float)zero_points[group];",
            *(
                f"    less{r}.x = fma(zero, scales{r}[{groups} + g], less{r}.x);\n"
                f"    float each{r} = scale * scales{r}[g];"
                for r in each_row
            ),
            _group_step(name, 0, "", [f"sum{r}_0" for r in each_row]),
        ]
    )
    ends = "\n".join(
        f"  {{ float8 sum = {' + '.join(f'sum{r}_{i}' for i in range(lanes))};\n"
        f"    float4 q = sum.lo + sum.hi - less{r};\n"
        f"    y[(size_t)min(m + {r}, {rows - 1}) * {n} + n] = (q.x + q.y) + (q.z + q.w); }}"
        for r in each_row
    )
    # Several kernels are one program: each with its own copy of the functions.
    source = f"""{_GROUP_SUMS.replace("NAME", name)}
__kernel void {name}(__global float *restrict y, __global const int *restrict x,{_ARGUMENTS} {{
  int n = get_global_id(0);
  int m = get_global_id(1) * {at_once};
  if (n >= {n}) return;
{starts}
  int g = 0;
  size_t group = (size_t)n * {groups};
  for (; g + {_GROUPS_AT_ONCE} <= {groups}; g += {_GROUPS_AT_ONCE}) {{
{step}
    group += {_GROUPS_AT_ONCE};
  }}
  for (; g < {groups}; ++g, ++group) {{
{rest}
  }}
{ends}
}}
"""
    size = (-(-n // _COLUMNS), -(-rows // at_once), 1)
    return jit.KernelSource(name, source, size, (_COLUMNS, 1, 1))


def _group_step(name: str, place: int, part: str, sums: list[str]) -> str:
    """Adds one group's products to the sum of each row; `part` is its part of `each`."""
    adds = "\n".join(
        f"      {total} = fma((float8)each{r}{part}, convert_float8("
        f"{name}_sums(weights, row{r} + (g + {place}) * {GROUP})), {total});"
        for r, total in enumerate(sums)
    )
    return f"""    {{
      {name}_weights weights = {name}_unpacked(vload16(0, w + (group + {place}) * 16));
{adds}
    }}"""


def _shared_kernel(rows: int, n: int, groups: int) -> jit.KernelSource:
    """The work items of a group share a column, neighbours read neighbouring weights."""
    at_once = min(rows, _ROWS_AT_ONCE)
    name = f"int4_shared_{rows}_{n}_{groups}"
    source = f"""float {name}_sum(float16 v) {{
  float8 e = v.lo + v.hi;
  float4 q = e.lo + e.hi;
  return (q.x + q.y) + (q.z + q.w);
}}
__kernel void {name}(__global float *restrict y,
    __global const float *restrict x,{_ARGUMENTS} {{
  int lane = get_local_id(0);
  int n = get_group_id(0);
  int m = get_global_id(1) * {at_once};
  __local float sums[{at_once * _LANES}];
  float total[{at_once}];
  for (int r = 0; r < {at_once}; ++r) total[r] = 0.0f;
  for (int g = lane; g < {groups}; g += {_LANES}) {{
    size_t group = (size_t)n * {groups} + g;
    uchar16 both = vload16(0, w + group * 16);
    char16 zero = (char16)(char)zero_points[group];
    float16 low = convert_float16(as_char16(both & (uchar16)15) - zero);
    float16 high = convert_float16(as_char16(both >> (uchar16)4) - zero);
    float scale = scales[group];
    #pragma unroll
    for (int r = 0; r < {at_once}; ++r) {{
      __global const float *at = x + ((size_t)min(m + r, {rows - 1}) * {groups} + g) * {GROUP};
      total[r] += scale * {name}_sum(fma(high, vload16(0, at + 16), low * vload16(0, at)));
    }}
  }}
  for (int r = 0; r < {at_once}; ++r) sums[r * {_LANES} + lane] = total[r];
  barrier(CLK_LOCAL_MEM_FENCE);
  if (lane < {at_once}) {{
    float sum = 0.0f;
    for (int i = 0; i < {_LANES}; ++i) sum += sums[lane * {_LANES} + i];
    y[(size_t)min(m + lane, {rows - 1}) * {n} + n] = sum;
  }}
}}
"""
    size = (n, -(-rows // at_once), 1)
    return jit.KernelSource(name, source, size, (_LANES, 1, 1))
