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
# Work items of a group, where each has a column of its own; and where they share one.
_COLUMNS: Final = 32
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

    `shared` has the work items of a group share a column: for devices whose neighbouring work
    items should read neighbouring memory.
    """
    rows, k = (int(size) for size in x.shape)
    n, groups = weights.scales.shape
    if k < groups * GROUP:
        x = x.pad(((0, 0), (0, groups * GROUP - k)))

    constants = [jit.constant(array) for array in weights.arrays]
    kernel = product_kernel(rows, n, k, shared=shared)
    return jit.own_kernel(kernel, (rows, n), "float32", [x.contiguous(), *constants])


def product_kernel(rows: int, n: int, k: int, *, shared: bool) -> jit.KernelSource:
    """The kernel for `x` [rows, k rounded up to whole groups] and weights [n, k]."""
    groups = -(-k // GROUP)
    return _shared_kernel(rows, n, groups) if shared else _column_kernel(rows, n, groups)


_ARGUMENTS: Final = """(__global float *restrict y, __global const float *restrict x,
    __global const uchar *restrict w, __global const float *restrict scales,
    __global const uchar *restrict zero_points)"""

# One group of 32: its two vectors of weights, and the sums of `ROWS` rows.
_GROUP_STEP: Final = """
    uchar16 both = vload16(0, w + ((size_t)n * GROUPS + g) * 16);
    char16 zero = (char16)(char)zero_points[(size_t)n * GROUPS + g];
    float16 low = convert_float16(as_char16(both & (uchar16)15) - zero);
    float16 high = convert_float16(as_char16(both >> (uchar16)4) - zero);
    float scale = scales[(size_t)n * GROUPS + g];
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      __global const float *at = x + (size_t)min(m + r, LAST_ROW) * (GROUPS * 32) + g * 32;
      float16 part = fma(high, vload16(0, at + 16), low * vload16(0, at));
      SUM
    }
"""


def _with_constants(text: str, rows: int, n: int, groups: int) -> tuple[str, int]:
    at_once = min(rows, _ROWS_AT_ONCE)
    values = {
        "LAST_ROW": str(rows - 1),
        "ROWS": str(at_once),
        "COLUMNS": str(n),
        "GROUPS": str(groups),
    }
    for name, value in values.items():
        text = text.replace(name, value)

    return text, at_once


def _column_kernel(rows: int, n: int, groups: int) -> jit.KernelSource:
    """Each work item sums a column of its own: for processors, which read it in order."""
    step = _GROUP_STEP.replace("SUM", "total[r] = fma((float16)scale, part, total[r]);")
    name = f"int4_columns_{rows}_{n}_{groups}"
    text = f"""__kernel void {name}{_ARGUMENTS} {{
  int n = get_global_id(0);
  int m = get_global_id(1) * ROWS;
  if (n >= COLUMNS) return;
  float16 total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = (float16)0.0f;
  for (int g = 0; g < GROUPS; ++g) {{{step}  }}
  for (int r = 0; r < ROWS; ++r) {{
    float8 e = total[r].lo + total[r].hi;
    float4 q = e.lo + e.hi;
    y[(size_t)min(m + r, LAST_ROW) * COLUMNS + n] = (q.x + q.y) + (q.z + q.w);
  }}
}}
"""
    source, at_once = _with_constants(text, rows, n, groups)
    size = (-(-n // _COLUMNS), -(-rows // at_once), 1)
    return jit.KernelSource(name, source, size, (_COLUMNS, 1, 1))


def _shared_kernel(rows: int, n: int, groups: int) -> jit.KernelSource:
    """The work items of a group share a column, neighbours read neighbouring weights."""
    step = _GROUP_STEP.replace("SUM", "total[r] += scale * SUM_OF(part);")
    name = f"int4_shared_{rows}_{n}_{groups}"
    text = f"""float SUM_OF_NAME(float16 v) {{
  float8 e = v.lo + v.hi;
  float4 q = e.lo + e.hi;
  return (q.x + q.y) + (q.z + q.w);
}}
__kernel void {name}{_ARGUMENTS} {{
  int lane = get_local_id(0);
  int n = get_group_id(0);
  int m = get_global_id(1) * ROWS;
  __local float sums[ROWS * {_LANES}];
  float total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = 0.0f;
  for (int g = lane; g < GROUPS; g += {_LANES}) {{{step}  }}
  for (int r = 0; r < ROWS; ++r) sums[r * {_LANES} + lane] = total[r];
  barrier(CLK_LOCAL_MEM_FENCE);
  if (lane < ROWS) {{
    float sum = 0.0f;
    for (int i = 0; i < {_LANES}; ++i) sum += sums[lane * {_LANES} + i];
    y[(size_t)min(m + lane, LAST_ROW) * COLUMNS + n] = sum;
  }}
}}
"""
    text = text.replace("SUM_OF_NAME", "sum_of").replace("SUM_OF", "sum_of")
    source, at_once = _with_constants(text, rows, n, groups)
    size = (n, -(-rows // at_once), 1)
    return jit.KernelSource(name, source, size, (_LANES, 1, 1))
