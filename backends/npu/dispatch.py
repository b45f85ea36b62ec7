"""NPUs behind LiteRT's own interface: a vendor's compiler plugin and its dispatch library."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from switchgear.backends.contract import Coverage, Instance, LoadRequest
from switchgear.backends.litert.compiled import (
    PARTITIONED,
    CompiledInstance,
    Engine,
    buffer_types,
    check_plain,
    resize,
)
from switchgear.backends.litert.description import describe
from switchgear.backends.npu.coverage import wanted_share
from switchgear.ipc.errors import BadConfiguration, DriverError, UnsupportedModel

# LiteRtTensorBufferType: 1 is memory of the host, which is what the CPU takes.
_HOST_MEMORY: Final = 1
INTEL: Final = "intel_openvino"
INTEL_DEVICES: Final = ("NPU", "GPU", "CPU")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A vendor's two libraries; `folder` is their name in the engine's package."""

    folder: str
    compiler: str
    dispatch: str


def find_plugins(package_folder: str) -> list[Plugin]:
    """The vendors of the package that have both libraries for this processor."""
    root = os.path.join(package_folder, "vendors")
    found = []
    for folder in sorted(os.listdir(root)) if os.path.isdir(root) else ():
        paths = [
            _library(os.path.join(root, folder, kind), start)
            for kind, start in (
                ("compiler", "libLiteRtCompilerPlugin_"),
                ("dispatch", "libLiteRtDispatch_"),
            )
        ]
        if all(paths):
            found.append(Plugin(folder, *paths))

    return found


def _library(folder: str, start: str) -> str:
    if os.path.isdir(folder):
        for name in sorted(os.listdir(folder)):
            if name.startswith(start) and name.endswith(".so"):
                return os.path.join(folder, name)

    return ""


class DispatchProvider:
    """One vendor's plugin; whole models only, as the engine is not to mix in its CPU.

    Options: `vendor`, the plugin's folder in the engine's package (`intel_openvino`,
    `qualcomm`, ...; without it the first one whose libraries open), and for Intel's `device`:
    `NPU`, `GPU` or `CPU`; the last tests the path and accelerates nothing.

    :raises BadConfiguration: an option is of a wrong kind.
    :raises DriverError: no plugin or no device of it is here, with the reason of each.
    """

    name = "dispatch"
    # How NPUs compute what is float in a model; the engine lets nobody choose.
    precisions: tuple[str, ...] = ("fp16",)

    def __init__(self, options: Mapping[str, object]) -> None:
        wanted_share(options)
        vendor, device = options.get("vendor", ""), options.get("device", INTEL_DEVICES[0])
        if not isinstance(vendor, str):
            raise BadConfiguration("vendor is the name of a plugin")

        if device not in INTEL_DEVICES:
            raise BadConfiguration(f"device is one of {', '.join(INTEL_DEVICES)}")

        self._device = str(device)
        self.plugin, self._identity = _open(vendor, self._device)
        self._engine = Engine(
            {
                "compiler_plugin_path": os.path.dirname(self.plugin.compiler),
                "dispatch_library_path": os.path.dirname(self.plugin.dispatch),
            }
        )
        # Said wherever the engine's name is shown.
        mark = " on its CPU device, no acceleration" if self._on_cpu else ""
        self.engine = f"ai-edge-litert with {self.plugin.folder}{mark}"
        self.engine_version = self._engine.version

    @property
    def _on_cpu(self) -> bool:
        return self.plugin.folder == INTEL and self._device == "CPU"

    def identity(self) -> Mapping[str, str]:
        return self._identity

    def load(self, request: LoadRequest) -> Instance:
        description = describe(request)
        check_plain(description.info)
        package = self._engine.package
        options = package.Options(hardware_accelerators=package.HardwareAccelerator.NPU)
        if self.plugin.folder == INTEL:
            graph_backend = package.IntelOpenVinoOptions.GRAPH_BACKEND[self._device]
            options.intel_openvino_options.graph_backend = graph_backend

        model, said = self._engine.compile(request.path, options)
        resize(self._engine, model, description, request.shapes)
        found = PARTITIONED.search(said)
        taken, total = (int(found["taken"]), int(found["total"])) if found else (0, 0)
        if not found or taken < total or _HOST_MEMORY in buffer_types(model):
            raise UnsupportedModel(
                f"{taken} of {total or description.nodes} nodes run on the device"
            )

        precision = "int8" if description.precision == "int8" else self.precisions[0]
        coverage = Coverage(taken, total, 1.0)
        return CompiledInstance(self._engine, description, model, precision, coverage)

    def close(self) -> None:
        self._engine.close()


def _open(vendor: str, device: str) -> tuple[Plugin, Mapping[str, str]]:
    """The first plugin whose libraries and device are there, and what it is.

    :raises DriverError: there is none.
    """
    spec = importlib.util.find_spec("ai_edge_litert")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    plugins = [plugin for folder in folders for plugin in find_plugins(folder)]
    if vendor:
        plugins = [plugin for plugin in plugins if plugin.folder == vendor]

    reasons = []
    for plugin in plugins:
        try:
            return plugin, _identify(plugin, device)
        except DriverError as error:
            reasons.append(f"{plugin.folder}: {error.text}")

    text = "; ".join(reasons) or f"no plugin {vendor or 'of any vendor'} for this processor"
    raise DriverError("errno", errno.ENODEV, "ENODEV", text)


def _identify(plugin: Plugin, device: str) -> Mapping[str, str]:
    identity = {"provider": "dispatch", "library": plugin.dispatch}
    if plugin.folder == INTEL:
        # Its import opens the libraries that both of the plugin's need.
        identity |= _openvino(device)

    for path in (plugin.compiler, plugin.dispatch):
        try:
            ctypes.CDLL(path)
        except OSError as error:
            raise DriverError("errno", errno.ELIBACC, "ELIBACC", str(error)) from None

    return {"device": plugin.folder, "driver": plugin.folder, **identity}


def _openvino(device: str) -> dict[str, str]:
    try:
        openvino: Any = importlib.import_module("openvino")
    except Exception as error:  # an extension built for another numpy raises anything
        raise DriverError("errno", errno.ENOENT, "ENOENT", f"openvino: {error}") from None

    try:
        core = openvino.Core()
        devices = list(core.available_devices)
        if device not in devices:
            text = f"OpenVINO has no device {device} here, only {', '.join(devices)}"
            raise DriverError("errno", errno.ENODEV, "ENODEV", text)

        name = str(core.get_property(device, "FULL_DEVICE_NAME"))
        driver = f"OpenVINO {openvino.get_version()}"
        if device == "NPU":
            driver += f", driver {core.get_property(device, 'NPU_DRIVER_VERSION')}"
    except RuntimeError as error:
        raise DriverError("errno", errno.ENODEV, "ENODEV", str(error)[:2000]) from None

    mark = " (CPU device, no acceleration)" if device == "CPU" else ""
    return {"device": f"{name}{mark}", "driver": driver}
