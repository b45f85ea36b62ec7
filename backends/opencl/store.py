"""Where a model's artefacts lie in its folder of prepared files, and when one is still good."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Final

from switchgear.backends.contract import LoadRequest
from switchgear.backends.opencl import artefact as files
from switchgear.backends.opencl.artefact import Artefact, BadArtefactError
from switchgear.ipc.errors import DriverError, NotPrepared

_SUFFIX: Final = ".clart"
_CHUNK_BYTES: Final = 1 << 20
# Counts what compiles models here: other kernels of our own, other settings of tinygrad.
_COMPILER_VERSION: Final = 4


def artefact_path(request: LoadRequest, precision: str) -> str:
    """The file of this precision and these shapes; empty where the request names no folder."""
    if not request.cache:
        return ""

    shapes = _shapes_text(request)
    name = hashlib.sha256(shapes.encode()).hexdigest()[:16] if request.shapes else "default"
    return os.path.join(request.cache, f"opencl-{precision}-{name}{_SUFFIX}")


def _shapes_text(request: LoadRequest) -> str:
    return json.dumps({name: list(shape) for name, shape in sorted(request.shapes.items())})


def artefact_key(
    request: LoadRequest, precision: str, identity: Mapping[str, str], engine_version: str
) -> dict[str, str]:
    """What an artefact for this request has to have been compiled from and for.

    :raises OSError: the model cannot be read.
    """
    return {
        "format": f"{files.FORMAT_VERSION}.{_COMPILER_VERSION}",
        "tinygrad": engine_version,
        **identity,
        "model_sha256": _file_sha256(request.path),
        "precision": precision,
        "shapes": _shapes_text(request),
    }


def _file_sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)

    return digest.hexdigest()


def read_stored(path: str, key: Mapping[str, str]) -> Artefact:
    """The artefact of this key in a file; a damaged file is deleted.

    :raises NotPrepared: there is none, or it is another's.
    :raises OSError: the file cannot be read.
    """
    if not path:
        raise NotPrepared("no folder of prepared files is given")

    try:
        artefact = files.read(path)
    except FileNotFoundError:
        raise NotPrepared("the model has not been compiled for OpenCL") from None
    except BadArtefactError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)

        raise NotPrepared(f"the compiled model was unusable: {error}") from None

    for name, want in key.items():
        have = artefact.key.get(name, "")
        if have != want:
            raise NotPrepared(f"the model was compiled for {name} {have!r}, not {want!r}")

    return artefact


def save(path: str, artefact: Artefact) -> None:
    """Writes an artefact, where there is a path.

    :raises DriverError: it cannot be written, with errno's code.
    """
    if not path:
        return

    try:
        files.write(artefact, path)
    except OSError as error:
        number = error.errno or errno.EIO
        name = errno.errorcode.get(number, "EIO")
        raise DriverError("errno", number, name, f"{path}: {error.strerror}") from None


def drop_binary(path: str, artefact: Artefact) -> None:
    """Deletes the program's binary from the file; a file that cannot be written stays."""
    with contextlib.suppress(OSError):
        files.write(files.without_binary(artefact), path)
