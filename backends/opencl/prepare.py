"""What a preparer does: compiles a model, runs it with its real shapes, keeps the artefact."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from switchgear.backends.contract import LoadRequest
from switchgear.backends.opencl import artefact as files
from switchgear.backends.opencl.artefact import Artefact
from switchgear.backends.opencl.compiler import assemble
from switchgear.backends.opencl.model import Subject, read_subject
from switchgear.backends.opencl.runner import dispatched
from switchgear.ipc.errors import DriverError, NotPrepared

if TYPE_CHECKING:
    from switchgear.backends.opencl.device import Device


def compile_fp32(subject: Subject, key: Mapping[str, str]) -> Artefact:
    """Compiles a model as it is; blocks for seconds to minutes.

    :raises UnsupportedModel: it has an operator that the importer lacks.
    :raises DriverError: the driver refuses a kernel.
    """
    return assemble(subject.trace(), subject.info, "fp32", key)


def prepared(
    device: Device,
    request: LoadRequest,
    key: Mapping[str, str],
    path: str,
    stored: Callable[[str, Mapping[str, str]], Artefact],
) -> Artefact:
    """The artefact of this key: the one that `stored` reads from `path`, else a new one.

    It is written to `path`, where there is one. Blocks for seconds to minutes.

    :raises UnsupportedModel: this model cannot be had, with the operator or the figure.
    :raises DriverError: the driver refuses it, or it cannot be written.
    """
    with contextlib.suppress(NotPrepared):
        artefact = stored(path, key)
        if artefact.binary:
            return artefact

    subject = read_subject(device, request)
    artefact = dispatched(device, compile_fp32(subject, key))
    if path:
        try:
            files.write(artefact, path)
        except OSError as error:
            number = error.errno or errno.EIO
            name = errno.errorcode.get(number, "EIO")
            raise DriverError("errno", number, name, f"{path}: {error.strerror}") from None

    return artefact
