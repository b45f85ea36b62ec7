"""Tensors for `switchgear infer` from files: images through Pillow, `.npy` through numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.cli.command import CommandError, UsageError
from switchgear.daemon.cli.tables import shape_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from switchgear.client import Tensor

_CHANNELS: Final = {1: "L", 3: "RGB"}
_IMAGE_DTYPES: Final = ("float32", "float16", "uint8", "int8")
SCALES: Final[Mapping[str, tuple[float, float]]] = {"-1..1": (-1.0, 1.0), "0..1": (0.0, 1.0)}


def read_all(
    tensors: Sequence[Tensor],
    arrays: Iterable[str],
    images: Iterable[str],
    scale: str,
    *,
    zeros: bool,
) -> dict[str, NDArray[Any]]:
    """A value for each input, in the shape that it is to run with.

    `arrays` are NAME=FILE.npy; `images` are FILE or NAME=FILE. `zeros` fills what is not given.

    :raises UsageError: an input is unknown, given twice or missing, or cannot take an image.
    :raises CommandError: a file cannot be read.
    """
    import numpy as np

    specs = {tensor.name: tensor for tensor in tensors}
    values: dict[str, NDArray[Any]] = {}
    for text in arrays:
        name, path = split_pair(text, specs, "--input")
        _set(values, name, load_array(path))

    for text in images:
        name, file = _image_target(text, specs)
        _set(values, name, load_image(Path(file), specs[name], scale))

    for name, tensor in specs.items():
        if zeros and name not in values:
            values[name] = np.zeros(tensor.shape, tensor.dtype)

    missing = [name for name in specs if name not in values]
    if missing:
        image = ", --image FILE" if takes_images(specs[missing[0]]) else ""
        raise UsageError(
            f"input {missing[0]!r} is missing: --input {missing[0]}=FILE.npy{image}"
            f" or --zeros; the model takes {describe(tensors)}"
        )

    return values


def describe(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{t.name} ({t.dtype} {shape_text(t.signature)})" for t in tensors)


def split_pair(text: str, known: Iterable[str], option: str) -> tuple[str, Path]:
    """NAME=FILE, where NAME is one of the known ones and may hold a `=` itself.

    :raises UsageError: it is not of this form, or the name is unknown.
    """
    for name in sorted(known, key=len, reverse=True):
        if text.startswith(f"{name}=") and len(text) > len(name) + 1:
            return name, Path(text[len(name) + 1 :])

    names = ", ".join(repr(name) for name in known)
    raise UsageError(f"{option} {text}: say NAME=FILE, where NAME is one of {names}")


def load_array(path: Path) -> NDArray[Any]:
    """:raises CommandError: it is no `.npy` file of numbers."""
    import numpy as np

    try:
        array: Any = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CommandError(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    if not isinstance(array, np.ndarray):
        array.close()
        raise CommandError(f"{path} holds several arrays (.npz); give one .npy file each")

    return array


def load_image(path: Path, tensor: Tensor, scale: str) -> NDArray[Any]:
    """The picture in the tensor's shape and type: turned as its EXIF data says, resized.

    float32 and float16 are scaled to `scale` (a key of `SCALES`); uint8 is 0..255 as it is, and
    int8 is that less 128, which is what converters make of uint8 images.

    :raises CommandError: Pillow is missing, or the file is no picture that it reads.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise CommandError(
            "reading images needs Pillow: pip install 'switchgear[images]'"
        ) from None

    import numpy as np

    height, width, channels = tensor.shape[-3:]
    try:
        with Image.open(path) as image:
            turned = ImageOps.exif_transpose(image).convert(_CHANNELS[channels])
            resized = turned.resize((width, height), Image.Resampling.BILINEAR)
    except UnidentifiedImageError:
        raise CommandError(f"{path} is no picture that Pillow reads") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise CommandError(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    pixels = np.asarray(resized, np.uint8).reshape(tensor.shape)
    return _as_type(pixels, tensor.dtype, scale)


def _as_type(pixels: NDArray[np.uint8], dtype: str, scale: str) -> NDArray[Any]:
    import numpy as np

    if dtype == "uint8":
        return pixels

    if dtype == "int8":
        return (pixels.astype(np.int16) - 128).astype(np.int8)

    low, high = SCALES[scale]
    scaled = pixels.astype(np.float32) * np.float32((high - low) / 255) + np.float32(low)
    return scaled.astype(dtype)


def _image_target(text: str, specs: Mapping[str, Tensor]) -> tuple[str, str]:
    for name in specs:
        if text.startswith(f"{name}="):
            if not takes_images(specs[name]):
                raise UsageError(f"input {describe([specs[name]])} takes no image")

            return name, text[len(name) + 1 :]

    fitting = [name for name, tensor in specs.items() if takes_images(tensor)]
    if len(fitting) == 1:
        return fitting[0], text

    if fitting:
        raise UsageError(f"several inputs take images: say --image {fitting[0]}=FILE")

    raise UsageError(f"no input takes an image; the model takes {describe(specs.values())}")


def takes_images(tensor: Tensor) -> bool:
    """Whether it is height x width x 1 or 3 channels, alone or in a batch of one."""
    shape = tensor.shape
    return (
        len(shape) in (3, 4)
        and shape[-1] in _CHANNELS
        and shape[:-3] in ((), (1,))
        and min(shape[-3:]) > 0
        and tensor.dtype in _IMAGE_DTYPES
    )


def _set(values: dict[str, NDArray[Any]], name: str, value: NDArray[Any]) -> None:
    if name in values:
        raise UsageError(f"input {name!r} is given twice")

    values[name] = value
