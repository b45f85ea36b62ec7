"""The NPU's known-answer run: a convolution of small whole numbers, exact in every format.

A convolution, because it is what NPUs are for; in int8 where the device takes no floats.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from switchgear.backends.contract import Instance, LoadRequest
from switchgear.ipc.errors import DriverError, SwitchgearError, UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIDE: Final = 4
_CHANNELS: Final = 8


class _Loader(Protocol):
    engine: str
    engine_version: str

    def load(self, request: LoadRequest) -> Instance: ...


def convolution(kind: str) -> tuple[bytes, NDArray[Any], NDArray[Any]]:
    """A model of one 1x1 convolution with an input and its exact output.

    `kind` is "float32" or "int8". Whole numbers up to 256 are exact in half precision and in
    bfloat16 too; the int8 model's products are even and its output's scale is 2.
    """
    from ai_edge_litert import schema_py_generated as schema

    from switchgear.backends.generate.graph import Model, Quantisation

    random = np.random.RandomState(5)
    shape = [1, _SIDE, _SIDE, _CHANNELS]
    x = random.randint(-3, 4, shape)
    weights = 2 * random.randint(-1, 2, (_CHANNELS, 1, 1, _CHANNELS))
    bias = 2 * random.randint(-4, 5, _CHANNELS)
    exact = np.einsum("nyxi,oi->nyxo", x, weights[:, 0, 0, :]) + bias
    quantised = kind == "int8"

    def steps(scale: float) -> Quantisation | None:
        return Quantisation((scale,)) if quantised else None

    model = Model("known answer")
    main = model.subgraph()
    source = main.input("x", kind, shape, quantisation=steps(1.0))
    target = main.output(main.tensor("y", kind, shape, quantisation=steps(2.0)))
    main.operator(
        "CONV_2D",
        [
            source,
            main.constant("weights", weights.astype(kind), quantisation=steps(1.0)),
            main.constant(
                "bias", bias.astype("int32" if quantised else kind), quantisation=steps(1.0)
            ),
        ],
        [target],
        schema.Conv2DOptionsT(padding=schema.Padding.VALID, strideW=1, strideH=1),
        version=3 if quantised else 1,
    )
    model.signature({"x": source}, {"y": target})
    if quantised:
        exact = exact // 2

    return model.to_bytes(), x.astype(kind), exact.astype(kind)


def check_convolution(backend: _Loader) -> str:
    """Runs the convolution on the backend's device, in floats where it takes them.

    :raises DriverError: it does not run, or the numbers are wrong.
    """
    try:
        return _check(backend, "float32")
    except UnsupportedModel as floats:
        try:
            return _check(backend, "int8")
        except UnsupportedModel as quantised:
            text = f"in floats: {floats.text}; in int8: {quantised.text}"
            raise DriverError("switchgear", quantised.code, quantised.name, text) from None


def _check(backend: _Loader, kind: str) -> str:
    model, x, exact = convolution(kind)
    fd = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        os.write(fd, model)
        instance = backend.load(LoadRequest(f"/proc/self/fd/{fd}"))
        try:
            target = bytearray(exact.nbytes)
            source = instance.attach_input([memoryview(bytearray(x.tobytes()))])
            instance.run(source, instance.attach_output([memoryview(target)]))
        finally:
            instance.close()
    except UnsupportedModel:
        raise
    except SwitchgearError as error:
        raise DriverError("switchgear", error.code, error.name, error.text) from None
    finally:
        os.close(fd)

    got = np.frombuffer(target, exact.dtype).reshape(exact.shape)
    if not np.array_equal(got, exact):
        wrong = int(np.count_nonzero(got != exact))
        worst = float(np.abs(got.astype(float) - exact.astype(float)).max())
        text = f"wrong numbers: {wrong} of {exact.size}, by up to {worst:g}"
        raise DriverError("delegate", 1, "kTfLiteError", text)

    return f"{backend.engine} {backend.engine_version}: {kind} convolution exact"
