"""The C interface of NNAPI (`libneuralnetworks.so`), by ctypes.

Numbers and signatures after the NDK's NeuralNetworks.h and NeuralNetworksTypes.h, feature level
3 (Android 10), where devices can be chosen and timed, and level 4 for signed int8.
"""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass
from typing import Any, Final

from switchgear.backends.mapped import library_at
from switchgear.ipc.errors import DriverError

LIBRARY: Final = "libneuralnetworks.so"
RESULT_NAMES: Final = {
    1: "ANEURALNETWORKS_OUT_OF_MEMORY",
    2: "ANEURALNETWORKS_INCOMPLETE",
    3: "ANEURALNETWORKS_UNEXPECTED_NULL",
    4: "ANEURALNETWORKS_BAD_DATA",
    5: "ANEURALNETWORKS_OP_FAILED",
    6: "ANEURALNETWORKS_BAD_STATE",
    7: "ANEURALNETWORKS_UNMAPPABLE",
    8: "ANEURALNETWORKS_OUTPUT_INSUFFICIENT_SIZE",
    9: "ANEURALNETWORKS_UNAVAILABLE_DEVICE",
    10: "ANEURALNETWORKS_MISSED_DEADLINE_TRANSIENT",
    11: "ANEURALNETWORKS_MISSED_DEADLINE_PERSISTENT",
    12: "ANEURALNETWORKS_RESOURCE_EXHAUSTED_TRANSIENT",
    13: "ANEURALNETWORKS_RESOURCE_EXHAUSTED_PERSISTENT",
    14: "ANEURALNETWORKS_DEAD_OBJECT",
}

# Operand codes.
FLOAT32: Final = 0
INT32: Final = 1
TENSOR_FLOAT32: Final = 3
TENSOR_INT32: Final = 4
TENSOR_QUANT8_ASYMM: Final = 5
BOOL: Final = 6
TENSOR_QUANT8_SYMM_PER_CHANNEL: Final = 11
TENSOR_QUANT8_ASYMM_SIGNED: Final = 14

DEVICE_CPU: Final = 2
DEVICE_ACCELERATOR: Final = 4
DEVICE_TYPES: Final = {1: "other", 2: "cpu", 3: "gpu", 4: "accelerator"}
PREFER_SUSTAINED_SPEED: Final = 2
DURATION_ON_HARDWARE: Final = 0
# What the driver answers where it cannot tell (UINT64_MAX).
NO_DURATION: Final = (1 << 64) - 1


class OperandType(ctypes.Structure):
    """ANeuralNetworksOperandType."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("dimension_count", ctypes.c_uint32),
        ("dimensions", ctypes.POINTER(ctypes.c_uint32)),
        ("scale", ctypes.c_float),
        ("zero_point", ctypes.c_int32),
    )


class PerChannel(ctypes.Structure):
    """ANeuralNetworksSymmPerChannelQuantParams."""

    _fields_ = (
        ("channel_dimension", ctypes.c_uint32),
        ("scale_count", ctypes.c_uint32),
        ("scales", ctypes.POINTER(ctypes.c_float)),
    )


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the runtime; it lives as long as the library."""

    handle: int
    name: str
    version: str
    kind: int
    feature_level: int


_P: Final = ctypes.c_void_p
_U32: Final = ctypes.c_uint32
_I32: Final = ctypes.c_int32
_SIZE: Final = ctypes.c_size_t
_OUT: Final = ctypes.POINTER(ctypes.c_void_p)
_U32S: Final = ctypes.POINTER(ctypes.c_uint32)
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "ANeuralNetworks_getDeviceCount": (_U32S,),
    "ANeuralNetworks_getDevice": (_U32, _OUT),
    "ANeuralNetworksDevice_getName": (_P, ctypes.POINTER(ctypes.c_char_p)),
    "ANeuralNetworksDevice_getVersion": (_P, ctypes.POINTER(ctypes.c_char_p)),
    "ANeuralNetworksDevice_getType": (_P, ctypes.POINTER(_I32)),
    "ANeuralNetworksDevice_getFeatureLevel": (_P, ctypes.POINTER(ctypes.c_int64)),
    "ANeuralNetworksModel_create": (_OUT,),
    "ANeuralNetworksModel_addOperand": (_P, ctypes.POINTER(OperandType)),
    "ANeuralNetworksModel_setOperandValue": (_P, _I32, _P, _SIZE),
    "ANeuralNetworksModel_setOperandSymmPerChannelQuantParams": (
        _P,
        _I32,
        ctypes.POINTER(PerChannel),
    ),
    "ANeuralNetworksModel_addOperation": (_P, _I32, _U32, _U32S, _U32, _U32S),
    "ANeuralNetworksModel_identifyInputsAndOutputs": (_P, _U32, _U32S, _U32, _U32S),
    "ANeuralNetworksModel_relaxComputationFloat32toFloat16": (_P, ctypes.c_bool),
    "ANeuralNetworksModel_finish": (_P,),
    "ANeuralNetworksModel_getSupportedOperationsForDevices": (
        _P,
        _OUT,
        _U32,
        ctypes.POINTER(ctypes.c_bool),
    ),
    "ANeuralNetworksCompilation_createForDevices": (_P, _OUT, _U32, _OUT),
    "ANeuralNetworksCompilation_setPreference": (_P, _I32),
    "ANeuralNetworksCompilation_setCaching": (_P, ctypes.c_char_p, ctypes.c_char_p),
    "ANeuralNetworksCompilation_finish": (_P,),
    "ANeuralNetworksExecution_create": (_P, _OUT),
    "ANeuralNetworksExecution_setInput": (_P, _I32, _P, _P, _SIZE),
    "ANeuralNetworksExecution_setOutput": (_P, _I32, _P, _P, _SIZE),
    "ANeuralNetworksExecution_setMeasureTiming": (_P, ctypes.c_bool),
    "ANeuralNetworksExecution_compute": (_P,),
    "ANeuralNetworksExecution_getDuration": (_P, _I32, ctypes.POINTER(ctypes.c_uint64)),
}
_FREES: Final = (
    "ANeuralNetworksModel_free",
    "ANeuralNetworksCompilation_free",
    "ANeuralNetworksExecution_free",
)


class Library:
    """The runtime's library, opened.

    :raises DriverError: it is not there, or is older than feature level 3.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise DriverError("errno", errno.ENOENT, "ENOENT", str(error)) from None

        self._functions: dict[str, Any] = {}
        for name, arguments in (*_CALLS.items(), *((name, (_P,)) for name in _FREES)):
            try:
                function = getattr(library, name)
            except AttributeError as error:
                text = f"{path} is older than Android 10: {error}"
                raise DriverError("errno", errno.ENOSYS, "ENOSYS", text) from None

            function.argtypes = arguments
            function.restype = None if name in _FREES else ctypes.c_int
            self._functions[name] = function

        first = ctypes.cast(self._functions["ANeuralNetworksModel_create"], _P).value
        self.path = library_at(first or 0) or path

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function without its common prefix `ANeuralNetworks`.

        :raises DriverError: it returned anything but 0, with NNAPI's own number and name.
        """
        result = self._functions[f"ANeuralNetworks{name}"](*arguments)
        if result:
            known = RESULT_NAMES.get(result, f"ANEURALNETWORKS result {result}")
            raise DriverError("nnapi", result, known, f"ANeuralNetworks{name}")

    def create(self, name: str, *arguments: Any) -> int:
        """As `call`, for a function whose last argument is where its object goes."""
        made = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(made))
        return made.value or 0

    def free(self, kind: str, handle: int) -> None:
        """Frees a Model, Compilation or Execution."""
        self._functions[f"ANeuralNetworks{kind}_free"](handle)

    def devices(self) -> list[Device]:
        """All devices of the runtime, its reference CPU among them; raises DriverError."""
        count = ctypes.c_uint32()
        self.call("_getDeviceCount", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> Device:
        handle = self.create("_getDevice", index)
        name, version = ctypes.c_char_p(), ctypes.c_char_p()
        kind, level = ctypes.c_int32(), ctypes.c_int64()
        self.call("Device_getName", handle, ctypes.byref(name))
        self.call("Device_getVersion", handle, ctypes.byref(version))
        self.call("Device_getType", handle, ctypes.byref(kind))
        self.call("Device_getFeatureLevel", handle, ctypes.byref(level))
        return Device(
            handle,
            (name.value or b"").decode(errors="replace"),
            (version.value or b"").decode(errors="replace"),
            kind.value,
            level.value,
        )


def pointers(handles: list[int]) -> Any:
    """A C array of handles."""
    return (ctypes.c_void_p * len(handles))(*handles)


def indices(values: list[int]) -> Any:
    """A C array of operand numbers."""
    return (ctypes.c_uint32 * len(values))(*values)
