"""The packets between the daemon and a worker, as docs/worker-protocol.md has them."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from backend_helpers import double
from worker_under_test import Arena, WorkerUnderTest, memory_file

from switchgear.backends import generate
from switchgear.backends.contract import CONTRACT_VERSION
from switchgear.backends.cpu import installed_engine
from switchgear.ipc import worker
from switchgear.ipc.errors import DOMAINS, BadSlot, DeadlineExceeded
from switchgear.ipc.record import Backend, Flag, Precision
from switchgear.ipc.slot import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.engine, pytest.mark.tflite_runtime]

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "worker-protocol.md"
OURS = DOMAINS["switchgear"]
X = (TensorSpec("x", "float32", (4,), (4,), 16),)
TOTAL = (TensorSpec("total", "float32", (4,), (4,), 16),)
INDEX = (TensorSpec("index", "int32", (1,), (1,), 4),)
ROW = (TensorSpec("row", "float32", (1, 4), (1, 4), 16),)
ONES = np.ones(4, np.float32).tobytes()


@pytest.fixture
def started() -> Iterator[WorkerUnderTest]:
    with WorkerUnderTest() as process:
        hello = process.receive()
        assert hello["op"] == "hello"
        yield process


def bound(process: WorkerUnderTest, model: bytes, arena: Arena) -> None:
    """Loads a model as instance 1 and binds an arena to it as binding 5."""
    assert process.load(model)["op"] == "loaded"
    process.send([arena.fd], op="bind", binding=5, instance=1, layout=arena.layout_json)


def test_it_says_what_it_is() -> None:
    name, version, _ = installed_engine()
    with WorkerUnderTest() as process:
        assert process.receive() == {
            "op": "hello",
            "protocol": worker.WORKER_PROTOCOL,
            "contract": CONTRACT_VERSION,
            "backend": "cpu",
            "engine": name,
            "engine_version": version,
            "pid": process.pid,
        }


def test_a_backend_that_is_not_there_is_absent() -> None:
    with WorkerUnderTest("no-such-backend") as process:
        answer = process.receive()
        assert (answer["op"], answer["name"]) == ("absent", "UnknownBackend")
        assert "cpu" in answer["text"]
        assert process.sock.recv(1) == b""
        assert process.exit()[0] == 1


def test_the_known_answer(started: WorkerUnderTest) -> None:
    answer = started.ask(op="probe")

    assert (answer["op"], answer["ok"]) == ("probed", True)
    assert "sum and product exact" in answer["text"]
    assert answer["took_us"] > 0


def test_a_frame_goes_through(started: WorkerUnderTest) -> None:
    loaded = started.load(generate.accumulator(), warm=False)
    assert set(loaded) == {"op", "instance", "precision", "artefact", "load_us", "first_run_us"}
    assert (loaded["op"], loaded["instance"], loaded["precision"]) == ("loaded", 1, "fp32")
    with Arena(X, TOTAL, slots=2) as arena:
        started.send([arena.fd], op="bind", binding=5, instance=1, layout=arena.layout_json)
        arena.write(ONES, slot=1)
        for number in (1, 2):
            reply = started.infer(
                request_id=70 + number, input_slot=1, output_slot=0, binding=5
            )

            assert (reply.kind, reply.request_id) == (2, 70 + number)
            assert (reply.input_slot, reply.output_slot, reply.binding) == (1, 0, 5)
            assert (reply.status_domain, reply.status_code) == (0, 0)
            assert (reply.backend, reply.precision) == (Backend.CPU, Precision.FP32)
            assert 0 < reply.run_ns < 10**9
            request_id, (entry,) = arena.header()
            assert request_id == 70 + number
            assert (entry.dtype, entry.shape, entry.length) == ("float32", (4,), 16)
            assert np.frombuffer(arena.read(), np.float32).tolist() == [number] * 4

        # RESET starts from a fresh state.
        started.infer(flags=Flag.RESET, input_slot=1, output_slot=1, binding=5)
        assert np.frombuffer(arena.read(1), np.float32).tolist() == [1] * 4


def test_packets_are_handled_in_their_order(started: WorkerUnderTest) -> None:
    with Arena(X, TOTAL) as arena, memory_file(generate.accumulator()) as fd:
        arena.write(ONES)
        started.send([fd], op="load", instance=1)
        started.send([arena.fd], op="bind", binding=5, instance=1, layout=arena.layout_json)
        from switchgear.ipc.record import Record

        for number in range(3):
            record = Record(1, request_id=number, input_slot=0, output_slot=0, binding=5)
            started.sock.send(record.pack())

        started.send(op="unbind", binding=5)
        started.send(op="unload", instance=1)
        started.send(op="probe")

        assert started.receive()["op"] == "loaded"
        assert [started.reply().request_id for _ in range(3)] == [0, 1, 2]
        assert np.frombuffer(arena.read(), np.float32).tolist() == [3] * 4
        assert started.receive()["op"] == "probed"


def test_an_error_of_the_engine_stands_in_the_slot(started: WorkerUnderTest) -> None:
    with Arena(INDEX, ROW) as arena:
        bound(started, generate.lookup(), arena)
        arena.write(np.int32(99).tobytes())
        reply = started.infer(request_id=1, input_slot=0, output_slot=0, binding=5)

        assert (reply.status_domain, reply.status_code) == (DOMAINS["tflite"], 1)
        assert "out of bounds" in arena.error()

        arena.write(np.int32(2).tobytes())
        reply = started.infer(request_id=2, input_slot=0, output_slot=0, binding=5)
        assert reply.status_domain == 0
        assert arena.error() == ""
        assert arena.header()[0] == 2


def test_a_request_over_its_time_is_not_run(started: WorkerUnderTest) -> None:
    with Arena(X, TOTAL) as arena:
        bound(started, generate.accumulator(), arena)
        arena.write(ONES)
        fields: dict[str, Any] = {"input_slot": 0, "output_slot": 0, "binding": 5}
        late = started.infer(deadline_ns=monotonic_ns() - 1, **fields)
        in_time = started.infer(deadline_ns=monotonic_ns() + 60 * 10**9, **fields)

        assert (late.status_domain, late.status_code) == (OURS, DeadlineExceeded.code)
        assert in_time.status_domain == 0
        assert np.frombuffer(arena.read(), np.float32).tolist() == [1] * 4


def test_what_is_unbound_answers_bad_slot(started: WorkerUnderTest) -> None:
    with Arena(X, TOTAL) as arena:
        bound(started, generate.accumulator(), arena)
        started.send(op="unbind", binding=5)
        started.send(op="unbind", binding=6)
        reply = started.infer(input_slot=0, output_slot=0, binding=5)

    assert (reply.status_domain, reply.status_code) == (OURS, BadSlot.code)


def test_unbind_and_unload_give_everything_back(started: WorkerUnderTest) -> None:
    before = descriptors(started.pid)
    with Arena(X, TOTAL) as arena:
        for number in range(3):
            bound(started, generate.accumulator(), arena)
            assert started.infer(input_slot=0, output_slot=0, binding=5).status_domain == 0
            started.send(op="unbind", binding=5)
            started.send(op="unload", instance=1)
            started.ask(op="probe")
            assert descriptors(started.pid) == before, number
            assert "memfd:arena" not in Path(f"/proc/{started.pid}/maps").read_text()


def test_what_was_prepared_anew_serves_from_the_next_bind_on(started: WorkerUnderTest) -> None:
    with Arena(X, TOTAL) as arena:
        bound(started, generate.accumulator(), arena)
        arena.write(ONES)
        fields: dict[str, Any] = {"input_slot": 0, "output_slot": 0, "binding": 5}

        def total() -> float:
            assert started.infer(**fields).status_domain == 0
            return float(np.frombuffer(arena.read(), np.float32)[0])

        assert total() == 1
        before = descriptors(started.pid)
        # One that fails changes nothing.
        assert started.load(b"no model")["op"] == "failed"
        assert total() == 2
        assert started.load(generate.accumulator())["op"] == "loaded"
        # The sum of the old one goes on.
        assert total() == 3
        started.send([arena.fd], op="bind", binding=5, instance=1, layout=arena.layout_json)
        assert total() == 1
        # The old one is gone.
        assert descriptors(started.pid) == before


def test_a_replaced_instance_that_nobody_has_is_freed_at_once(started: WorkerUnderTest) -> None:
    assert started.load(generate.accumulator())["op"] == "loaded"
    before = descriptors(started.pid)
    assert started.load(generate.accumulator())["op"] == "loaded"
    started.ask(op="probe")
    assert descriptors(started.pid) == before


def descriptors(pid: int) -> list[str]:
    # Root sees them although the process is not dumpable; so does nobody else.
    try:
        return sorted(
            os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")
        )
    except PermissionError:
        pytest.skip("a worker shows its descriptors to root only")


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"no model", "ERROR"), (double(version=99), "UnsupportedModel")],
    ids=["text", "operator"],
)
def test_a_load_that_fails_is_answered(
    content: bytes, name: str, started: WorkerUnderTest
) -> None:
    answer = started.load(content, instance=9)

    assert (answer["op"], answer["instance"], answer["name"]) == ("failed", 9, name)
    assert answer["text"]
    assert started.load(generate.two_inputs(), instance=9)["op"] == "loaded"


def test_shapes_are_taken(started: WorkerUnderTest) -> None:
    model = generate.dynamic_batch()
    assert started.load(model, instance=1, shapes={"x": [3, 4]})["op"] == "loaded"
    assert started.load(model, instance=2, shapes={"x": [3, 5]})["name"] == "BadShape"


def test_a_descriptor_that_did_not_come_is_answered(started: WorkerUnderTest) -> None:
    answer = started.ask(op="load", instance=1)
    assert (answer["op"], answer["name"]) == ("failed", "EMFILE")
    assert started.load(generate.accumulator())["op"] == "loaded"
    with Arena(X, TOTAL) as arena:
        answer = started.ask(op="bind", binding=5, instance=1, layout=arena.layout_json)

    assert (answer["op"], answer["binding"], answer["name"]) == ("unbound", 5, "EMFILE")


def test_a_worker_without_free_descriptors_lives_on() -> None:
    with WorkerUnderTest(limit="ulimit -n 40;") as process:
        assert process.receive()["op"] == "hello"
        answers = [process.load(generate.two_inputs(), instance=n) for n in range(60)]

        assert answers[0]["op"] == "loaded"
        assert {answer["op"] for answer in answers} == {"loaded", "failed"}
        assert "EMFILE" in {answer.get("name") for answer in answers}
        for number in range(60):
            process.send(op="unload", instance=number)

        assert process.load(generate.two_inputs())["op"] == "loaded"


def test_arenas_that_cannot_be_used_are_refused(started: WorkerUnderTest) -> None:
    assert started.load(generate.accumulator())["op"] == "loaded"
    with Arena(X, TOTAL) as arena:
        bind: dict[str, Any] = {"op": "bind", "binding": 5, "instance": 1}
        beyond = {**arena.layout_json, "headers": [[0, 4096, 1 << 20]]}
        larger = {**arena.layout_json, "size_bytes": 1 << 20}
        fewer = {**arena.layout_json, "inputs": [[]]}
        unsealed = os.memfd_create("unsealed")
        os.truncate(unsealed, arena.layout.size_bytes)
        try:
            answers = [
                started.ask([fd], **{**bind, "layout": layout})
                for fd, layout in (
                    (arena.fd, beyond),
                    (arena.fd, larger),
                    (arena.fd, fewer),
                    (unsealed, arena.layout_json),
                )
            ]
            answers.append(
                started.ask([arena.fd], **{**bind, "instance": 3, "layout": arena.layout_json})
            )
        finally:
            os.close(unsealed)

    assert [answer["op"] for answer in answers] == ["unbound"] * 5
    assert [answer["name"] for answer in answers] == [
        *("ProtocolError", "BadDescriptor", "BadSlot", "BadDescriptor", "BadSlot"),
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x00garbage", "not JSON"),
        (b"{", "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"op": "dance"}', "no operation 'dance'"),
        (b"{}", "no operation None"),
        (b"\x02" + bytes(127), "not JSON"),
        (b" " * (worker.MAX_PACKET_BYTES + 1), "not JSON"),
    ],
    ids=["bytes", "cut", "list", "unknown", "empty", "reply", "long"],
)
def test_what_it_cannot_read_ends_it_with_the_reason(
    data: bytes, said: str, started: WorkerUnderTest
) -> None:
    started.sock.send(data)
    status, error = started.exit()

    assert status == 1
    assert said in error.splitlines()[-1]


def test_it_ends_quietly_with_its_socket(started: WorkerUnderTest) -> None:
    started.load(generate.two_inputs())
    started.sock.shutdown(socket.SHUT_RDWR)

    assert started.exit()[0] == 0


def test_an_interrupt_of_the_terminal_is_not_for_it(started: WorkerUnderTest) -> None:
    os.kill(started.pid, signal.SIGINT)

    assert started.ask(op="probe")["ok"] is True


def test_the_document_names_every_operation_and_field() -> None:
    text = DOCUMENT.read_text()
    source = (Path(worker.__file__).parent.parent / "backends" / "worker.py").read_text()
    words = set(re.findall(r'"([a-z][a-z_]+)":', source)) | set(
        re.findall(r'"op": "(\w+)"', source)
    )

    assert {word for word in words if f"`{word}`" not in text} == set()
    assert f"version {worker.WORKER_PROTOCOL}" in text
    assert str(worker.MAX_PACKET_BYTES) in text


def test_what_another_driver_was_checked_with_is_not_loaded(started: WorkerUnderTest) -> None:
    identity = started.ask(op="probe")["identity"]
    model = generate.identity((4,))
    assert started.load(model, 1, identity=identity)["op"] == "loaded"
    refused = started.load(model, 2, identity={**identity, "driver": "another"})
    assert (refused["op"], refused["domain"], refused["name"]) == (
        "failed",
        "switchgear",
        "NotPrepared",
    )
    assert "prepared with driver 'another'; this worker has" in refused["text"]
    # What one of the two does not name is another, too.
    assert started.load(model, 2, identity={**identity, "board": "x"})["op"] == "failed"
    assert started.load(model, 2)["op"] == "loaded"
