"""Windows that slide over height and width: sizes, steps, and the padding around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ai_edge_litert.schema_py_generated import Padding

from switchgear.ipc.errors import BadModel, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.backends.opencl.rules import Node


@dataclass(frozen=True, slots=True)
class Window:
    """Sizes, steps and dilation as (height, width). `padding` is left, right, top, bottom, and
    negative where the last rows or columns are not used."""

    size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]
    result: tuple[int, int]


def window(
    node: Node, source: Sequence[int], size: tuple[int, int], *, dilation: tuple[int, int]
) -> Window:
    """The windows of an operator over `source` (height, width).

    :raises BadModel: a size or step is not positive, or no window fits.
    """
    stride = (node.option("strideH"), node.option("strideW"))
    rows = _side(node, source[0], size[0], stride[0], dilation[0])
    columns = _side(node, source[1], size[1], stride[1], dilation[1])
    return Window(
        size,
        stride,
        dilation,
        padding=(columns[0], columns[1], rows[0], rows[1]),
        result=(rows[2], columns[2]),
    )


def same_padding(source: int, size: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Elements added before and after, so that there are ceil(source / stride) windows."""
    count = -(-source // stride)
    total = max((count - 1) * stride + (size - 1) * dilation + 1 - source, 0)
    return total // 2, total - total // 2


def _side(
    node: Node, source: int, size: int, stride: int, dilation: int
) -> tuple[int, int, int]:
    if min(size, stride, dilation, source) < 1:
        raise BadModel(f"{node.title}: a window of {size}, step {stride}, dilation {dilation}")

    extent = (size - 1) * dilation + 1
    kind = node.option("padding")
    if kind == Padding.SAME:
        before, after = same_padding(source, size, stride, dilation)
    elif kind == Padding.VALID:
        before = after = 0
    else:
        raise UnsupportedModel(f"{node.title}: padding {kind}")

    count = (source + before + after - extent) // stride + 1
    if count < 1:
        raise BadModel(f"{node.title}: a window of {extent} over {source}")

    return before, after, count
