"""LiteRT's failures as errors of ours: by the numbers of its C API, or the driver's own."""

from __future__ import annotations

import re
from typing import Final

from switchgear.backends.litert.said import reasons
from switchgear.ipc.errors import DriverError

# LiteRtStatus of litert/c/litert_common.h, version 2.3.
STATUS_CODES: Final = {
    "kLiteRtStatusErrorInvalidArgument": 1,
    "kLiteRtStatusErrorMemoryAllocationFailure": 2,
    "kLiteRtStatusErrorRuntimeFailure": 3,
    "kLiteRtStatusErrorMissingInputTensor": 4,
    "kLiteRtStatusErrorUnsupported": 5,
    "kLiteRtStatusErrorNotFound": 6,
    "kLiteRtStatusErrorTimeoutExpired": 7,
    "kLiteRtStatusErrorWrongVersion": 8,
    "kLiteRtStatusErrorUnknown": 9,
    "kLiteRtStatusErrorAlreadyExists": 10,
    "kLiteRtStatusCancelled": 100,
    "kLiteRtStatusErrorFileIO": 500,
    "kLiteRtStatusErrorInvalidFlatbuffer": 501,
    "kLiteRtStatusErrorDynamicLoading": 502,
    "kLiteRtStatusErrorSerialization": 503,
    "kLiteRtStatusErrorCompilation": 504,
}
_NAMES: Final = {code: name for name, code in STATUS_CODES.items()}
_DEFAULT: Final = "kLiteRtStatusErrorRuntimeFailure"
# VkResult of vulkan_core.h, its errors that a compute program can meet.
VULKAN_CODES: Final = {
    "VK_ERROR_OUT_OF_HOST_MEMORY": -1,
    "VK_ERROR_OUT_OF_DEVICE_MEMORY": -2,
    "VK_ERROR_INITIALIZATION_FAILED": -3,
    "VK_ERROR_DEVICE_LOST": -4,
    "VK_ERROR_MEMORY_MAP_FAILED": -5,
    "VK_ERROR_LAYER_NOT_PRESENT": -6,
    "VK_ERROR_EXTENSION_NOT_PRESENT": -7,
    "VK_ERROR_FEATURE_NOT_PRESENT": -8,
    "VK_ERROR_INCOMPATIBLE_DRIVER": -9,
    "VK_ERROR_TOO_MANY_OBJECTS": -10,
    "VK_ERROR_FORMAT_NOT_SUPPORTED": -11,
    "VK_ERROR_FRAGMENTED_POOL": -12,
    "VK_ERROR_UNKNOWN": -13,
}
_VULKAN_ERROR: Final = re.compile(r"failed with (VK_ERROR_\w+)")
_CODE: Final = re.compile(r"\bcode=(\d+)")
_PLACE: Final = re.compile(r"^\W*(?:TensorBufferWrapper error: .*message=)?ERROR: \[\S+\]\s*")
MAX_TEXT_CHARACTERS: Final = 2000


def driver_error(error: BaseException, said: str) -> DriverError:
    """The error of a failed call: of the driver where it was named, else of LiteRT.

    `said` is what the call wrote to standard error.
    """
    own = own_words(error)
    text = "; ".join(dict.fromkeys([*reasons(said), *own]))[:MAX_TEXT_CHARACTERS]
    found = _VULKAN_ERROR.search(said)
    if found is not None and found[1] in VULKAN_CODES:
        return DriverError("vulkan", VULKAN_CODES[found[1]], found[1], text)

    named = next((name for name in STATUS_CODES if name in str(error)), "")
    code = _CODE.search(str(error))
    if not named and code is not None:
        named = _NAMES.get(int(code[1]), "")

    name = named or _DEFAULT
    return DriverError("litert", STATUS_CODES[name], name, text or str(error).strip())


def own_words(error: BaseException) -> list[str]:
    """What an exception of LiteRT says beside places in its source."""
    lines = (_PLACE.sub("", line).strip(" └\n") for line in str(error).splitlines())
    return [line for line in lines if line]
