"""The Vulkan backend: LiteRT's compiled models on the GPU alone."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.contract import Coverage, Instance, LoadRequest
from switchgear.backends.cpu_probe import check_known_answer
from switchgear.backends.litert.compiled import (
    CompiledInstance,
    Engine,
    buffer_types,
    check_plain,
    resize,
)
from switchgear.backends.litert.description import describe
from switchgear.backends.vulkan.adapter import check_on_gpu, identity_of, selected
from switchgear.ipc.errors import DriverError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

# What "auto" is here; whether its numbers are good enough is not decided here.
DEFAULT_PRECISION: Final = "fp16"
_NO_DEVICE: Final = "No adapters found"


class VulkanBackend:
    """Opened once in a worker; a driver is touched at the first load, probe or identity.

    The driver's own cache of compiled shaders decides whether a load is warm, and cannot be
    asked: so `load` never says that a model is not prepared. The environment variables of the
    drivers' caches are the caller's to set.
    """

    name = "vulkan"
    engine = "ai-edge-litert"
    precisions: tuple[str, ...] = ("fp16", "fp32")

    def __init__(self, options: Mapping[str, object]) -> None:
        """No option is read.

        :raises DriverError: the engine's package is missing.
        """
        del options
        self._engine = Engine()
        self.engine_version = self._engine.version
        self._adapter = ""
        self._absent: DriverError | None = None
        self._identity: Mapping[str, str] | None = None

    def identity(self) -> Mapping[str, str]:
        """Device and driver of the adapter that the engine takes; the first call opens it.

        Beside `device` and `driver`: `device_type`, and `device_uuid` and `pci_address` where
        they are known and the device's name is its only one.
        """
        if self._identity is None:
            if not self._adapter:
                with as_file(files("switchgear.backends") / "probe.tflite") as path:
                    self._compile(str(path), "fp32")

            self._identity = identity_of(self._adapter)

        return self._identity

    def probe(self) -> str:
        """Adds and multiplies small whole numbers on the GPU; the first time compiles two
        kernels of one operation, half a second on a software driver."""
        answer = check_known_answer(self)
        return f"{answer} on {self._adapter}"

    def load(self, request: LoadRequest) -> Instance:
        """Loads a model on the GPU; `auto` is fp16.

        Blocks for the driver's compiler, without letting other Python threads run; what is left
        of it comes in the first run.
        """
        precision = DEFAULT_PRECISION if request.precision == "auto" else request.precision
        if precision not in self.precisions:
            raise UnsupportedModel(
                f"the vulkan backend computes in fp16 or fp32, not {precision}"
            )

        description = describe(request)
        check_plain(description.info)
        model, said = self._compile(request.path, precision)
        resize(self._engine, model, description, request.shapes)
        # Last: other shapes could move it.
        types = self._engine.call(lambda: buffer_types(model))
        check_on_gpu(types, said, description.info)
        coverage = Coverage(description.nodes, description.nodes, 1.0)
        return CompiledInstance(self._engine, description, model, precision, coverage)

    def close(self) -> None:
        self._engine.close()

    def _compile(self, path: str, precision: str) -> tuple[Any, str]:
        if self._absent is not None:
            # The engine tells the loader's reason once; the next worker asks anew.
            raise self._absent

        package = self._engine.package
        options = package.Options(
            hardware_accelerators=package.HardwareAccelerator.GPU,
            gpu_options=package.GpuOptions(enforce_f32=precision == "fp32"),
        )
        try:
            model, said = self._engine.compile(path, options)
        except DriverError as error:
            if _NO_DEVICE in error.text:
                self._absent = error

            raise

        self._adapter = selected(said) or self._adapter
        if not self._adapter:
            raise DriverError(
                "litert",
                6,
                "kLiteRtStatusErrorNotFound",
                "the engine does not say which GPU it has taken",
            )

        return model, said
