"""NPU backends in the test's own process, and models written for them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import native_build
from isolated_backend import error_shares, inputs_of, outputs_of

from switchgear.backends.contract import LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.backends.npu.backend import NpuBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from switchgear.backends.contract import Instance

# Of the largest value of the reference, in fp32.
TOLERANCE = 1e-3


def on_delegate(**own: str) -> NpuBackend:
    """The backend on the tests' external delegate, whose own options these are."""
    return NpuBackend({"delegate": str(native_build.delegate()), "delegate_options": own})


def on_nnapi(**options: Any) -> NpuBackend:
    """The backend on the tests' NNAPI runtime; SWITCHGEAR_TEST_NNAPI says what that does."""
    library = str(native_build.library("stub_neuralnetworks"))
    return NpuBackend({"provider": "nnapi", "library": library, **options})


def written(folder: Path, content: bytes) -> str:
    path = folder / "model.tflite"
    path.write_bytes(content)
    return str(path)


@contextlib.contextmanager
def loaded(
    backend: NpuBackend, path: str, precision: str = "auto", **more: Any
) -> Iterator[Instance]:
    instance = backend.load(LoadRequest(path, precision, **more))
    try:
        yield instance
    finally:
        instance.close()
        backend.close()


def worst(instance: Instance, path: str, seed: int = 1) -> float:
    """The largest difference from the CPU in any output, as a share of its largest value."""
    reference = CpuBackend({}).load(LoadRequest(path))
    try:
        assert (instance.info.inputs, instance.info.outputs) == (
            reference.info.inputs,
            reference.info.outputs,
        )
        values = inputs_of(instance.info, seed)
        found, wanted = outputs_of(instance, values), outputs_of(reference, values)
        return max(error_shares(found, wanted).values())
    finally:
        reference.close()
