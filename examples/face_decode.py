"""What stands around the short-range face model: picture to input, outputs to faces.

The model takes 128x128 RGB in [-1, 1] and gives, for each of 896 anchors, 16 numbers
(`regressors`: box centre, box size, six key points, in pixels of the input) and a score before
its sigmoid (`classificators`). An anchor is a point of the input; a face that it sees is near
it. Needs numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

INPUT_SIDE: Final = 128

# (cells on a side, anchors in each cell), in the order of the model's rows.
_GRIDS: Final = ((16, 2), (8, 6))

KEY_POINTS: Final = ("right_eye", "left_eye", "nose", "mouth", "right_ear", "left_ear")

# Beyond it exp() overflows a float32, and the sigmoid is 0 or 1 long before.
_SCORE_LIMIT: Final = 100.0

_LOWEST_SCORE: Final = 0.5

# Boxes that share more than this of their union are one face: neighbouring anchors all see it.
_SAME_FACE_OVERLAP: Final = 0.3


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the picture lies in the model's input: pixel = (input - offset) / scale.

    `scale` is input pixels per picture pixel; the offsets are in input pixels.
    """

    scale: float
    offset_x: float
    offset_y: float


@dataclass(frozen=True, slots=True)
class Face:
    """A face in pixels of the picture; `key_points` maps the names in KEY_POINTS to (x, y)."""

    left: float
    top: float
    right: float
    bottom: float
    score: float
    key_points: dict[str, tuple[float, float]]

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.left, self.top, self.right, self.bottom


def prepare(picture: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Placement]:
    """Model input [1, 128, 128, 3] float32 of a picture [height, width, 3] uint8.

    The picture is scaled to fit, keeps its proportions and lies in the middle; the rest is
    black. Raises ValueError for another shape or dtype.
    """
    if picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
        raise ValueError(f"a picture is [height, width, 3], not {list(picture.shape)}")

    if picture.dtype != np.uint8:
        raise ValueError(f"a picture is uint8, not {picture.dtype}")

    height, width, _ = picture.shape
    scale = INPUT_SIDE / max(height, width)
    new_height = max(1, round(height * scale))
    new_width = max(1, round(width * scale))
    top = (INPUT_SIDE - new_height) // 2
    left = (INPUT_SIDE - new_width) // 2

    low = _resized(picture, new_height)
    small = _resized(low.transpose(1, 0, 2), new_width).transpose(1, 0, 2)
    inside = np.zeros((1, INPUT_SIDE, INPUT_SIDE, 3), np.float32)
    inside[0, top : top + new_height, left : left + new_width] = small
    return inside / np.float32(127.5) - np.float32(1), Placement(scale, left, top)


def anchors() -> NDArray[np.float32]:
    """[896, 2]: x and y of each anchor in [0, 1], rows from the top, cells from the left."""
    grids = []

    for cells, repeats in _GRIDS:
        centres = (np.arange(cells, dtype=np.float32) + np.float32(0.5)) / np.float32(cells)
        y, x = np.meshgrid(centres, centres, indexing="ij")
        grids.append(np.stack([x.ravel(), y.ravel()], axis=1).repeat(repeats, axis=0))

    return np.concatenate(grids)


def scores(classificators: NDArray[np.float32]) -> NDArray[np.float32]:
    """[896] in [0, 1] of [1, 896, 1], any finite or infinite values."""
    clipped = np.clip(classificators.reshape(-1), -_SCORE_LIMIT, _SCORE_LIMIT)
    return np.asarray(1 / (1 + np.exp(-clipped.astype(np.float64))), np.float32)


def decode(
    regressors: NDArray[np.float32],
    classificators: NDArray[np.float32],
    placement: Placement,
    *,
    lowest_score: float = _LOWEST_SCORE,
) -> list[Face]:
    """Faces in the picture, best first, of regressors [1, 896, 16], classificators [1, 896, 1].

    Anchors below `lowest_score` are left out. Those that see the same face become one, at the
    mean of their boxes and key points weighted by score; its score is the best of them.
    """
    every_score = scores(classificators)
    kept = every_score >= lowest_score
    score = every_score[kept]
    # Eight points a row: box centre, box size, key points. All but the size are distances from
    # the anchor.
    points = regressors.reshape(-1, 8, 2)[kept] / np.float32(INPUT_SIDE)
    points[:, [0, *range(2, 8)]] += anchors()[kept][:, None, :]
    half = points[:, 1] / 2
    boxes = np.concatenate([points[:, 0] - half, points[:, 0] + half], axis=1)

    faces = []
    open_rows = np.argsort(-score, kind="stable")

    while open_rows.size:
        best = open_rows[0]
        same = overlap(boxes[best], boxes[open_rows]) > _SAME_FACE_OVERLAP
        # A box of no area overlaps nothing, not even itself, and would stay first for ever.
        same[0] = True
        group = open_rows[same]
        open_rows = open_rows[~same]
        weights = score[group] / score[group].sum()
        faces.append(
            _face(
                weights @ boxes[group],
                np.einsum("n,npc->pc", weights, points[group, 2:]),
                float(score[best]),
                placement,
            )
        )

    return faces


def overlap(box: Any, boxes: Any) -> NDArray[np.float64]:
    """Intersection over union of a box (left, top, right, bottom) with each of boxes [n, 4]."""
    one = np.asarray(box, np.float64)
    others = np.asarray(boxes, np.float64)
    size = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    shared = np.prod(np.maximum(size, 0), axis=1)
    union = np.prod(one[2:] - one[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1) - shared
    return np.asarray(np.divide(shared, union, out=np.zeros_like(shared), where=union > 0))


def _face(
    box: NDArray[Any], key_points: NDArray[Any], score: float, placement: Placement
) -> Face:
    """From the unit square of the input to pixels of the picture."""
    offset = np.asarray([placement.offset_x, placement.offset_y])
    corners = (box.reshape(2, 2) * INPUT_SIDE - offset) / placement.scale
    pixels = (key_points * INPUT_SIDE - offset) / placement.scale
    (left, top), (right, bottom) = corners.tolist()
    named = {name: (x, y) for name, (x, y) in zip(KEY_POINTS, pixels.tolist(), strict=True)}
    return Face(left, top, right, bottom, score, named)


def _resized(rows: NDArray[Any], target: int) -> NDArray[np.float32]:
    """[target, ...] of rows [source, ...]: each new row is a weighted mean of old ones.

    The weights form a triangle that spans the new row and reaches its neighbours' middles. That
    smooths while it shrinks a picture, where picking single rows would leave noise.
    """
    source = len(rows)
    step = source / target
    reach = max(step, 1.0)
    result = np.empty((target, *rows.shape[1:]), np.float32)

    for index in range(target):
        centre = (index + 0.5) * step
        # A large photo as float32 would not fit everywhere: only the rows in reach are.
        first = max(0, int(centre - reach))
        window = rows[first : min(source, int(centre + reach) + 1)].astype(np.float32)
        distances = np.abs(np.arange(first, first + len(window)) + 0.5 - centre)
        weights = np.maximum(0, 1 - distances / reach).astype(np.float32)
        result[index] = np.tensordot(weights / weights.sum(), window, axes=1)

    return result
