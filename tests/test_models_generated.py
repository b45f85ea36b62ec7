"""Generated models through a real daemon: shapes, state, bounds and room of outputs."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from backend_helpers import custom, double, recurrent
from daemon_process import DaemonProcess

from switchgear.backends import generate
from switchgear.client import connect
from switchgear.ipc.errors import (
    BackendFailed,
    BadModel,
    BadShape,
    OutputTooLarge,
    Overloaded,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from switchgear.client import Client, Session

pytestmark = pytest.mark.engine

CONFIG = """
[cpu]
threads = 1
[fingerprint]
enabled = false
"""
INSTANCES_PER_MODEL = 8


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Comparing arrays leaves cycles that hold the session's memory."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with DaemonProcess(config=CONFIG) as daemon, connect(daemon.socket) as client:
        yield client


def test_sessions_choose_their_shapes(client: Client) -> None:
    model = client.load_model(generate.dynamic_batch(), "batch")
    factors = np.arange(1, 5, dtype=np.float32)
    with (
        client.open_session(model) as one,
        client.open_session(model, input_shapes={"x": (3, 4)}) as three,
        client.open_session(model, input_shapes={"x": (64, 4)}) as many,
        client.open_session(model, input_shapes={"x": (3, 4)}) as three_again,
    ):
        for session, rows in ((one, 1), (three, 3), (many, 64), (three_again, 3)) * 2:
            x = np.linspace(-rows, rows, rows * 4, dtype=np.float32).reshape(rows, 4)
            result = session.run({"x": x})["y"]

            assert result.shape == (rows, 4)
            np.testing.assert_allclose(np.asarray(result), x * factors + 1, rtol=1e-6)

    client.unload_model(model)


@pytest.mark.parametrize(
    "shapes", [{"x": (3, 5)}, {"x": (3,)}, {"y": (3, 4)}], ids=["fixed", "rank", "name"]
)
def test_shapes_that_the_model_fixes_are_refused(
    shapes: dict[str, tuple[int, ...]], client: Client
) -> None:
    model = client.load_model(generate.dynamic_batch())
    with pytest.raises(BadShape):
        client.open_session(model, input_shapes=shapes)

    client.unload_model(model)


def test_a_shape_that_needs_too_much_memory_is_refused(client: Client) -> None:
    model = client.load_model(generate.dynamic_batch())
    with pytest.raises(BadShape, match=r"memory|refuses"):
        client.open_session(model, input_shapes={"x": (1 << 27, 4)})

    client.unload_model(model)


@pytest.mark.parametrize(
    ("content", "output"),
    [(generate.accumulator(2), "total"), (recurrent(), "y")],
    ids=["variable", "recurrent"],
)
def test_each_session_has_a_state_of_its_own(
    content: bytes, output: str, client: Client
) -> None:
    model = client.load_model(content)
    assert model.state
    shape = model.inputs[0].shape
    with client.open_session(model) as one, client.open_session(model) as two:
        for number in range(1, 4):
            first = one.run({"x": np.full(shape, 1, np.float32)})
            assert first.reason == "pinned"
            assert np.all(np.asarray(first[output]) == number)
            assert np.all(
                np.asarray(two.run({"x": np.full(shape, 5, np.float32)})[output]) == 5 * number
            )

        fresh = one.run({"x": np.full(shape, 1, np.float32)}, reset=True)
        assert np.all(np.asarray(fresh[output]) == 1)
        kept = two.run({"x": np.full(shape, 5, np.float32)})
        assert np.all(np.asarray(kept[output]) == 20)

    with client.open_session(model) as three:
        begun = three.run({"x": np.full(shape, 2, np.float32)})
        assert np.all(np.asarray(begun[output]) == 2)

    client.unload_model(model)


def test_instances_of_a_stateful_model_are_bounded_and_come_back(client: Client) -> None:
    model = client.load_model(generate.accumulator())
    x = {"x": np.ones(4, np.float32)}
    sessions = [client.open_session(model) for _ in range(INSTANCES_PER_MODEL)]
    try:
        with pytest.raises(Overloaded) as caught:
            client.open_session(model)

        assert caught.value.retryable
        assert isinstance(caught.value.details["retry_after_ms"], int)
        for session in sessions:
            assert np.asarray(session.run(x)["total"]).tolist() == [1] * 4
    finally:
        for session in sessions:
            session.close()

    # A socket's end is seen a moment after it was closed; the next call comes behind it.
    for _ in range(INSTANCES_PER_MODEL):
        with open_when_free(client, model.hash) as session:
            assert np.asarray(session.run(x)["total"]).tolist() == [1] * 4

    client.unload_model(model)


def open_when_free(client: Client, model: str) -> Session:
    """Opens a session once the daemon has noticed that another one was closed."""
    while True:
        try:
            return client.open_session(model)
        except Overloaded:
            continue


def test_instances_of_other_shapes_are_bounded_too(client: Client) -> None:
    model = client.load_model(generate.dynamic_batch())
    rows = range(2, 2 + INSTANCES_PER_MODEL)
    sessions = [client.open_session(model, input_shapes={"x": (n, 4)}) for n in rows]
    try:
        with pytest.raises(Overloaded):
            client.open_session(model, input_shapes={"x": (100, 4)})

        # The model's own shape and one that is there already take no further instance.
        for shapes in (None, {"x": (2, 4)}):
            with client.open_session(model, input_shapes=shapes):
                pass
    finally:
        for session in sessions:
            session.close()

    client.unload_model(model)


def test_an_output_of_unknown_size_has_the_room_that_is_asked_for(client: Client) -> None:
    model = client.load_model(generate.ramp())
    with client.open_session(model, output_capacity_bytes=400) as session:
        assert np.asarray(session.run({"limit": np.int32(100)})["values"]).tolist() == list(
            range(100)
        )
        with pytest.raises(OutputTooLarge):
            session.run({"limit": np.int32(101)})

        assert np.asarray(session.run({"limit": np.int32(2)})["values"]).tolist() == [0, 1]

    with client.open_session(model, output_capacity_bytes=1 << 20) as session:
        values = session.run({"limit": np.int32(200_000)})["values"]
        assert np.array_equal(np.asarray(values), np.arange(200_000))

    client.unload_model(model)


def test_an_empty_output(client: Client) -> None:
    model = client.load_model(generate.positive_positions(4))
    with client.open_session(model) as session:
        none = session.run({"x": np.zeros(4, np.float32)})["positions"]
        assert none.shape == (0, 1)
        two = session.run({"x": np.asarray([1, 0, 0, 2], np.float32)})["positions"]
        assert np.asarray(two).tolist() == [[0], [3]]

    client.unload_model(model)


def test_an_index_out_of_range_fails_its_frame_only(client: Client) -> None:
    model = client.load_model(generate.lookup())
    table = generate.lookup_table()
    with client.open_session(model) as session:
        for index in (3, 16, 15, -1, 2**31 - 1, 0):
            inputs = {"index": np.asarray([index], np.int32)}
            if 0 <= index < len(table):
                row = np.asarray(session.run(inputs)["row"])
                assert np.array_equal(row[0], table[index])
            else:
                with pytest.raises(BackendFailed, match="out of bounds"):
                    session.run(inputs)

    assert client.status()["counters"]["worker_restarts"] == 0
    client.unload_model(model)


def test_int8_is_said_to_be_int8(client: Client) -> None:
    model = client.load_model(generate.mobilenet_v1(quantised=True))
    image = np.random.RandomState(4).randint(-128, 128, (1, 224, 224, 3)).astype(np.int8)
    with client.open_session(model) as session:
        result = session.run({"image": image})

        assert result.precision == "int8"
        assert len(np.unique(np.asarray(result["logits"]))) > 30

    client.unload_model(model)


@pytest.mark.parametrize("dtype", generate.IDENTITY_DTYPES)
def test_every_element_type_comes_back_as_it_went(dtype: str, client: Client) -> None:
    model = client.load_model(generate.identity((4, 2), dtype))
    count = 8 * np.dtype(dtype).itemsize
    x = (np.arange(count) % 2 if dtype == "bool" else np.arange(200, 200 + count)).astype(
        np.uint8
    )
    values = x[: 8 * np.dtype(dtype).itemsize].view(dtype).reshape(4, 2)
    with client.open_session(model) as session:
        y = session.run({"x": values})["y"]

        assert np.asarray(y).tobytes() == values.tobytes()

    client.unload_model(model)


def test_models_that_no_engine_can_run_say_why(client: Client) -> None:
    with pytest.raises(UnsupportedModel, match="ADD in version 99"):
        client.load_model(double(version=99))

    with pytest.raises(UnsupportedModel, match=r"Warp.*Bend"):
        client.load_model(custom("Warp", "Bend"))

    with pytest.raises(BadModel, match="memory"):
        client.load_model(generate.identity((1 << 30,), "float32"))

    assert client.models() == []


def test_loads_of_one_model_at_once_share_it(client: Client) -> None:
    content = generate.two_inputs(6)
    with ThreadPoolExecutor(2) as pool:
        models = list(
            pool.map(lambda name: client.load_model(content, name), ["left", "right"])
        )

    assert len({model.hash for model in models}) == 1
    assert client.describe("left").hash == client.describe("right").hash
    client.unload_model(models[0])
    assert client.models() == []
