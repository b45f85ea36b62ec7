"""The NPU backend: whichever of three ways to an NPU the device has."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from switchgear.backends.contract import Instance, LoadRequest
from switchgear.backends.npu.delegate import DelegateProvider
from switchgear.backends.npu.dispatch import DispatchProvider
from switchgear.backends.npu.nnapi import NnapiProvider
from switchgear.backends.npu.probe import check_convolution
from switchgear.ipc.errors import BadConfiguration, DriverError, UnsupportedModel


class Provider(Protocol):
    """One way to an NPU; `load` and `identity` as in the contract of a backend."""

    name: str
    engine: str
    engine_version: str
    precisions: tuple[str, ...]

    def identity(self) -> Mapping[str, str]: ...

    def load(self, request: LoadRequest) -> Instance: ...

    def close(self) -> None: ...


# In this order where none is configured: the vendor's current way, the vendor's older one, and
# what Android has deprecated.
PROVIDERS: Final[dict[str, Callable[[Mapping[str, object]], Provider]]] = {
    "dispatch": DispatchProvider,
    "delegate": DelegateProvider,
    "nnapi": NnapiProvider,
}


AUTO: Final = "auto"


class NpuBackend:
    """Opened once in a worker.

    Options: `provider` (`dispatch`, `delegate`, `nnapi`, or `auto`: a configured `delegate`
    decides, else the first that is there), `min_arithmetic` (the share of a model's
    multiply-adds that has to run on the device, 0.8 by default), and the provider's own.
    """

    name = "npu"

    def __init__(self, options: Mapping[str, object]) -> None:
        """:raises DriverError: there is no NPU, with the reason of each provider.
        :raises BadConfiguration: an option is of a wrong kind.
        """
        self.provider = _provider(options)
        self.engine = self.provider.engine
        self.engine_version = self.provider.engine_version
        self.precisions = self.provider.precisions

    def identity(self) -> Mapping[str, str]:
        """Beside `device` and `driver`: `provider`, and `library`, the path that was opened."""
        return self.provider.identity()

    def probe(self) -> str:
        """A convolution of whole numbers on the device, in floats or else in int8."""
        return check_convolution(self)

    def load(self, request: LoadRequest) -> Instance:
        """Loads a model as far as the device takes it; the rest of it runs on the CPU.

        Blocks for the vendor's compiler.

        :raises UnsupportedModel: too little of it runs on the device, with both figures.
        """
        if request.precision in ("auto", *self.precisions):
            return self.provider.load(request)

        # It computes as the model does: what is asked for has to be that.
        instance = self.provider.load(replace(request, precision="auto"))
        if instance.precision == request.precision:
            return instance

        computed = instance.precision
        instance.close()
        raise UnsupportedModel(
            f"the NPU computes this model in {computed}, not {request.precision}"
        )

    def close(self) -> None:
        self.provider.close()


def _provider(options: Mapping[str, object]) -> Provider:
    wanted = options.get("provider", AUTO)
    if wanted == AUTO and options.get("delegate"):
        wanted = "delegate"

    if wanted != AUTO:
        if wanted not in PROVIDERS:
            raise BadConfiguration(f"provider is one of {', '.join(PROVIDERS)}")

        return PROVIDERS[str(wanted)](options)

    reasons = []
    for name, opened in PROVIDERS.items():
        try:
            return opened(options)
        except DriverError as error:
            reasons.append(f"{name}: {error}")

    raise DriverError("errno", errno.ENODEV, "ENODEV", "; ".join(reasons))
