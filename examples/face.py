"""Finds faces in a photo through the daemon, the way an app would.

    python examples/face.py                      the astronaut of scikit-image
    python examples/face.py --image photo.jpg --json
    python examples/face.py --socket /run/switchgear/switchgear.sock

Without --socket it starts a daemon of its own and stops it at the end. The result goes to
stdout, progress to stderr, the photo with the faces drawn in to out/. Exit status: 0 a face was
found, 1 none was or something failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from face_decode import Face, decode, prepare
from own_daemon import DaemonError, running_daemon
from packages import ASTRONAUT, FACE_MODEL, FetchError, fetch, to_stderr

from switchgear.client import connect
from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL_NAME: Final = "face_detection_short_range"
OUT: Final = Path(__file__).resolve().parent.parent / "out"

# The first inference of an instance sets up what the later ones use.
_RUNS: Final = 5


class PictureError(Exception):
    """The picture cannot be read, or Pillow is not there."""


def detect(socket: Path, model: Path, picture: NDArray[np.uint8]) -> dict[str, Any]:
    """Faces in a picture [height, width, 3] and how the daemon found them; blocks.

    Raises SwitchgearError.
    """
    pixels, placement = prepare(picture)

    with connect(socket) as client:
        to_stderr(f"loading {model.name} ({model.stat().st_size} bytes)")
        handle = client.load_model(model, name=MODEL_NAME)
        to_stderr("the model serves; running it")

        with client.open_session(handle, slots=2) as session:
            latencies_ms = []

            for _ in range(_RUNS):
                start = time.perf_counter()
                result = session.run({"input": pixels})
                latencies_ms.append((time.perf_counter() - start) * 1000)
                faces = decode(
                    np.asarray(result["regressors"]),
                    np.asarray(result["classificators"]),
                    placement,
                )

            return {
                "faces": [asdict(face) for face in faces],
                "backend": result.backend,
                "precision": result.precision,
                "first_latency_ms": latencies_ms[0],
                "latency_ms": sorted(latencies_ms)[_RUNS // 2],
                "queue_ms": result.queue_ms,
                "run_ms": result.run_ms,
            }


def read_picture(path: Path) -> NDArray[np.uint8]:
    """[height, width, 3] RGB, turned as its EXIF data says. Raises PictureError."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise PictureError("Pillow is missing: pip install 'switchgear[images]'") from error

    try:
        with Image.open(path) as image:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise PictureError(f"cannot read {path}: {error}") from error


def write_annotated(picture: NDArray[np.uint8], faces: list[Face], path: Path) -> None:
    """Writes the picture as PNG, with box, score and key points of each face drawn in."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    line = max(2, max(image.size) // 256)

    for face in faces:
        draw.rectangle(face.box, outline=(0, 255, 0), width=line)
        draw.text((face.left, face.top - 14), f"{face.score:.2f}", fill=(0, 255, 0))

        for x, y in face.key_points.values():
            draw.ellipse((x - line, y - line, x + line, y + line), fill=(255, 64, 64))

    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")


def as_text(found: dict[str, Any]) -> str:
    """What people read: a line for each face, and one for how it was found."""
    lines = [
        f"face ({face['left']:.0f}, {face['top']:.0f})-"
        f"({face['right']:.0f}, {face['bottom']:.0f})  score {face['score']:.2f}"
        for face in found["faces"]
    ]
    return "\n".join(
        [
            *(lines or ["no face"]),
            f"backend {found['backend']}, precision {found['precision']}, latency"
            f" {found['latency_ms']:.2f} ms (median of {_RUNS}; first"
            f" {found['first_latency_ms']:.2f}, last: queue {found['queue_ms']:.2f}, run"
            f" {found['run_ms']:.2f})",
            f"annotated: {found['annotated']}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Find faces in a photo through the Switchgear daemon.",
        epilog="example: python examples/face.py --image photo.jpg --json",
    )
    parser.add_argument("--image", type=Path, help="a photo (default: astronaut.png)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--socket", type=Path, help="a running daemon (default: start one)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the annotated PNG")
    options = parser.parse_args(argv)

    try:
        model = fetch(FACE_MODEL)
        source = options.image or fetch(ASTRONAUT)
        picture = read_picture(source)
        to_stderr(f"{source.name}: {picture.shape[1]} x {picture.shape[0]} pixels")

        with ExitStack() as stack:
            socket = options.socket

            if socket is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="face-")))
                socket = stack.enter_context(running_daemon(folder, report=to_stderr))

            found = detect(socket, model, picture)

        found["image"] = str(source)
        found["annotated"] = str(options.out / f"{source.stem}_faces.png")
        faces = [Face(**face) for face in found["faces"]]
        write_annotated(picture, faces, Path(found["annotated"]))
    except (FetchError, PictureError, DaemonError, SwitchgearError, OSError) as error:
        to_stderr(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130

    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0 if faces else 1


if __name__ == "__main__":
    sys.exit(main())
