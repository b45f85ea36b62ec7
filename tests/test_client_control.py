"""Control calls: the wire, errors, time limits, models and where the socket is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_daemon import FakeDaemon, VarlinkError
from fake_session import collected, model_bytes, tensor

from switchgear.client import Client, Progress, connect, default_socket, wire
from switchgear.client.control import Control
from switchgear.client.paths import SYSTEM_SOCKET
from switchgear.ipc import varlink
from switchgear.ipc.errors import (
    ERRORS,
    BadDescriptor,
    BadInput,
    BadModel,
    BadRequest,
    ConnectionLost,
    InternalError,
    NotRunning,
    PermissionDenied,
    ProtocolError,
    SwitchgearError,
    TimedOut,
    UnknownModel,
)

ONES = [1.0, 1, 1, 1]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with collected(), FakeDaemon(tmp_path / "s.sock") as served:
        yield served


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with connect(daemon.path, timeout_s=5, reconnect_s=5) as connected:
        yield connected


def raise_error(name: str, text: str = "", **details: object) -> Any:
    def answer(parameters: object) -> dict[str, Any]:
        raise VarlinkError(name, text, **details)

    return answer


def test_what_the_daemon_says_of_itself(client: Client) -> None:
    assert client.info()["state"] == "serving"
    assert client.status()["ready"] is True
    assert client.models() == []


def test_a_model_is_loaded_with_progress(daemon: FakeDaemon, client: Client) -> None:
    seen: list[Progress] = []
    model = client.load_model(model_bytes(), "add one", seen.append)

    assert [progress.state for progress in seen] == ["running", "done"]
    assert (seen[0].phase, seen[0].done, seen[0].total) == ("copy", 1, 2)
    assert (model.name, model.run_ms, model.backends) == ("add one", 1.5, {"cpu": "ready"})
    assert model.inputs == (tensor("input"),)
    assert model.timeline[0].duration_ms == 0.5
    assert client.describe("add one") == client.describe(model) == model
    assert client.models() == [model]
    assert client.check_model(model) == model
    client.unload_model(model)
    with pytest.raises(UnknownModel):
        client.describe("add one")


@pytest.mark.parametrize("kind", ["path", "str", "bytes", "bytearray", "descriptor"])
def test_a_model_comes_from_anywhere(
    daemon: FakeDaemon, client: Client, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(model_bytes())
    fd = os.open(path, os.O_RDONLY)
    sources: dict[str, Any] = {
        "path": path,
        "str": str(path),
        "bytes": model_bytes(),
        "bytearray": bytearray(model_bytes()),
        "descriptor": fd,
    }
    model = client.load_model(sources[kind])
    os.close(fd)
    path.unlink()
    daemon.restart()

    with client.open_session(model) as session:
        assert session.run(input=ONES)["output"].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("/does/not/exist", BadDescriptor),
        (-1, BadDescriptor),
        (None, BadRequest),
        (True, BadRequest),
    ],
)
def test_what_is_no_model_is_refused_here(
    client: Client, source: Any, expected: type[SwitchgearError]
) -> None:
    with pytest.raises(expected):
        client.load_model(source)


def test_a_job_that_fails_raises_its_error(client: Client) -> None:
    with pytest.raises(BadModel, match="no model") as caught:
        client.load_model(b"text")

    assert caught.value.details == {"domain": "tflite"}
    assert client.info()["ready"]


def test_a_wait_for_a_job_has_a_limit(daemon: FakeDaemon, client: Client) -> None:
    daemon.stalled["WatchJob"] = threading.Event()
    with pytest.raises(TimedOut):
        client.load_model(model_bytes(), timeout_s=0.05)


def test_other_calls_go_on_while_a_job_is_watched(daemon: FakeDaemon, client: Client) -> None:
    go_on = daemon.stalled["WatchJob"] = threading.Event()
    watched = threading.Event()
    answer = daemon._answer

    def tell(sock: socket.socket, message: varlink.Message) -> bool:
        if message.fields["method"] == "io.switchgear.WatchJob":
            watched.set()

        return answer(sock, message)

    daemon._answer = tell  # type: ignore[method-assign]
    names: list[str] = []
    loader = threading.Thread(
        target=lambda: names.append(client.load_model(model_bytes(), "slow").name)
    )
    loader.start()
    assert watched.wait(10)
    assert client.info()["ready"]
    assert names == []
    go_on.set()
    loader.join()
    assert names == ["slow"]


def test_an_error_of_the_progress_function_ends_the_wait(client: Client) -> None:
    def fail(progress: Progress) -> None:
        raise KeyError(progress.phase)

    with pytest.raises(KeyError, match="copy"):
        client.load_model(model_bytes(), on_progress=fail)

    assert client.info()["ready"]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_each_error_of_the_interface_is_its_exception(
    daemon: FakeDaemon, client: Client, kind: type[SwitchgearError]
) -> None:
    daemon.instead["GetInfo"] = raise_error(kind.__name__, "a sentence", bytes_needed=5)

    with pytest.raises(kind, match="a sentence") as caught:
        client.info()

    assert type(caught.value) is kind
    assert caught.value.details == {"bytes_needed": 5}


@pytest.mark.parametrize(
    ("name", "expected", "said"),
    [
        ("io.switchgear.OfTheFuture", InternalError, "unknown error io.switchgear.OfTheFuture"),
        ("org.example.Odd", InternalError, "org.example.Odd"),
        ("org.varlink.service.MethodNotFound", BadRequest, "MethodNotFound"),
        ("org.varlink.service.InvalidParameter", BadRequest, "InvalidParameter"),
    ],
)
def test_errors_of_others(
    daemon: FakeDaemon,
    client: Client,
    name: str,
    expected: type[SwitchgearError],
    said: str,
) -> None:
    daemon.instead["GetInfo"] = raise_error(name, "their text")

    with pytest.raises(expected, match=said) as caught:
        client.info()

    assert type(caught.value) is expected


@pytest.mark.parametrize(
    "answer",
    [{}, {"job": "one"}, {"job": None}, {"models": []}],
    ids=lambda answer: str(answer),
)
def test_an_answer_without_its_fields_is_a_protocol_error(
    daemon: FakeDaemon, client: Client, answer: dict[str, Any]
) -> None:
    for method in ("LoadModel", "OpenSession", "Infer", "DescribeModel"):
        daemon.instead[method] = lambda parameters: answer

    with pytest.raises(ProtocolError):
        client.load_model(model_bytes())

    with pytest.raises(ProtocolError):
        client.open_session("any")

    with pytest.raises(ProtocolError):
        client.describe("any")


def test_inference_in_the_message(client: Client) -> None:
    model = client.load_model(model_bytes(tensor("a"), tensor("b", "uint8", (2, 1))))
    b = np.array([[1], [2]], np.uint8)
    for reference in (model, model.hash):
        result = client.infer(reference, {"a": ONES, "b": b}, deadline_ms=100)
        assert result["a_plus_one"].tolist() == [2, 2, 2, 2]
        assert result["b_plus_one"].tolist() == [[2], [3]]
        assert (result.backend, result.precision, result.reason) == (
            "cpu",
            "fp32",
            "only_ready",
        )
        assert result.run_ms == 2.5

    with pytest.raises(BadInput, match="'b' is missing"):
        client.infer(model, {"a": ONES})

    with pytest.raises(BadInput, match="dtype float64"):
        client.infer(model, {"a": np.zeros(4), "b": b})

    with pytest.raises(BadRequest, match="deadline_ms"):
        client.infer(model, {"a": ONES, "b": b}, deadline_ms=0)


def test_a_call_beyond_the_bound_is_refused_here(client: Client) -> None:
    model = client.load_model(model_bytes(tensor("input", shape=(500_000,))))

    with pytest.raises(BadRequest, match="open a session for large tensors"):
        client.infer(model, {"input": bytes(2_000_000)})

    with pytest.raises(BadRequest, match="cannot be sent"):
        client.open_session(model, slots=object())  # type: ignore[arg-type]


def test_a_large_message_goes_through(daemon: FakeDaemon, client: Client) -> None:
    # Larger than the socket's buffer: sent in parts, received in parts.
    model = client.load_model(model_bytes(tensor("input", shape=(350_000,))))
    value = np.arange(350_000, dtype=np.float32)

    assert np.array_equal(client.infer(model, {"input": value})["output"], value + 1)


def test_a_call_has_a_time_limit(daemon: FakeDaemon) -> None:
    with connect(daemon.path, timeout_s=0.05) as client:
        daemon.stalled["GetInfo"] = threading.Event()
        with pytest.raises(TimedOut, match="GetInfo"):
            client.info()

        daemon.stalled.pop("GetInfo").set()
        # The limit was for the call that nobody answers: a busy machine may need longer.
        client._operations.timeout_s = 10
        # On another connection: the late reply is not taken for this one's.
        assert client.models() == []


def test_a_daemon_that_goes_in_the_middle_of_a_call(daemon: FakeDaemon, client: Client) -> None:
    daemon.dropped.add("GetInfo")
    with pytest.raises(ConnectionLost):
        client.info()

    daemon.dropped.clear()
    assert client.info()["ready"]


def test_an_idle_connection_that_was_closed_is_replaced(
    daemon: FakeDaemon, client: Client
) -> None:
    assert client.info()["ready"]
    daemon.restart()
    assert client.info()["ready"]


def test_no_daemon_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "none.sock"
    with pytest.raises(NotRunning, match=r"none\.sock.*switchgear serve") as caught:
        connect(path)

    assert caught.value.details == {"path": str(path)}
    # A stale socket file.
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    with pytest.raises(NotRunning, match="refused"):
        connect(path)

    with pytest.raises(BadRequest, match="too long"):
        connect("/" + "x" * 200)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may connect to any socket")
def test_a_socket_that_keeps_this_user_out(daemon: FakeDaemon) -> None:
    daemon.path.chmod(0)
    with pytest.raises(PermissionDenied):
        connect(daemon.path)


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = [Control(path, 5)]
        with pytest.raises(NotRunning):
            waiting += [Control(path, 0.05) for _ in range(3)]

        accepted = [listener.accept()[0] for _ in waiting]
        for control in waiting:
            control.close()

        for sock in accepted:
            sock.close()


@pytest.mark.parametrize(
    "data",
    [b"{}\0{", b"[1]\0", b"no json\0", b'{"parameters":5}\0', b'{"error":5}\0', b"\xff\0"],
)
def test_garbage_instead_of_a_reply(tmp_path: Path, data: bytes) -> None:
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        control = Control(path, 5)
        server, _ = listener.accept()
        with server:
            server.sendall(data)
            try:
                control.call("GetInfo", timeout_s=5)
            except ProtocolError:
                assert data != b"{}\0{"

            assert not control.idle
            control.close()


def test_descriptors_that_nobody_takes_are_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        control = Control(path, 5)
        server, _ = listener.accept()
        with server:
            socket.send_fds(server, [b'{"error":"io.switchgear.Busy"}\0'], [writer])
            os.close(writer)
            with pytest.raises(SwitchgearError):
                control.call("GetInfo", timeout_s=5)

            # End of file: the last copy of the writing end is closed.
            assert os.read(reader, 1) == b""
            os.close(reader)
            control.close()


def test_a_call_message_is_varlink() -> None:
    data = wire.call_bytes("WatchJob", {"job": 3}, more=True)

    assert data.endswith(b"\0")
    assert varlink.parse(data[:-1]) == {
        "method": "io.switchgear.WatchJob",
        "parameters": {"job": 3},
        "more": True,
    }


def test_where_the_socket_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SWITCHGEAR_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_socket() == SYSTEM_SOCKET
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == SYSTEM_SOCKET
    own = tmp_path / "switchgear" / "switchgear.sock"
    own.parent.mkdir()
    own.touch()
    assert default_socket() == str(own)
    monkeypatch.setenv("SWITCHGEAR_SOCKET", "/elsewhere")
    assert default_socket() == "/elsewhere"


def test_the_default_socket_is_connected_to(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHGEAR_SOCKET", str(daemon.path))
    with connect() as client:
        assert client.path == str(daemon.path)


# Runs a frame with everything but the standard library made impossible to import.
WITHOUT_NUMPY = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "switchgear" and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
from switchgear.client import connect

with connect(sys.argv[1]) as client:
    with client.open_session("grid") as session:
        with session.slot() as slot:
            slot.inputs["input"][1, 0] = 5
            output = slot.run()["output"]
        assert isinstance(output, memoryview), output
        print(output.format, output.shape, output.tolist())
        copied = session.run(input=[[1, 2], [3, 4]], copy=True)["output"]
        print(copied.format, copied.shape, copied.tolist())

assert "numpy" not in sys.modules
"""


def test_views_without_numpy(daemon: FakeDaemon, client: Client) -> None:
    client.load_model(model_bytes(tensor("input", shape=(2, 2))), name="grid")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_NUMPY, str(daemon.path)],
        capture_output=True,
        text=True,
        cwd="/",
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "f (2, 2) [[1.0, 1.0], [6.0, 1.0]]",
        "f (2, 2) [[2.0, 3.0], [4.0, 5.0]]",
    ]


def test_tensors_are_numpy_arrays(client: Client) -> None:
    model = client.load_model(model_bytes(tensor("input", "float16", (2, 2))))
    with client.open_session(model) as session, session.slot() as slot:
        assert isinstance(slot.inputs["input"], np.ndarray)
        assert slot.inputs["input"].dtype == np.float16
        slot.inputs["input"][:] = 0.5
        output = slot.run()["output"]
        assert isinstance(output, np.ndarray)
        assert output.tolist() == [[1.5, 1.5], [1.5, 1.5]]
