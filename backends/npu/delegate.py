"""Devices behind a TFLite external delegate: a vendor's library that takes nodes of a graph."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import sysconfig
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.contract import Coverage, Instance, LoadRequest
from switchgear.backends.cpu import CpuBackend, CpuInstance
from switchgear.backends.litert.description import describe
from switchgear.backends.mapped import library_named
from switchgear.backends.npu.coverage import (
    arithmetic_of,
    check_coverage,
    coverage_of,
    nodes_in_partitions,
    wanted_share,
)
from switchgear.ipc.errors import BadConfiguration, DriverError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

# TfLiteStatus of tensorflow/lite/core/c/c_api_types.h.
TFLITE_ERROR: Final = (1, "kTfLiteError")
TFLITE_DELEGATE_ERROR: Final = (2, "kTfLiteDelegateError")
# The libraries that vendors ship, by what they call themselves.
KNOWN_DELEGATES: Final = (
    "libteflon.so",  # Mesa's, for Vivante and Rockchip NPUs
    "libvx_delegate.so",  # VeriSilicon's, for i.MX 8 and Amlogic
    "libethosu_delegate.so",  # NXP's and Arm's, for Ethos-U
    "libQnnTFLiteDelegate.so",  # Qualcomm's, for Hexagon
    "libarmnnDelegate.so",  # Arm NN, for Ethos-N and Mali
    "libneuron_stable_delegate.so",  # MediaTek's, for its APUs
)
_MAX_TEXT: Final = 2000


def usual_folders() -> tuple[str, ...]:
    """Where such libraries lie: of a distribution and of Android."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [
        "/usr/lib",
        "/usr/local/lib",
        "/vendor/lib64",
        "/system/lib64",
        "/system/vendor/lib64",
    ]
    if multiarch:
        folders.insert(1, f"/usr/lib/{multiarch}")

    return tuple(folders)


def find_delegate(folders: tuple[str, ...] | None = None) -> str:
    """The first known delegate's path, empty where there is none."""
    for folder in usual_folders() if folders is None else folders:
        for name in KNOWN_DELEGATES:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                return path

    return ""


class _Interpreters(CpuBackend):
    """Makes interpreters whose nodes the delegate has taken as far as it can."""

    def __init__(self, path: str, delegate_options: Mapping[str, str], threads: int) -> None:
        super().__init__({"threads": threads})
        self._path = path
        self._options = dict(delegate_options)

    def delegate(self) -> Any:
        """A new delegate: it serves one interpreter.

        :raises DriverError: it cannot be opened or created, with its own reason.
        """
        try:
            # First by ourselves: what the engine makes of a library that it cannot open
            # complains once more when it is freed.
            ctypes.CDLL(self._path).tflite_plugin_create_delegate  # noqa: B018
            return self._module.load_delegate(self._path, self._options)
        except OSError as error:
            raise self._not_opened(error) from None
        except AttributeError as error:
            text = f"{self._path} is no TFLite external delegate: {error}"
            raise DriverError("delegate", *TFLITE_ERROR, text[:_MAX_TEXT]) from None
        except ValueError as error:
            text = f"the delegate cannot be created: {error}"
            raise DriverError("delegate", *TFLITE_DELEGATE_ERROR, text[:_MAX_TEXT]) from None

    def interpreter(self, path: str, *, delegates: bool = True) -> Any:
        if not delegates:
            return super().interpreter(path, delegates=False)

        delegate = self.delegate()
        try:
            interpreter: Any = self._module.Interpreter(
                model_path=path,
                num_threads=self.threads,
                experimental_delegates=[delegate],
                experimental_op_resolver_type=self._module.OpResolverType.AUTO,
            )
        except (ValueError, RuntimeError, OSError) as error:
            text = f"the delegate refuses the model: {str(error).strip()}"
            raise DriverError("delegate", *TFLITE_DELEGATE_ERROR, text[:_MAX_TEXT]) from None

        return interpreter

    def _not_opened(self, error: OSError) -> DriverError:
        if not os.path.exists(self._path):
            return DriverError("errno", errno.ENOENT, "ENOENT", f"{self._path}: no such file")

        # The loader tells no number: a library that this one needs, or no library at all.
        if "cannot open shared object file" in str(error):
            return DriverError("errno", errno.ELIBACC, "ELIBACC", str(error)[:_MAX_TEXT])

        return DriverError("errno", errno.ENOEXEC, "ENOEXEC", str(error)[:_MAX_TEXT])


class DelegateInstance(CpuInstance):
    """A model whose nodes run on the device as far as the delegate takes them."""

    def __init__(self, backend: _Interpreters, request: LoadRequest, wanted: float) -> None:
        self._arithmetic = arithmetic_of(request.path)
        self._wanted = wanted
        self._on_device = Coverage(0, len(self._arithmetic), 0.0)
        super().__init__(backend, request)
        self.coverage = self._on_device

    def reset(self) -> None:
        """A new interpreter with a new delegate: as slow as a load."""
        try:
            super().reset()
        except DriverError as error:
            if error.domain != "tflite":
                raise

            # The model alone was taken by the engine before: what fails now is the delegate.
            text = f"the delegate cannot prepare the model: {error.text}"
            raise DriverError("delegate", *TFLITE_DELEGATE_ERROR, text[:_MAX_TEXT]) from None

    def _resize(self, interpreter: Any) -> None:
        super()._resize(interpreter)
        # Before the tensors are allocated: then the engine's own delegates join, whose nodes
        # look the same.
        nodes = interpreter._get_ops_details()
        count = len(self._arithmetic)
        operators, partitions = nodes[:count], nodes[count:]
        taken = nodes_in_partitions(operators, partitions)
        coverage = coverage_of(taken, self._arithmetic)
        left = Counter(str(n["op_name"]) for i, n in enumerate(operators) if i not in taken)
        check_coverage(coverage, self._wanted, left)
        self._on_device = coverage

    def _failed_run(self, error: BaseException) -> DriverError:
        failed = super()._failed_run(error)
        return DriverError("delegate", *TFLITE_ERROR, failed.text)


class DelegateProvider:
    """One external delegate's library.

    Options: `delegate`, the library's path (without it the usual places are searched);
    `delegate_options`, its own options by name; `threads` of the CPU for what it leaves;
    `min_arithmetic`.

    :raises BadConfiguration: an option is none of these kinds.
    :raises DriverError: there is no such library, or it is no delegate.
    """

    name = "delegate"
    # The model's own.
    precisions: tuple[str, ...] = ()

    def __init__(self, options: Mapping[str, object]) -> None:
        path = options.get("delegate") or find_delegate()
        own = options.get("delegate_options", {})
        threads = options.get("threads", 1)
        if not isinstance(path, str):
            raise BadConfiguration("delegate is a path")

        if not isinstance(own, dict) or not all(isinstance(key, str) for key in own):
            raise BadConfiguration("delegate_options are values by name")

        if not isinstance(threads, int) or threads < 1:
            raise BadConfiguration("threads is a positive integer")

        if not path:
            names = ", ".join(KNOWN_DELEGATES)
            raise DriverError(
                "errno",
                errno.ENODEV,
                "ENODEV",
                f"no delegate is configured and none of {names} is in "
                f"{', '.join(usual_folders())}",
            )

        self.path = path
        self._wanted = wanted_share(options)
        self._interpreters = _Interpreters(
            path, {key: str(value) for key, value in own.items()}, threads
        )
        # Opened now, so that an absent device is absent before the first model.
        self._interpreters.delegate()
        self.engine = f"{self._interpreters.engine} with {os.path.basename(path)}"
        self.engine_version = self._interpreters.engine_version
        self._identity: Mapping[str, str] | None = None

    def identity(self) -> Mapping[str, str]:
        """An external delegate tells neither device nor version: its file stands for them."""
        if self._identity is None:
            self._identity = self._identify()

        return self._identity

    def _identify(self) -> Mapping[str, str]:
        library = library_named(os.path.basename(self.path)) or os.path.realpath(self.path)
        return {
            "device": os.path.basename(self.path),
            "driver": f"{os.path.basename(library)} {file_version(library)}",
            "provider": self.name,
            "library": library,
        }

    def load(self, request: LoadRequest) -> Instance:
        """As the backend's; blocks for the vendor's compiler."""
        description = describe(request)
        instance = DelegateInstance(self._interpreters, request, self._wanted)
        found, wanted = instance.info, description.info
        if (found.inputs, found.outputs) != (wanted.inputs, wanted.outputs):
            instance.close()
            raise UnsupportedModel("the delegate changes the model's inputs or outputs")

        return instance

    def close(self) -> None:
        self._interpreters.close()


def file_version(path: str) -> str:
    """What tells one build of a library from another: a hash of its bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
