"""Sparse constants of a `.tflite` file: their layout, checked, and how they become dense.

The layout is a tree with one level for each dimension, in traversal order, then one for each
dimension of a block. A dense level has all its indices; a sparse one (compressed rows) lists
for each parent a segment of indices. The values follow the leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_LEVELS: Final = 16
_INDEX_TABLES: Final = {
    schema.SparseIndexVector.Int32Vector: schema.Int32Vector,
    schema.SparseIndexVector.Uint16Vector: schema.Uint16Vector,
    schema.SparseIndexVector.Uint8Vector: schema.Uint8Vector,
}


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the tree: dense with `size` indices, or sparse with both arrays."""

    size: int = 0
    segments: NDArray[np.int64] | None = None
    indices: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Sparsity:
    """`order` names the dimension of each level; from the tensor's rank on they are those of
    a block, of which `blocks` gives the tensor's dimension."""

    order: tuple[int, ...]
    blocks: tuple[int, ...]
    levels: tuple[Level, ...]


def read_sparsity(table: Any, shape: tuple[int, ...]) -> Sparsity | None:
    """The layout of a tensor of this shape, None for a dense one.

    :raises BadModel: its levels do not belong to the shape.
    """
    if table is None or not table.DimMetadataLength():
        return None

    count = table.DimMetadataLength()
    blocks_count = table.BlockMapLength()
    if count > _MAX_LEVELS or count != len(shape) + blocks_count:
        raise BadModel(f"a sparse tensor of {len(shape)} dimensions has {count} levels")

    if table.TraversalOrderLength() != count:
        raise BadModel("a sparse tensor does not say in which order its levels stand")

    order = tuple(int(d) for d in table.TraversalOrderAsNumpy())
    blocks = tuple(int(d) for d in table.BlockMapAsNumpy()) if blocks_count else ()
    if sorted(order) != list(range(count)) or not all(0 <= d < len(shape) for d in blocks):
        raise BadModel("a sparse tensor names a level that it does not have")

    if len(set(blocks)) != blocks_count:
        raise BadModel("a sparse tensor has two blocks along one dimension")

    return Sparsity(order, blocks, tuple(_level(table.DimMetadata(i)) for i in range(count)))


def dense(sparsity: Sparsity, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The dense array, flat; `values` are the stored elements.

    :raises BadModel: the layout leads outside of the values or of the shape.
    """
    size = math.prod(shape)
    positions = np.zeros(1, np.int64)
    coordinates: dict[int, NDArray[np.int64]] = {}
    for dimension, level in zip(sparsity.order, sparsity.levels, strict=True):
        parents, positions, found = _descend(level, positions, size)
        coordinates = {d: c[parents] for d, c in coordinates.items()}
        coordinates[dimension] = found

    flat = np.zeros(positions.size, np.int64)
    for dimension, length in enumerate(shape):
        found = coordinates[dimension]
        if dimension in sparsity.blocks:
            block = len(shape) + sparsity.blocks.index(dimension)
            block_size = sparsity.levels[sparsity.order.index(block)].size
            found = found * block_size + coordinates[block]

        if found.size and not (found.min() >= 0 and found.max() < length):
            raise BadModel("a sparse tensor has an element outside of its shape")

        flat = flat * length + found

    if positions.size != values.size or (
        positions.size and not (positions.min() >= 0 and positions.max() < values.size)
    ):
        raise BadModel(f"a sparse tensor has {positions.size} places for {values.size} values")

    result = np.zeros(size, values.dtype)
    result[flat] = values[positions]
    return result


def _descend(
    level: Level, positions: NDArray[np.int64], bound: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The nodes under those at `positions`: number of each one's parent, position, index."""
    if level.segments is None or level.indices is None:
        if positions.size * level.size > bound:
            raise BadModel("a sparse tensor has more elements than its shape")

        parents = np.repeat(np.arange(positions.size), level.size)
        found = np.tile(np.arange(level.size, dtype=np.int64), positions.size)
        return parents, positions[parents] * level.size + found, found

    if positions.size and positions.max() + 1 >= level.segments.size:
        raise BadModel("a sparse tensor lacks a segment")

    begins, ends = level.segments[positions], level.segments[positions + 1]
    counts = ends - begins
    if counts.size and (
        counts.min() < 0 or begins.min() < 0 or ends.max() > level.indices.size
    ):
        raise BadModel("a sparse tensor has a segment outside of its indices")

    total = int(counts.sum())
    if total > bound:
        raise BadModel("a sparse tensor has more elements than its shape")

    parents = np.repeat(np.arange(positions.size), counts)
    firsts = np.cumsum(counts) - counts
    places = np.arange(total, dtype=np.int64) - firsts[parents] + begins[parents]
    return parents, places, level.indices[places]


def _level(metadata: Any) -> Level:
    if metadata.Format() == schema.DimensionType.DENSE:
        if metadata.DenseSize() < 0:
            raise BadModel("a sparse tensor has a level of negative size")

        return Level(size=metadata.DenseSize())

    return Level(
        segments=_numbers(metadata.ArraySegmentsType(), metadata.ArraySegments()),
        indices=_numbers(metadata.ArrayIndicesType(), metadata.ArrayIndices()),
    )


def _numbers(kind: int, table: Any) -> NDArray[np.int64]:
    if table is None or kind not in _INDEX_TABLES:
        raise BadModel("a sparse tensor lacks its indices")

    reader = _INDEX_TABLES[kind]()
    reader.Init(table.Bytes, table.Pos)
    if not reader.ValuesLength():
        return np.zeros(0, np.int64)

    return np.asarray(reader.ValuesAsNumpy(), np.int64)
