"""Matrix products in float for processors: what a compiler for GPUs does not see.

Weights lie in strips of 16 columns, so that one vector of them meets one activation, and a work
item takes several rows along: a strip is read once for all of them, and no vector has to be
summed up at the end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from switchgear.backends.opencl import tinygrad_jit as jit

COLUMNS: Final = 16
# Rows of a work item: with 16 columns, all sums stay in the registers of AVX2 and of NEON.
ROWS: Final = 6


def strips(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, k] as [n/16, k, 16], columns of zeros added to the last strip."""
    n, k = weights.shape
    padded = np.zeros((padded_columns(n), k), np.float32)
    padded[:n] = weights
    return np.ascontiguousarray(padded.reshape(-1, COLUMNS, k).transpose(0, 2, 1))


def padded_columns(n: int) -> int:
    """The columns of whole strips."""
    return -(-n // COLUMNS) * COLUMNS


def product_kernel(rows: int, n: int, k: int) -> jit.KernelSource:
    """The kernel for `x` [rows, k] and weights [n, k] in strips."""
    at_once = min(rows, ROWS)
    name = f"product_{rows}_{n}_{k}"
    row = f"x + (size_t)min(m + {{r}}, {rows - 1}) * {k}"
    source = f"""__kernel void {name}(__global float *restrict y,
    __global const float *restrict x, __global const float *restrict w) {{
  int strip = get_global_id(0);
  int m = get_global_id(1) * {at_once};
  __global const float *at = w + (size_t)strip * {k * COLUMNS};
{_rows(at_once, f"  __global const float *x{{r}} = {row};")}
{_rows(at_once, "  float16 s{r} = (float16)0.0f;")}
  for (int i = 0; i < {k}; ++i) {{
    float16 v = vload16(i, at);
{_rows(at_once, "    s{r} = fma(v, (float16)x{r}[i], s{r});")}
  }}
{_rows(at_once, _store(rows, n))}
}}
"""
    groups = (-(-n // COLUMNS), -(-rows // at_once), 1)
    return jit.KernelSource(name, source, groups, (1, 1, 1))


def _rows(count: int, line: str) -> str:
    return "\n".join(line.replace("{r}", str(row)) for row in range(count))


def _store(rows: int, n: int) -> str:
    # The rows behind the last one are the last one again.
    place = f"y + (size_t)min(m + {{r}}, {rows - 1}) * {n} + strip * {COLUMNS}"
    if n % COLUMNS == 0:
        return f"  vstore16(s{{r}}, 0, {place});"

    left = n % COLUMNS
    return (
        f"  if (strip < {n // COLUMNS}) {{ vstore16(s{{r}}, 0, {place}); }} else {{"
        f" float t[{COLUMNS}]; vstore16(s{{r}}, 0, t); __global float *to = {place};"
        f" for (int c = 0; c < {left}; ++c) to[c] = t[c]; }}"
    )
