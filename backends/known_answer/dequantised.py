"""A dynamic-range model with its weights as floats: what its arithmetic means.

Such a model has 8-bit or 4-bit weights and float activations. The CPU's kernels round the
activations to 8 bits at each operator, to use integer arithmetic, which costs about 1 % of the
peak. A backend that computes in floats is nearer to the truth than that, so the truth has to
come from float weights.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

_WEIGHTED: Final = (
    "CONV_2D",
    "DEPTHWISE_CONV_2D",
    "FULLY_CONNECTED",
    "CONV_3D",
    "BATCH_MATMUL",
)
# The place of the weights and of the activations among an operator's inputs.
_ACTIVATIONS: Final = 0
_WEIGHTS: Final = 1

Array = np.ndarray[Any, Any]


def has_dynamic_range(interpreter: Any) -> bool:
    """Whether an operator of the first subgraph takes float activations and 8-bit weights."""
    dtypes = {
        int(d["index"]): np.dtype(d["dtype"]).name for d in interpreter.get_tensor_details()
    }
    for operator in interpreter._get_ops_details():
        if operator["op_name"] not in _WEIGHTED or len(operator["inputs"]) < 2:
            continue

        activations, weights = (
            dtypes.get(int(operator["inputs"][n])) for n in (_ACTIVATIONS, _WEIGHTS)
        )
        if activations == "float32" and weights in ("int8", "uint8", "int4"):
            return True

    return False


def dequantised(model: bytes) -> bytes | None:
    """The same model with float weights; None where the schema's package is missing.

    Takes memory and time in proportion to the model: some seconds for 100 MB.
    """
    try:
        import flatbuffers
        from ai_edge_litert import schema_py_generated as schema
    except ImportError:
        return None

    packed = schema.ModelT.InitFromPackedBuf(model, 0)
    for subgraph in packed.subgraphs:
        made: dict[int, int] = {}
        for operator in subgraph.operators:
            if not _is_hybrid(schema, packed, subgraph, operator):
                continue

            number = int(operator.inputs[_WEIGHTS])
            if number not in made:
                tensor = _float_copy(schema, packed, subgraph.tensors[number])
                if tensor is None:
                    continue

                made[number] = len(subgraph.tensors)
                subgraph.tensors.append(tensor)

            inputs = [int(each) for each in operator.inputs]
            inputs[_WEIGHTS] = made[number]
            operator.inputs = inputs

    builder = flatbuffers.Builder(len(model))
    builder.Finish(packed.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _is_hybrid(schema: Any, packed: Any, subgraph: Any, operator: Any) -> bool:
    code = packed.operatorCodes[operator.opcodeIndex]
    number = max(code.builtinCode, code.deprecatedBuiltinCode)
    wanted = {getattr(schema.BuiltinOperator, name) for name in _WEIGHTED}
    if number not in wanted or len(operator.inputs) < 2:
        return False

    types = schema.TensorType
    activations = subgraph.tensors[operator.inputs[_ACTIVATIONS]]
    weights = subgraph.tensors[operator.inputs[_WEIGHTS]]
    return (
        activations.type == types.FLOAT32
        and weights.type in (types.INT8, types.UINT8, types.INT4)
        and weights.quantization is not None
        and weights.quantization.scale is not None
    )


def _float_copy(schema: Any, packed: Any, tensor: Any) -> Any:
    """A new tensor with a new buffer; None where the weights are not in the file."""
    data = packed.buffers[tensor.buffer].data
    if data is None or not len(data):
        return None

    stored = _stored(schema, tensor, np.asarray(data, np.uint8))
    quantisation = tensor.quantization
    scales = np.asarray(quantisation.scale, np.float32)
    zeros = quantisation.zeroPoint
    points = np.zeros(len(scales)) if zeros is None else np.asarray(zeros, np.float64)
    along = [1] * stored.ndim
    if len(scales) > 1:
        along[quantisation.quantizedDimension] = len(scales)

    values = (stored - points.reshape(along)) * scales.reshape(along)
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(values.astype(np.float32).tobytes(), np.uint8)
    packed.buffers.append(buffer)
    return schema.TensorT(
        shape=tensor.shape,
        type=schema.TensorType.FLOAT32,
        buffer=len(packed.buffers) - 1,
        name=(tensor.name or b"") + b" as floats",
        hasRank=True,
    )


def _stored(schema: Any, tensor: Any, data: Array) -> Array:
    """The integers of a tensor, in its shape."""
    shape = [int(size) for size in tensor.shape]
    if tensor.type == schema.TensorType.UINT8:
        return data.reshape(shape).astype(np.float64)

    if tensor.type == schema.TensorType.INT8:
        return data.view(np.int8).reshape(shape).astype(np.float64)

    # Two to a byte, the lower half first, each in two's complement.
    halves = np.stack([data & 15, data >> 4], axis=1).ravel()[: int(np.prod(shape))]
    values: Array = np.where(halves > 7, halves.astype(np.int16) - 16, halves)
    return values.reshape(shape).astype(np.float64)
