"""Clients of the control socket that break every rule, while another one is served."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest
from daemon_health import (
    Holdings,
    Witness,
    leaves_nothing,
    rss_kib,
    settles_to,
)
from daemon_process import DaemonProcess
from raw_client import CallFailed, Control, memfd, message

from switchgear.backends import generate
from switchgear.ipc.varlink import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

INFO = message("GetInfo")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process, Witness(process.socket):
        yield process


def send_ignoring_close(control: Control, data: bytes) -> None:
    """The daemon may close before all is sent."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(data)


BAD_BYTES = {
    "nothing": b"\0",
    "a word": b"hello\0",
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\0",
    "bad UTF-8": b'{"method":"\xff\xfe"}\0',
    "an overlong NUL": b'{"method":"\xc0\x80"}\0',
    "random bytes": bytes(range(1, 256)) * 16 + b"\0",
    "a list": b"[1]\0",
    "a string": b'"io.switchgear.GetInfo"\0',
    "an unfinished object": b'{"method":\0',
    "two objects": b"{}{}\0",
    "deep lists": b'{"method":' + b"[" * 50_000 + b"]" * 50_000 + b"}\0",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\0",
    "deep, unfinished": b"[" * 50_000 + b"\0",
    "33 levels": (
        b'{"method":"io.switchgear.GetInfo","parameters":'
        + b'{"a":[' * 16
        + b"]}" * 16
        + b"}\0"
    ),
    "5000 digits": b'{"method":"x","parameters":{"a":' + b"9" * 5000 + b"}}\0",
    "65 bits": b'{"method":"x","parameters":{"a":18446744073709551616}}\0',
    "a huge exponent": b'{"method":"x","parameters":{"a":1e999}}\0',
    "not a number": b'{"method":"x","parameters":{"a":NaN}}\0',
    "infinity": b'{"method":"x","parameters":{"a":-Infinity}}\0',
    "many values": b'{"method":"x","parameters":{"a":[' + b"1," * 20_000 + b"1]}}\0",
    "many escapes": b'{"method":"' + b"\\n" * 20_000 + b'"}\0',
    "no method": b'{"parameters":{}}\0',
    "a method that is a number": b'{"method":1}\0',
    "parameters that are a list": b'{"method":"x","parameters":[]}\0',
    "more that is a number": b'{"method":"io.switchgear.GetInfo","more":1}\0',
    "an upgrade": b'{"method":"io.switchgear.GetInfo","upgrade":true}\0',
}


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES.keys())
def test_bytes_that_are_no_call_get_one_error_and_the_end(
    daemon: DaemonProcess, data: bytes
) -> None:
    with leaves_nothing(daemon), Control(daemon.socket) as control:
        send_ignoring_close(control, data + INFO)
        control.refused()


def test_what_came_before_the_garbage_is_answered(daemon: DaemonProcess) -> None:
    with Control(daemon.socket) as control:
        control.send(INFO + INFO + b"garbage\0" + INFO)
        for _ in range(2):
            reply, _ = control.receive()
            assert reply["parameters"]["pid"] == daemon.pid

        control.refused()


WRONG_CALLS = {
    "another interface": ("org.example.Ping", {}, "InterfaceNotFound"),
    "no such method": ("Nothing", {}, "MethodNotFound"),
    "an empty name": (".", {}, "InterfaceNotFound"),
    "a parameter too many": ("GetInfo", {"x": 1}, "InvalidParameter"),
    "a parameter missing": ("DescribeModel", {}, "InvalidParameter"),
    "true for an integer": ("WatchJob", {"job": True}, "InvalidParameter"),
    "a float for an integer": ("WatchJob", {"job": 1.0}, "InvalidParameter"),
    "a string for an integer": ("WatchJob", {"job": "1"}, "InvalidParameter"),
    "no such job": ("WatchJob", {"job": -(2**63)}, "UnknownJob"),
    "no descriptor": ("LoadModel", {"descriptor": 0}, "InvalidParameter"),
    "a negative descriptor": ("LoadModel", {"descriptor": -1}, "InvalidParameter"),
    "unknown model": ("OpenSession", {"model": "nothing"}, "UnknownModel"),
    "a long model name": ("OpenSession", {"model": "x" * 100_000}, "UnknownModel"),
    "too many slots": ("OpenSession", {"model": "witness", "slots": 17}, "BadRequest"),
    "no slots": ("OpenSession", {"model": "witness", "slots": 0}, "BadRequest"),
    "a wrong word": ("OpenSession", {"model": "witness", "on_busy": "?"}, "BadRequest"),
    "no such backend": (
        "OpenSession",
        {"model": "witness", "backends": ["abacus"]},
        "UnknownBackend",
    ),
    "a wrong shape": (
        "OpenSession",
        {"model": "witness", "input_shapes": {"x": [5]}},
        "BadShape",
    ),
    "a shape of no input": (
        "OpenSession",
        {"model": "witness", "input_shapes": {"z": [4]}},
        "BadShape",
    ),
    "a shape of zero": (
        "OpenSession",
        {"model": "witness", "input_shapes": {"x": [0]}},
        "BadRequest",
    ),
    "a shape that is a number": (
        "OpenSession",
        {"model": "witness", "input_shapes": {"x": 4}},
        "InvalidParameter",
    ),
}


@pytest.mark.parametrize(
    ("method", "parameters", "error"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys()
)
def test_a_wrong_call_gets_its_error_and_the_connection_goes_on(
    daemon: DaemonProcess, method: str, parameters: dict[str, Any], error: str
) -> None:
    with leaves_nothing(daemon), Control(daemon.socket) as control:
        with pytest.raises(CallFailed) as caught:
            control.call(method, **parameters)

        assert caught.value.name == error
        assert control.call("GetInfo")["pid"] == daemon.pid


@pytest.mark.parametrize("value", ["", "-x", "a b", "a/b", "ä", "a" * 129])
def test_a_wrong_model_name_is_refused(daemon: DaemonProcess, value: str) -> None:
    fd = memfd(b"x")
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            with pytest.raises(CallFailed) as caught:
                control.call("LoadModel", [fd], descriptor=0, name=value)

            assert caught.value.name == "BadRequest"
    finally:
        os.close(fd)


def test_a_message_of_one_megabyte_is_served(daemon: DaemonProcess) -> None:
    with Control(daemon.socket) as control:
        control.load(generate.identity((180_000,)), name="large")
        data = struct.pack("<180000f", *range(180_000))
        import base64

        value = {
            "dtype": "float32",
            "shape": [180_000],
            "data": base64.b64encode(data).decode(),
        }
        call = message("Infer", {"model": "large", "inputs": {"x": value}})
        assert 900_000 < len(call) < MAX_MESSAGE_BYTES
        control.send(call)
        reply, _ = control.receive()
        assert base64.b64decode(reply["parameters"]["outputs"]["y"]["data"]) == data
        control.call("UnloadModel", model="large")


def test_a_message_over_the_limit_is_refused(daemon: DaemonProcess) -> None:
    with leaves_nothing(daemon), Control(daemon.socket) as control:
        call = b'{"method":"' + b"x" * MAX_MESSAGE_BYTES + b'"}\0'
        send_ignoring_close(control, call)
        assert "longer than" in control.refused()


def test_a_client_that_sends_without_end(daemon: DaemonProcess) -> None:
    """Bytes without a NUL: it is refused at the bound; another client is served meanwhile."""
    with leaves_nothing(daemon), Witness(daemon.socket) as witness:
        before = rss_kib(daemon.pid)
        for _ in range(5):
            with Control(daemon.socket) as control:
                send_ignoring_close(control, b"x" * (8 << 20))
                control.refused()

        witness.is_served()
        assert rss_kib(daemon.pid) - before < 8 * 1024


def test_a_client_that_never_reads_its_replies(daemon: DaemonProcess) -> None:
    """200,000 pipelined calls: the daemon stops to read them, and keeps little of them."""
    count = 200_000
    with leaves_nothing(daemon), Witness(daemon.socket) as witness:  # noqa: SIM117
        with Control(daemon.socket) as control:
            before = rss_kib(daemon.pid)
            data = memoryview(INFO * count)
            sent = 0
            control.sock.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while sent < len(data):
                    sent += control.sock.send(data[sent:])

            assert sent < len(data)
            witness.is_served()
            assert rss_kib(daemon.pid) - before < 6 * 1024
            control.sock.settimeout(15.0)
            # It was patient, not cut off: what was sent whole is answered, in order.
            for _ in range(min(sent // len(INFO), 2000)):
                reply, _ = control.receive()
                assert reply["parameters"]["pid"] == daemon.pid

            witness.is_served()


def test_a_client_that_calls_without_end_does_not_starve_others(daemon: DaemonProcess) -> None:
    stop = threading.Event()

    def flood() -> None:
        with Control(daemon.socket) as control:
            while not stop.is_set():
                control.send(INFO * 200)
                for _ in range(200):
                    control.receive()

    thread = threading.Thread(target=flood)
    with leaves_nothing(daemon), Witness(daemon.socket) as witness:
        thread.start()
        try:
            witness.is_served(50)
        finally:
            stop.set()
            thread.join()


def test_watching_without_reading_ends_with_the_client(daemon: DaemonProcess) -> None:
    """A watcher whose client is gone does not stay, though its job goes on."""
    with leaves_nothing(daemon), Control(daemon.socket) as owner:
        fd = memfd(generate.slow(300.0))
        try:
            job = owner.call("LoadModel", [fd], descriptor=0, name="long")["job"]
        finally:
            os.close(fd)

        before = Holdings.of(daemon).connections
        for _ in range(5):
            with Control(daemon.socket) as watcher:
                watcher.send(message("WatchJob", {"job": job}, more=True))
                watcher.receive()

        while daemon.call("GetStatus")["parameters"]["connections"] > before:
            pass

        assert owner.wait_for(job)["name"] == "long"
        owner.call("UnloadModel", model="long")


def test_silent_clients_are_kept_and_counted(daemon: DaemonProcess) -> None:
    with leaves_nothing(daemon):
        idle = daemon.call("GetStatus")["parameters"]["idle_connections"]
        silent = [Control(daemon.socket) for _ in range(40)]
        try:
            status = daemon.call("GetStatus")["parameters"]
            assert status["idle_connections"] == idle + 40
            assert silent[0].call("GetInfo")["pid"] == daemon.pid
            status = daemon.call("GetStatus")["parameters"]
            assert status["idle_connections"] == idle + 39
        finally:
            for control in silent:
                control.close()


@pytest.mark.parametrize("part", [1, len(INFO) // 2, len(INFO) - 1])
def test_a_client_that_ends_in_the_middle_of_a_message(
    daemon: DaemonProcess, part: int
) -> None:
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with leaves_nothing(daemon), Control(daemon.socket) as control:
            control.send(INFO[:part], [fd] * 3)
    finally:
        os.close(fd)


def test_a_client_that_ends_in_the_middle_of_a_call(daemon: DaemonProcess) -> None:
    with leaves_nothing(daemon):
        for _ in range(20):
            with Control(daemon.socket) as control:
                control.send(message("OpenSession", {"model": "witness"}) * 3)


def test_a_client_that_ends_in_the_middle_of_a_load(daemon: DaemonProcess) -> None:
    """The job is not the connection's: the model is there for the next one."""
    fd = memfd(generate.identity((5,)))
    try:
        with Control(daemon.socket) as control:
            control.send(message("LoadModel", {"descriptor": 0, "name": "left"}), [fd])
            reply, _ = control.receive()
    finally:
        os.close(fd)

    with Control(daemon.socket) as control:
        assert control.wait_for(reply["parameters"]["job"])["name"] == "left"
        control.call("UnloadModel", model="left")


def test_a_cancelled_load_leaves_nothing(daemon: DaemonProcess) -> None:
    with leaves_nothing(daemon), Control(daemon.socket) as control:
        fd = memfd(generate.slow(5000.0))
        try:
            job = control.call("LoadModel", [fd], descriptor=0)["job"]
        finally:
            os.close(fd)

        control.call("CancelJob", job=job)
        last = control.watch(job)
        assert last["state"] == "cancelled"
        assert last["error"] == "io.switchgear.Cancelled"
        assert [m["name"] for m in control.call("ListModels")["models"]] == ["witness"]


def test_more_connections_than_a_user_may_have() -> None:
    with DaemonProcess(config="[limits]\nconnections_per_user = 4\n") as daemon:
        before = Holdings.of(daemon)
        with contextlib.ExitStack() as stack:
            kept = [stack.enter_context(Control(daemon.socket)) for _ in range(4)]
            for control in kept:
                control.call("GetInfo")

            with Control(daemon.socket) as fifth:
                reply, _ = fifth.receive()
                assert reply["error"] == "io.switchgear.QuotaExceeded"
                assert fifth.at_end()

            assert kept[0].call("GetInfo")["pid"] == daemon.pid

        settles_to(daemon, before)
