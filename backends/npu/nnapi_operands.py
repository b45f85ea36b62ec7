"""The operands that NNAPI wants of each operator, from a `.tflite` operator's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from switchgear.backends.npu.nnapi_model import NnapiModel
    from switchgear.backends.opencl.graph import Operator

# Fused activations of the file that NNAPI has, by their numbers there.
_ACTIVATIONS: Final = {
    schema.ActivationFunctionType.NONE: 0,
    schema.ActivationFunctionType.RELU: 1,
    schema.ActivationFunctionType.RELU_N1_TO_1: 2,
    schema.ActivationFunctionType.RELU6: 3,
}
_PADDINGS: Final = {schema.Padding.SAME: 1, schema.Padding.VALID: 2}


class Refused(Exception):
    """Why an operator has no counterpart in NNAPI; the text follows the operator's name."""


def _number(operator: Operator, name: str, default: int = 0) -> int:
    value = operator.options.get(name, default)
    if not isinstance(value, int):
        raise Refused(f"with {name} of no number")

    return value


def _activation(operator: Operator) -> int:
    fused = _number(operator, "fusedActivationFunction")
    if fused not in _ACTIVATIONS:
        raise Refused("with a fused activation that NNAPI lacks")

    return _ACTIVATIONS[fused]


def _padding(operator: Operator) -> int:
    return _PADDINGS[_number(operator, "padding")]


def only_inputs(model: NnapiModel, operator: Operator) -> list[int]:
    return [model.source(operator, place) for place in range(len(operator.inputs))]


def _one_input(model: NnapiModel, operator: Operator) -> list[int]:
    return [model.source(operator, 0)]


def _arithmetic(model: NnapiModel, operator: Operator) -> list[int]:
    activation = _activation(operator)
    sources = [model.source(operator, 0), model.source(operator, 1)]
    return [*sources, model.integer(activation)]


def _convolution(model: NnapiModel, operator: Operator) -> list[int]:
    activation, padding = _activation(operator), _padding(operator)
    deep = operator.name == "DEPTHWISE_CONV_2D"
    weights = model.shape(operator.inputs[1])
    image = model.shape(operator.inputs[0])
    if not deep and weights[3] != image[3]:
        raise Refused("in groups")

    operands = [
        model.source(operator, 0),
        model.source(operator, 1),
        model.bias(operator, weights[3] if deep else weights[0]),
        model.integer(padding),
        model.integer(_number(operator, "strideW", 1)),
        model.integer(_number(operator, "strideH", 1)),
    ]
    if deep:
        # From the shapes: old files leave the option at 0.
        operands.append(model.integer(weights[3] // image[3]))

    operands.append(model.integer(activation))
    dilation = (
        _number(operator, "dilationWFactor", 1),
        _number(operator, "dilationHFactor", 1),
    )
    if dilation != (1, 1):
        operands += [model.truth(False), *(model.integer(each) for each in dilation)]

    return operands


def _pool(model: NnapiModel, operator: Operator) -> list[int]:
    activation, padding = _activation(operator), _padding(operator)
    return [
        model.source(operator, 0),
        model.integer(padding),
        model.integer(_number(operator, "strideW", 1)),
        model.integer(_number(operator, "strideH", 1)),
        model.integer(_number(operator, "filterWidth", 1)),
        model.integer(_number(operator, "filterHeight", 1)),
        model.integer(activation),
    ]


def _fully_connected(model: NnapiModel, operator: Operator) -> list[int]:
    activation = _activation(operator)
    if _number(operator, "weightsFormat"):
        raise Refused("of shuffled weights")

    if operator.options.get("keepNumDims") and len(model.shape(operator.outputs[0])) != 2:
        raise Refused("that keeps its dimensions")

    size = model.shape(operator.inputs[1])[0]
    return [
        model.source(operator, 0),
        model.source(operator, 1),
        model.bias(operator, size),
        model.integer(activation),
    ]


def _reshape(model: NnapiModel, operator: Operator) -> list[int]:
    # What comes out stands in the file, whatever asked for it.
    return [
        model.source(operator, 0),
        model.vector(np.asarray(model.shape(operator.outputs[0]))),
    ]


def _softmax(model: NnapiModel, operator: Operator) -> list[int]:
    beta = operator.options.get("beta", 1.0)
    if not isinstance(beta, int | float):
        raise Refused("with beta of no number")

    return [model.source(operator, 0), model.real(float(beta))]


def _concatenation(model: NnapiModel, operator: Operator) -> list[int]:
    if _activation(operator):
        raise Refused("with a fused activation")

    rank = len(model.shape(operator.outputs[0]))
    return [*only_inputs(model, operator), model.integer(_number(operator, "axis") % rank)]


def _pad(model: NnapiModel, operator: Operator) -> list[int]:
    rank = len(model.shape(operator.inputs[0]))
    amounts = model.constant(operator, 1).astype(np.int32).reshape(rank, 2)
    return [model.source(operator, 0), model.vector(amounts)]


def _resize(model: NnapiModel, operator: Operator) -> list[int]:
    _, height, width, _ = model.shape(operator.outputs[0])
    return [
        model.source(operator, 0),
        model.integer(width),
        model.integer(height),
        model.truth(False),
        model.truth(bool(operator.options.get("alignCorners"))),
        model.truth(bool(operator.options.get("halfPixelCenters"))),
    ]


def _mean(model: NnapiModel, operator: Operator) -> list[int]:
    axes = model.constant(operator, 1).astype(np.int32).reshape(-1)
    keep = bool(operator.options.get("keepDims"))
    return [model.source(operator, 0), model.vector(axes), model.integer(keep)]


def _transpose(model: NnapiModel, operator: Operator) -> list[int]:
    order = model.constant(operator, 1).astype(np.int32).reshape(-1)
    return [model.source(operator, 0), model.vector(order)]


def _squeeze(model: NnapiModel, operator: Operator) -> list[int]:
    shape = model.shape(operator.inputs[0])
    dims = operator.options.get("squeezeDims", ())
    if not isinstance(dims, tuple):
        raise Refused("with dimensions of no list")

    axes = [int(each) % len(shape) for each in dims]
    if not axes:
        axes = [axis for axis, size in enumerate(shape) if size == 1]

    return [model.source(operator, 0), model.vector(np.asarray(axes))]


OPERANDS: Final[dict[str, Callable[[NnapiModel, Operator], list[int]]]] = {
    "ADD": _arithmetic,
    "SUB": _arithmetic,
    "MUL": _arithmetic,
    "DIV": _arithmetic,
    "CONV_2D": _convolution,
    "DEPTHWISE_CONV_2D": _convolution,
    "AVERAGE_POOL_2D": _pool,
    "MAX_POOL_2D": _pool,
    "FULLY_CONNECTED": _fully_connected,
    "RESHAPE": _reshape,
    "SOFTMAX": _softmax,
    "CONCATENATION": _concatenation,
    "PAD": _pad,
    "RESIZE_BILINEAR": _resize,
    "MEAN": _mean,
    "TRANSPOSE": _transpose,
    "SQUEEZE": _squeeze,
    "LOGISTIC": _one_input,
    "TANH": _one_input,
}
