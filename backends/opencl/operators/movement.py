"""Operators that move elements and compute nothing: shapes, orders, cuts, borders, copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from ai_edge_litert.schema_py_generated import MirrorPadMode
from tinygrad import Tensor

from switchgear.backends.opencl.rules import ANY, Rule, volume
from switchgear.ipc.errors import BadModel, UnsupportedModel

# Above it a file of a few bytes would fill the memory.
_LONGEST_RANGE: Final = 1 << 24

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from switchgear.backends.opencl.rules import Apply, Inputs, Node


def _reshape(node: Node) -> Apply:
    if node.has(1) and node.is_known(1):
        sizes = node.numbers(1)
    else:
        given: Any = node.operator.options.get("newShape", ())
        sizes = tuple(given) if given else node.result().shape

    count = volume(node.shape(0))
    known = volume([size for size in sizes if size >= 0])
    if sum(size < 0 for size in sizes) > 1 or (-1 in sizes and (not known or count % known)):
        raise BadModel(f"{node.title}: {count} elements do not fit {list(sizes)}")

    shape = tuple(size if size >= 0 else count // known for size in sizes)
    return _to_shape(node, shape)


def _refuse_reshape(node: Node) -> str:
    given = node.operator.options.get("newShape", ())
    if node.has(1) and not node.is_known(1) and not given and not node.result().shape:
        return "a shape that is computed at run time"

    return ""


def _squeeze(node: Node) -> Apply:
    shape = node.shape(0)
    given: Any = node.operator.options.get("squeezeDims", ())
    axes = {node.axis(axis, len(shape)) for axis in given}
    if not axes:
        axes = {axis for axis, size in enumerate(shape) if size == 1}

    return _to_shape(node, [size for axis, size in enumerate(shape) if axis not in axes])


def _expand_dims(node: Node) -> Apply:
    shape = list(node.shape(0))
    axis = node.axis(_one(node, 1), len(shape) + 1)
    return _to_shape(node, [*shape[:axis], 1, *shape[axis:]])


def _to_shape(node: Node, shape: Sequence[int]) -> Apply:
    wanted = tuple(shape)
    if volume(wanted) != volume(node.shape(0)):
        raise BadModel(f"{node.title}: {list(node.shape(0))} does not fit {list(wanted)}")

    return lambda x: x(0).reshape(wanted)


def _transpose(node: Node) -> Apply:
    order = node.numbers(1)
    if sorted(order) != list(range(len(node.shape(0)))):
        raise BadModel(f"{node.title}: an order of {list(order)}")

    return lambda x: x(0).permute(order)


def _reverse(node: Node) -> Apply:
    axes = tuple(node.axis(axis, len(node.shape(0))) for axis in node.numbers(1))
    return lambda x: x(0).flip(axes)


def _slice(node: Node) -> Apply:
    shape, begins, sizes = node.shape(0), node.numbers(1), node.numbers(2)
    if not len(shape) == len(begins) == len(sizes):
        raise BadModel(f"{node.title}: {list(begins)} and {list(sizes)} of {list(shape)}")

    ends = [
        length if size < 0 else begin + size
        for length, begin, size in zip(shape, begins, sizes, strict=True)
    ]
    for length, begin, end in zip(shape, begins, ends, strict=True):
        if not 0 <= begin < end <= length:
            raise BadModel(f"{node.title}: cuts {begin} to {end} out of {length}")

    cuts = tuple(zip(begins, ends, strict=True))
    return lambda x: x(0).shrink(cuts)


def _strided_slice(node: Node) -> Apply:
    begins, ends, steps = node.numbers(1), node.numbers(2), node.numbers(3)
    if not len(begins) == len(ends) == len(steps) or 0 in steps:
        raise BadModel(f"{node.title}: cuts {begins}, {ends}, {steps}")

    shape = node.shape(0)
    index: list[Any] = []
    axis = 0
    for i, (begin, end, step) in enumerate(zip(begins, ends, steps, strict=True)):
        if _bit(node, "newAxisMask", i):
            index.append(None)
            continue

        if axis >= len(shape):
            raise BadModel(f"{node.title}: cuts {len(begins)} axes of {len(shape)}")

        if node.option("offset"):
            end = begin + end

        if _bit(node, "shrinkAxisMask", i):
            index.append(node.axis(begin, shape[axis]))
        else:
            index.append(
                slice(
                    None if _bit(node, "beginMask", i) else begin,
                    None if _bit(node, "endMask", i) else end,
                    step,
                )
            )
            if not len(range(*index[-1].indices(shape[axis]))):
                raise UnsupportedModel(f"{node.title}: cuts everything away")

        axis += 1

    chosen = tuple(index)
    return lambda x: x(0)[chosen]


def _refuse_strided_slice(node: Node) -> str:
    return "ellipsisMask" if node.option("ellipsisMask") else ""


def _bit(node: Node, mask: str, position: int) -> bool:
    return bool(node.option(mask) >> position & 1)


def _pad(node: Node) -> Apply:
    borders = _borders(node)
    if any(size < 0 for border in borders for size in border):
        raise BadModel(f"{node.title}: a negative border")

    value = _border_value(node)
    return lambda x: x(0).pad(borders, value=value)


def _border_value(node: Node) -> Any:
    """PADV2 brings it; PAD takes zero, which quantised values store as their zero point."""
    if node.has(2):
        return node.constant(2).reshape(-1)[0].item()

    quantisation = node.tensor(0).quantisation
    return quantisation.zero_points[0] if node.quantised and quantisation is not None else 0


def _mirror_pad(node: Node) -> Apply:
    borders = _borders(node)
    overlap = int(node.option("mode") == MirrorPadMode.REFLECT)
    indices = []
    for (before, after), size in zip(borders, node.shape(0), strict=True):
        if not 0 <= max(before, after) <= size - overlap or min(before, after) < 0:
            raise BadModel(f"{node.title}: a border of {before}, {after} around {size}")

        inside = np.arange(size)
        head = inside[overlap : overlap + before][::-1]
        tail = inside[::-1][overlap : overlap + after]
        indices.append((head, tail))

    def apply(x: Inputs) -> Tensor:
        value = x(0)
        for axis, (head, tail) in enumerate(indices):
            if head.size or tail.size:
                value = _mirrored(value, axis, head.size, tail.size, overlap)

        return value

    return apply


def _mirrored(x: Tensor, axis: int, before: int, after: int, overlap: int) -> Tensor:
    size = int(x.shape[axis])
    pieces = [x]
    if before:
        pieces.insert(0, _cut(x, axis, overlap, overlap + before).flip(axis))

    if after:
        pieces.append(_cut(x, axis, size - overlap - after, size - overlap).flip(axis))

    return pieces[0].cat(*pieces[1:], dim=axis)


def _cut(x: Tensor, axis: int, begin: int, end: int) -> Tensor:
    cuts = [None if i != axis else (begin, end) for i in range(x.ndim)]
    return x.shrink(tuple(cuts))


def _borders(node: Node) -> tuple[tuple[int, int], ...]:
    sizes = node.numbers(1)
    if len(sizes) != 2 * len(node.shape(0)):
        raise BadModel(f"{node.title}: borders of {len(sizes)} sizes")

    return tuple(zip(sizes[::2], sizes[1::2], strict=True))


def _tile(node: Node) -> Apply:
    counts = node.numbers(1)
    if len(counts) != len(node.shape(0)) or min(counts, default=1) < 1:
        raise BadModel(f"{node.title}: repeats {list(counts)}")

    return lambda x: x(0).repeat(counts)


def _broadcast_to(node: Node) -> Apply:
    shape = node.numbers(1)
    try:
        fits = np.broadcast_shapes(node.shape(0), shape) == shape
    except ValueError:
        fits = False

    if not fits:
        raise BadModel(f"{node.title}: {list(node.shape(0))} does not spread to {list(shape)}")

    return lambda x: x(0).expand(shape)


def _space_to_depth(node: Node) -> Apply:
    n, h, w, c = node.shape(0, rank=4)
    block = node.option("blockSize")
    if block < 1 or h % block or w % block:
        raise BadModel(f"{node.title}: blocks of {block} in {h} x {w}")

    def apply(x: Inputs) -> Tensor:
        tiles = x(0).reshape(n, h // block, block, w // block, block, c)
        return tiles.permute(0, 1, 3, 2, 4, 5).reshape(n, h // block, w // block, -1)

    return apply


def _depth_to_space(node: Node) -> Apply:
    n, h, w, c = node.shape(0, rank=4)
    block = node.option("blockSize")
    if block < 1 or c % (block * block):
        raise BadModel(f"{node.title}: blocks of {block} out of {c} channels")

    def apply(x: Inputs) -> Tensor:
        tiles = x(0).reshape(n, h, w, block, block, c // (block * block))
        return tiles.permute(0, 1, 3, 2, 4, 5).reshape(n, h * block, w * block, -1)

    return apply


def _space_to_batch(node: Node) -> Apply:
    n, *sides, rest, blocks = _block_shapes(node)
    borders = node.numbers(2)
    if len(borders) != 2 * len(blocks) or min(borders) < 0:
        raise BadModel(f"{node.title}: borders {list(borders)}")

    pairs = tuple(zip(borders[::2], borders[1::2], strict=True))
    wide = [size + sum(pair) for size, pair in zip(sides, pairs, strict=True)]
    if any(size % block for size, block in zip(wide, blocks, strict=True)):
        raise BadModel(f"{node.title}: blocks of {list(blocks)} in {wide}")

    quantisation = node.tensor(0).quantisation
    zero = quantisation.zero_points[0] if node.quantised and quantisation is not None else 0
    count = len(blocks)
    tiles = [v for size, b in zip(wide, blocks, strict=True) for v in (size // b, b)]
    order = [*range(2, 2 * count + 1, 2), 0, *range(1, 2 * count + 1, 2)]

    def apply(x: Inputs) -> Tensor:
        value = x(0).pad((None, *pairs, *[None] * len(rest)), value=zero)
        value = value.reshape(n, *tiles, *rest)
        value = value.permute(*order, *range(2 * count + 1, value.ndim))
        sizes = [size // block for size, block in zip(wide, blocks, strict=True)]
        return value.reshape(n * volume(blocks), *sizes, *rest)

    return apply


def _batch_to_space(node: Node) -> Apply:
    n, *sides, rest, blocks = _block_shapes(node)
    crops = node.numbers(2)
    count = len(blocks)
    if n % volume(blocks) or len(crops) != 2 * count or min(crops) < 0:
        raise BadModel(f"{node.title}: blocks of {list(blocks)} out of {n}, cuts {list(crops)}")

    sizes = [size * block for size, block in zip(sides, blocks, strict=True)]
    cuts = [
        (before, size - after)
        for before, after, size in zip(crops[::2], crops[1::2], sizes, strict=True)
    ]
    if any(begin >= end for begin, end in cuts):
        raise BadModel(f"{node.title}: cuts everything away")

    order = [count, *[v for i in range(count) for v in (count + 1 + i, i)]]

    def apply(x: Inputs) -> Tensor:
        value = x(0).reshape(*blocks, n // volume(blocks), *sides, *rest)
        value = value.permute(*order, *range(2 * count + 1, value.ndim))
        value = value.reshape(n // volume(blocks), *sizes, *rest)
        return value.shrink((None, *cuts, *[None] * len(rest)))

    return apply


def _block_shapes(node: Node) -> Any:
    """Batch, sides, the shape of the rest, and the block's sides."""
    shape, blocks = node.shape(0), node.numbers(1)
    if not 1 <= len(blocks) < len(shape) or min(blocks) < 1:
        raise BadModel(f"{node.title}: blocks of {list(blocks)} in {list(shape)}")

    return (*shape[: 1 + len(blocks)], shape[1 + len(blocks) :], blocks)


def _shape_of(node: Node) -> Apply:
    dtype = node.result().dtype
    value = node.place(np.asarray(node.shape(0), np.int64 if dtype == "int64" else np.int32))
    return lambda x: value


def _rank_of(node: Node) -> Apply:
    value = node.place(np.asarray(len(node.shape(0)), np.int32))
    return lambda x: value


def _fill(node: Node) -> Apply:
    shape = node.numbers(0)
    if any(size < 1 for size in shape):
        raise BadModel(f"{node.title}: a shape of {list(shape)}")

    return lambda x: x(1).reshape((1,) * len(shape)).expand(shape)


def _zeros_like(node: Node) -> Apply:
    return lambda x: x(0) * 0


def _range(node: Node) -> Apply:
    start, limit, step = (node.constant(i).reshape(-1)[0].item() for i in range(3))
    if step == 0 or not abs((limit - start) / step) <= _LONGEST_RANGE:
        raise BadModel(f"{node.title}: from {start} to {limit} by {step}")

    values = np.arange(start, limit, step, dtype=node.constant(0).dtype)
    if not values.size:
        raise UnsupportedModel(f"{node.title}: an empty result")

    placed = node.place(values)
    return lambda x: placed


def _one(node: Node, position: int) -> int:
    values = node.numbers(position)
    if len(values) != 1:
        raise BadModel(f"{node.title}: {len(values)} axes")

    return values[0]


def _moving(
    prepare: Callable[[Node], Apply], version: int, *constants: int, **more: Any
) -> Rule:
    return Rule(prepare, version=version, dtypes=ANY, constants=constants, **more)


RULES: Final[Mapping[str, Rule]] = {
    "BATCH_TO_SPACE_ND": _moving(_batch_to_space, 4, 1, 2),
    "BROADCAST_TO": _moving(_broadcast_to, 3, 1),
    "DEPTH_TO_SPACE": _moving(_depth_to_space, 2),
    "EXPAND_DIMS": _moving(_expand_dims, 1, 1),
    "FILL": _moving(_fill, 4, 0, data=(1,)),
    "MIRROR_PAD": _moving(_mirror_pad, 3, 1),
    "PAD": _moving(_pad, 4, 1),
    "PADV2": _moving(_pad, 4, 1, 2),
    "RANGE": _moving(_range, 2, 0, 1, 2),
    "RANK": _moving(_rank_of, 1, static=True),
    "RESHAPE": _moving(_reshape, 1, refuse=_refuse_reshape),
    "REVERSE_V2": _moving(_reverse, 3, 1),
    "SHAPE": _moving(_shape_of, 1, static=True),
    "SLICE": _moving(_slice, 6, 1, 2),
    "SPACE_TO_BATCH_ND": _moving(_space_to_batch, 4, 1, 2),
    "SPACE_TO_DEPTH": _moving(_space_to_depth, 2),
    "SQUEEZE": _moving(_squeeze, 2),
    "STRIDED_SLICE": _moving(_strided_slice, 8, 1, 2, 3, refuse=_refuse_strided_slice),
    "TILE": _moving(_tile, 3, 1),
    "TRANSPOSE": _moving(_transpose, 6, 1),
    "ZEROS_LIKE": _moving(_zeros_like, 1),
}
