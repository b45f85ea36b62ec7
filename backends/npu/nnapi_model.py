"""A `.tflite` graph as an NNAPI model: which operators there are, and with which operands.

Written after the operand lists in the NDK's NeuralNetworksTypes.h. Weights stored as half
floats are widened here: NNAPI has no operator that widens a constant at load.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from switchgear.backends.npu import nnapi_abi as abi
from switchgear.backends.npu.nnapi_operands import OPERANDS, Refused, only_inputs
from switchgear.ipc.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from switchgear.backends.opencl.graph import Graph, GraphTensor, Operator

# ANEURALNETWORKS_<NAME> by the operator's name in a .tflite file.
_OPERATIONS: Final = {
    "ADD": 0,
    "AVERAGE_POOL_2D": 1,
    "CONCATENATION": 2,
    "CONV_2D": 3,
    "DEPTHWISE_CONV_2D": 4,
    "DEQUANTIZE": 6,
    "FULLY_CONNECTED": 9,
    "LOGISTIC": 14,
    "MAX_POOL_2D": 17,
    "MUL": 18,
    "RELU": 19,
    "RELU_N1_TO_1": 20,
    "RELU6": 21,
    "RESHAPE": 22,
    "RESIZE_BILINEAR": 23,
    "SOFTMAX": 25,
    "TANH": 28,
    "DIV": 30,
    "MEAN": 31,
    "PAD": 32,
    "SQUEEZE": 34,
    "SUB": 36,
    "TRANSPOSE": 37,
    "MAXIMUM": 65,
    "MINIMUM": 66,
    "PRELU": 71,
    "QUANTIZE": 72,
    "HARD_SWISH": 99,
}
_PLAIN: Final = {
    "float32": abi.TENSOR_FLOAT32,
    "int32": abi.TENSOR_INT32,
    "uint8": abi.TENSOR_QUANT8_ASYMM,
    "int8": abi.TENSOR_QUANT8_ASYMM_SIGNED,
}
_FOLDED: Final = "DEQUANTIZE"


class NnapiModel:
    """A finished NNAPI model; `close` frees it. It keeps the constants that it points to.

    `nodes` are the numbers in the file of the operators it holds, in its own order: those that
    only widened constants are gone. Not thread-safe.

    :raises UnsupportedModel: an operator has no counterpart; all such are named.
    :raises DriverError: the runtime refuses it.
    """

    def __init__(self, library: abi.Library, graph: Graph, *, relaxed: bool) -> None:
        self._library = library
        self._graph = graph
        self._kept: list[Any] = []
        self._operands: dict[int, int] = {}
        self._constants: dict[int, NDArray[Any]] = {}
        self._count = 0
        self.nodes: list[int] = []
        self.handle = library.create("Model_create")
        try:
            self._build(relaxed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.handle:
            self._library.free("Model", self.handle)
            self.handle = 0
            self._kept = []

    def _build(self, relaxed: bool) -> None:
        graph = self._graph
        for index in (*graph.inputs, *graph.outputs):
            try:
                self._check_type(graph.tensors[index])
            except Refused as error:
                name = graph.tensors[index].name
                raise UnsupportedModel(f"NNAPI takes no tensor {name!r} {error}") from None

        for index in graph.inputs:
            self._tensor(index)

        refused: Counter[str] = Counter()
        for number, operator in enumerate(graph.operators):
            try:
                if not self._fold(operator):
                    self._add(operator)
                    self.nodes.append(number)
            except Refused as error:
                refused[f"{operator.name} ({error})" if str(error) else operator.name] += 1

        if refused:
            listed = ", ".join(f"{name}" for name in sorted(refused)[:20])
            raise UnsupportedModel(
                f"NNAPI has no counterpart of {sum(refused.values())} of the model's "
                f"{len(graph.operators)} operators: {listed}"[:2000]
            )

        library = self._library
        inputs = abi.indices([self._operands[index] for index in graph.inputs])
        outputs = abi.indices([self._tensor(index) for index in graph.outputs])
        library.call(
            "Model_identifyInputsAndOutputs",
            self.handle,
            len(inputs),
            inputs,
            len(outputs),
            outputs,
        )
        if relaxed:
            library.call("Model_relaxComputationFloat32toFloat16", self.handle, True)

        library.call("Model_finish", self.handle)

    def _fold(self, operator: Operator) -> bool:
        """Whether the operator is a constant made wider, which then stands for it."""
        if operator.name != _FOLDED:
            return False

        source = self._graph.tensors[operator.inputs[0]]
        if source.data is None or source.dtype != "float16":
            return False

        self._constants[operator.outputs[0]] = source.data.astype(np.float32)
        return True

    def _add(self, operator: Operator) -> None:
        code = _OPERATIONS.get(operator.name)
        if code is None:
            raise Refused

        for index in (*operator.inputs, *operator.outputs):
            if index >= 0:
                self._check_type(self._graph.tensors[index])

        extra = OPERANDS.get(operator.name, only_inputs)
        # The list first: what it refuses must leave no operand behind.
        inputs = extra(self, operator)
        outputs = [self._tensor(index) for index in operator.outputs]
        self._library.call(
            "Model_addOperation",
            self.handle,
            code,
            len(inputs),
            abi.indices(inputs),
            len(outputs),
            abi.indices(outputs),
        )

    @staticmethod
    def _check_type(tensor: GraphTensor) -> None:
        if tensor.dtype not in _PLAIN and not (
            tensor.dtype == "float16" and tensor.data is not None
        ):
            raise Refused(f"of {tensor.dtype}")

        if tensor.sparsity is not None:
            raise Refused("of sparse weights")

        if tensor.dtype in ("int8", "uint8") and tensor.quantisation is None:
            raise Refused(f"of {tensor.dtype} without a scale")

    def _tensor(self, index: int) -> int:
        """The operand of a tensor of the file, added at its first use."""
        known = self._operands.get(index)
        if known is not None:
            return known

        tensor = self._graph.tensors[index]
        data = self._constants.get(index, tensor.data)
        if data is not None and data.dtype == np.float16:
            data = data.astype(np.float32)

        kind = abi.TENSOR_FLOAT32 if tensor.dtype == "float16" else _PLAIN[tensor.dtype]
        quantisation = tensor.quantisation
        scale, zero_point = 0.0, 0
        channels: abi.PerChannel | None = None
        if quantisation is not None and kind != abi.TENSOR_FLOAT32:
            if len(quantisation.scales) == 1:
                scale, zero_point = quantisation.scales[0], quantisation.zero_points[0]
            elif kind == abi.TENSOR_QUANT8_ASYMM_SIGNED:
                kind = abi.TENSOR_QUANT8_SYMM_PER_CHANNEL
                scales = np.asarray(quantisation.scales, np.float32)
                channels = abi.PerChannel(
                    quantisation.axis,
                    len(scales),
                    scales.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
                )
                self._kept.append(scales)

        # Without dimensions a tensor is of unknown rank to NNAPI, not a single number.
        operand = self._operand(kind, tensor.shape or (1,), scale, zero_point)
        if channels is not None:
            self._library.call(
                "Model_setOperandSymmPerChannelQuantParams",
                self.handle,
                operand,
                ctypes.byref(channels),
            )

        if data is not None:
            self._value(operand, data)

        self._operands[index] = operand
        return operand

    def _operand(
        self, kind: int, shape: Sequence[int], scale: float = 0.0, zero_point: int = 0
    ) -> int:
        dimensions = (ctypes.c_uint32 * len(shape))(*shape)
        described = abi.OperandType(kind, len(shape), dimensions, scale, zero_point)
        self._library.call("Model_addOperand", self.handle, ctypes.byref(described))
        self._count += 1
        return self._count - 1

    def _value(self, operand: int, data: NDArray[Any]) -> None:
        # The runtime copies small values only: the others have to stay.
        data = np.ascontiguousarray(data)
        self._kept.append(data)
        self._library.call(
            "Model_setOperandValue", self.handle, operand, data.ctypes.data, data.nbytes
        )

    # What operand lists are made of.

    def source(self, operator: Operator, place: int) -> int:
        return self._tensor(operator.inputs[place])

    def integer(self, value: int) -> int:
        operand = self._operand(abi.INT32, ())
        self._value(operand, np.asarray(value, np.int32))
        return operand

    def real(self, value: float) -> int:
        operand = self._operand(abi.FLOAT32, ())
        self._value(operand, np.asarray(value, np.float32))
        return operand

    def truth(self, value: bool) -> int:
        operand = self._operand(abi.BOOL, ())
        self._value(operand, np.asarray(value, np.bool_))
        return operand

    def vector(self, values: NDArray[Any]) -> int:
        numbers = np.asarray(values, np.int32)
        operand = self._operand(abi.TENSOR_INT32, numbers.shape)
        self._value(operand, numbers)
        return operand

    def bias(self, operator: Operator, size: int) -> int:
        """The third input, zeros where the file has none: NNAPI wants one."""
        if len(operator.inputs) > 2 and operator.inputs[2] >= 0:
            return self.source(operator, 2)

        image, weights = (self._graph.tensors[index] for index in operator.inputs[:2])
        if image.quantisation is None or weights.quantisation is None:
            operand = self._operand(abi.TENSOR_FLOAT32, (size,))
            self._value(operand, np.zeros(size, np.float32))
            return operand

        # Of weights with a scale for each channel the bias has none of its own.
        one = len(weights.quantisation.scales) == 1
        scale = image.quantisation.scales[0] * weights.quantisation.scales[0] if one else 0.0
        operand = self._operand(abi.TENSOR_INT32, (size,), scale)
        self._value(operand, np.zeros(size, np.int32))
        return operand

    def constant(self, operator: Operator, place: int) -> NDArray[Any]:
        data = self._graph.tensors[operator.inputs[place]].data
        if data is None:
            raise Refused("with a computed parameter")

        return data

    def shape(self, index: int) -> tuple[int, ...]:
        return self._graph.tensors[index].shape
