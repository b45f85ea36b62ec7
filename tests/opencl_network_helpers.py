"""Small networks of the kinds that phones run: what stands around their convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from opencl_graph_helpers import image

from switchgear.backends.generate.graph import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Network:
    """Operators one after another; the engine finds the shapes between them."""

    def __init__(self, description: str) -> None:
        self._model = Model(description)
        self._main = self._model.subgraph()
        self._count = 0

    def input(self, *shape: int) -> int:
        return self._main.input(f"x{self._next()}", "float32", shape)

    def constant(self, value: Any, dtype: Any = np.int32) -> int:
        return self._main.constant(f"c{self._next()}", np.asarray(value, dtype))

    def weights(self, *shape: int) -> int:
        return self._main.constant(f"w{self._next()}", image(*shape, seed=self._count))

    def add(
        self, name: str, inputs: Sequence[int], options: Any = None, dtype: str = "float32"
    ) -> int:
        return self.parts(name, inputs, 1, options, dtype)[0]

    def parts(
        self,
        name: str,
        inputs: Sequence[int],
        count: int,
        options: Any = None,
        dtype: str = "float32",
    ) -> list[int]:
        results = [self._main.tensor(f"t{self._next()}", dtype, (1,)) for _ in range(count)]
        self._main.operator(name, inputs, results, options)
        return results

    def finish(self, *outputs: int) -> bytes:
        """The file, with the shapes that the engine computes."""
        for output in outputs:
            self._main.output(output)

        data = self._model.to_bytes()
        interpreter = Interpreter(
            model_content=data,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
        interpreter.allocate_tensors()
        model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
        tensors = model.subgraphs[0].tensors
        for detail in interpreter.get_tensor_details():
            # The engine adds tensors of its own behind those of the file.
            if detail["index"] < len(tensors):
                tensors[detail["index"]].shape = [int(size) for size in detail["shape"]]

        builder = flatbuffers.Builder(len(data))
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _next(self) -> int:
        self._count += 1
        return self._count


def pose_decoder() -> tuple[bytes, NDArray[np.float32]]:
    """As MoveNet: where each joint's heat is greatest, its offset there, and its score."""
    net = Network("pose decoder")
    side, joints = 4, 3
    x = net.input(1, side, side, 3 * joints)
    heat, offsets = net.parts(
        "SPLIT_V",
        [x, net.constant([joints, 2 * joints]), net.constant(-1)],
        2,
        schema.SplitVOptionsT(numSplits=2),
    )
    flat = net.add("RESHAPE", [heat, net.constant([side * side, joints])])
    best = net.add(
        "ARG_MAX",
        [flat, net.constant(0)],
        schema.ArgMaxOptionsT(outputType=schema.TensorType.INT32),
        "int32",
    )
    rows = net.add("FLOOR_DIV", [best, net.constant(side)], None, "int32")
    above = net.add("MUL", [rows, net.constant(side)], schema.MulOptionsT(), "int32")
    columns = net.add("SUB", [best, above], schema.SubOptionsT(), "int32")
    joint = net.constant(np.arange(joints))
    places = net.add(
        "PACK", [rows, columns, joint], schema.PackOptionsT(valuesCount=3, axis=1), "int32"
    )
    squeezed = net.add("RESHAPE", [offsets, net.constant([side, side, joints, 2])])
    moved = net.add("GATHER_ND", [squeezed, places], schema.GatherNdOptionsT())
    corners = net.add(
        "PACK", [rows, columns], schema.PackOptionsT(valuesCount=2, axis=1), "int32"
    )
    real = net.add("CAST", [corners], schema.CastOptionsT())
    found = net.add("ADD", [real, moved], schema.AddOptionsT())
    scaled = net.add("MUL", [found, net.constant(1 / side, np.float32)], schema.MulOptionsT())
    score = net.add(
        "REDUCE_MAX", [flat, net.constant([0])], schema.ReducerOptionsT(keepDims=False)
    )
    column = net.add("EXPAND_DIMS", [net.add("LOGISTIC", [score]), net.constant(1)])
    joined = net.add("CONCATENATION", [scaled, column], schema.ConcatenationOptionsT(axis=1))
    return net.finish(joined), image(1, side, side, 3 * joints, seed=21)


def box_detector() -> tuple[bytes, NDArray[np.float32]]:
    """As YOLO: gated activations, a pyramid, pooled context, boxes as distributions."""
    net = Network("box detector")
    side, bins = 4, 4
    x = net.input(1, side, side, 2)
    wide = _gated(net, x, 2, 4)
    left, right = net.parts(
        "SPLIT", [net.constant(3), wide], 2, schema.SplitOptionsT(numSplits=2)
    )
    pooled = net.add(
        "MAX_POOL_2D",
        [left],
        schema.Pool2DOptionsT(
            padding=schema.Padding.SAME, strideW=1, strideH=1, filterWidth=3, filterHeight=3
        ),
    )
    small = net.add(
        "STRIDED_SLICE",
        [right, *(net.constant(v) for v in ([0] * 4, [1, side, side, 2], [1, 2, 2, 1]))],
        schema.StridedSliceOptionsT(
            beginMask=0, endMask=0, ellipsisMask=0, newAxisMask=0, shrinkAxisMask=0
        ),
    )
    large = net.add(
        "RESIZE_NEAREST_NEIGHBOR",
        [small, net.constant([side, side])],
        schema.ResizeNearestNeighborOptionsT(),
    )
    merged = net.add("CONCATENATION", [pooled, large], schema.ConcatenationOptionsT(axis=3))
    head = _gated(net, merged, 4, 4 * bins)
    boxes = net.add("RESHAPE", [head, net.constant([1, side * side, 4, bins])])
    shares = net.add("SOFTMAX", [boxes], schema.SoftmaxOptionsT(beta=1.0))
    places = net.constant(np.arange(bins), np.float32)
    distances = net.add(
        "SUM",
        [net.add("MUL", [shares, places], schema.MulOptionsT()), net.constant([-1])],
        schema.ReducerOptionsT(keepDims=False),
    )
    turned = net.add(
        "TRANSPOSE", [distances, net.constant([0, 2, 1])], schema.TransposeOptionsT()
    )
    return net.finish(turned), image(1, side, side, 2, seed=22)


def attention() -> tuple[bytes, NDArray[np.float32]]:
    """As a transformer's layer: normalised rows, one head's products, GELU."""
    net = Network("attention")
    rows, width = 4, 6
    x = net.input(1, rows, width)
    keep = schema.ReducerOptionsT(keepDims=True)
    mean = net.add("MEAN", [x, net.constant([-1])], keep)
    spread = net.add("SQUARED_DIFFERENCE", [x, mean], schema.SquaredDifferenceOptionsT())
    variance = net.add("MEAN", [spread, net.constant([-1])], keep)
    root = net.add(
        "RSQRT",
        [net.add("ADD", [variance, net.constant(1e-5, np.float32)], schema.AddOptionsT())],
    )
    centred = net.add("SUB", [x, mean], schema.SubOptionsT())
    normal = net.add("MUL", [centred, root], schema.MulOptionsT())
    query, key, value = (
        net.add(
            "FULLY_CONNECTED",
            [normal, net.weights(width, width), -1],
            schema.FullyConnectedOptionsT(keepNumDims=True),
        )
        for _ in range(3)
    )
    scores = net.add("BATCH_MATMUL", [query, key], schema.BatchMatMulOptionsT(adjY=True))
    shares = net.add("SOFTMAX", [scores], schema.SoftmaxOptionsT(beta=width**-0.5))
    mixed = net.add("BATCH_MATMUL", [shares, value], schema.BatchMatMulOptionsT())
    result = net.add(
        "GELU", [net.add("ADD", [x, mixed], schema.AddOptionsT())], schema.GeluOptionsT()
    )
    return net.finish(result), image(1, rows, width, seed=23)


def _gated(net: Network, x: int, channels: int, out: int) -> int:
    """A 1x1 convolution, times its own sigmoid."""
    y = net.add(
        "CONV_2D",
        [x, net.weights(out, 1, 1, channels), net.weights(out)],
        schema.Conv2DOptionsT(padding=schema.Padding.SAME, strideW=1, strideH=1),
    )
    return net.add("MUL", [y, net.add("LOGISTIC", [y])], schema.MulOptionsT())
