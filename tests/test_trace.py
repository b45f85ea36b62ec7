"""`switchgear trace`: a real daemon's requests, read back by Perfetto's schema."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from raw_client import CallFailed, Control, message
from trace_helpers import read_trace

from switchgear.backends import generate
from switchgear.client import Session, connect
from switchgear.daemon.cli import trace
from switchgear.daemon.cli.command import CommandError
from switchgear.daemon.cli.trace_rows import Rows
from switchgear.daemon.telemetry.recorder import COLUMNS, MAX_WATCHERS
from switchgear.ipc.errors import BadRequest, DeadlineExceeded, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

# A worker that is stopped for a while is not ended for it.
CONFIG = "[cpu]\nthreads = 1\n[workers]\nhang_s = 600\n"
# Perfetto's schema comes with the first Python's packages only.
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as running:
        with connect(running.socket) as client:
            client.load_model(generate.two_inputs(), "pair")

        yield running


class Tracing:
    """`switchgear trace` in a thread, from its first answer until its file is there.

    It is interrupted, as by Ctrl-C, once all that has come is `enough`.
    """

    def __init__(
        self,
        daemon: DaemonProcess,
        output: Path,
        seconds: int = 1,
        enough: Callable[[Rows], bool] = lambda _: False,
    ) -> None:
        self._options = argparse.Namespace(
            socket=str(daemon.socket), seconds=seconds, output=output, json=True
        )
        self._enough = enough
        self._thread = threading.Thread(target=self._run)
        self._begun = threading.Event()
        self.status: int | None = None

    def _run(self) -> None:
        begun, enough = self._begun, self._enough

        class Heard(Rows):
            def add(self, answer: Mapping[str, Any]) -> None:
                super().add(answer)
                begun.set()
                if enough(self):
                    raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "Rows", Heard)
            self.status = trace.run(self._options)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Tracing:
        self._thread.start()
        assert self._begun.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(15)
        assert self.status == 0


INPUTS = {"a": [1.0] * 4, "b": [2.0] * 4}


def use(session: Session, count: int) -> None:
    for _ in range(count):
        session.run(INPUTS)


def test_requests_their_waits_runs_and_replies(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.pftrace"
    count = 0
    with connect(daemon.socket) as client, client.open_session("pair", slots=2) as session:
        # Where the machine stood still in that second there is little to see: once more.
        while count <= 20:
            before_ns = time.monotonic_ns()
            with Tracing(daemon, output) as tracing:
                while tracing.running:
                    use(session, 5)

            after_ns = time.monotonic_ns()
            told = json.loads(capsys.readouterr().out)
            assert told["dropped"] == 0
            count = told["requests"].get("ok", 0)

        (worker,) = [w for w in client.status()["workers"] if w["lane"] == "interactive"]

    read = read_trace(output.read_bytes())
    assert os.getpid() in read.pids.values()
    assert worker["pid"] in read.pids.values()
    (track,) = {name for name in read.names.values() if name.startswith("session ")}
    assert track.endswith(": pair")
    requests = read.on(track)
    waits = {one.flows[0]: one for one in read.on("queue of cpu/interactive")}
    runs = {one.flows[0]: one for one in read.on("runs of cpu/interactive")}
    replies = {instant.ends[0]: instant for instant in read.instants if instant.name == "reply"}
    assert len(requests) == len(waits) == len(runs) == len(replies) == count
    for request in requests:
        (flow,) = request.flows
        wait, run, reply = waits[flow], runs[flow], replies[flow]
        assert request.begin_ns == wait.begin_ns
        assert wait.end_ns <= run.begin_ns
        assert run.begin_ns < run.end_ns <= request.end_ns == reply.time_ns
        assert reply.track == request.track
        assert run.end_ns - run.begin_ns <= int(run.details["run_ns"]) + 1
        assert request.details["backend"] == "cpu"
        assert request.details["outcome"] == "ok"
        assert request.details["reason"] != "none"
        number = request.name.removeprefix("request ")
        assert (wait.name, run.name) == (f"wait {number}", f"run {number}")

    assert set(read.clocks) == {1, 3, 6}
    begin_ns, end_ns = requests[0].begin_ns, requests[-1].end_ns
    assert before_ns < begin_ns < end_ns < read.clocks[3], "the clocks are of the writing"
    assert read.clocks[3] < after_ns


def test_queues_refusals_and_a_dead_worker(daemon: DaemonProcess, tmp_path: Path) -> None:
    def is_all_there(rows: Rows) -> bool:
        return (
            any(request.attempts for request in rows.requests)
            and any(request.outcome == "DeadlineExceeded" for request in rows.requests)
            and any(event.track == "workers" for event in rows.events)
            and any(c.value and c.track.startswith("running cpu") for c in rows.counters)
        )

    output = tmp_path / "b.pftrace"
    with connect(daemon.socket) as client, client.open_session("pair", slots=2) as session:
        use(session, 1)
        (worker,) = [w for w in client.status()["workers"] if w["lane"] == "interactive"]
        with Tracing(daemon, output, 60, is_all_there):
            # Stopped, it answers nothing: one request is over its deadline, and the other
            # lives through the worker's death.
            os.kill(worker["pid"], signal.SIGSTOP)
            first = session.submit(INPUTS)
            late = session.submit(INPUTS, deadline_ms=300)
            with pytest.raises(DeadlineExceeded):
                late.result()

            os.kill(worker["pid"], signal.SIGKILL)
            first.result()

    read = read_trace(output.read_bytes())
    ended = [i for i in read.instants if read.names[i.track] == "workers"]
    assert [i.details["reason"] for i in ended] == ["signal:9 SIGKILL"]
    late_replies = [i for i in read.instants if i.name == "reply: DeadlineExceeded"]
    assert len(late_replies) == 1
    group = os.geteuid()
    running = [v for _, v in read.values[f"running cpu/interactive of {group}"]]
    assert max(running) >= 1
    retried = [one for one in read.slices if one.details.get("retries") == 1]
    assert len(retried) == 1
    assert retried[0].end_ns - retried[0].begin_ns > 0.25e9


def stream(control: Control, **parameters: Any) -> Iterator[dict[str, Any]]:
    control.send(message("WatchTrace", parameters, more=True))
    while True:
        reply, _ = control.receive()
        if "error" in reply:
            raise CallFailed(reply["error"], reply["parameters"])

        yield reply["parameters"]
        if not reply.get("continues"):
            return


def test_what_is_asked_wrongly(daemon: DaemonProcess) -> None:
    with Control(daemon.socket) as control:
        for seconds in (0, -1, 3601, 2**53):
            with pytest.raises(CallFailed) as failed:
                list(stream(control, seconds=seconds))

            assert failed.value.code == BadRequest.code

        control.send(message("WatchTrace", {"seconds": 1}))
        reply, _ = control.receive()
        assert reply["error"] == "org.varlink.service.ExpectedMore"


def first_answer(control: Control) -> dict[str, Any]:
    """Of a trace, once there is room: one whose connection was closed ends a moment later."""
    while True:
        try:
            return next(stream(control, seconds=60))
        except CallFailed as failed:
            if failed.name != "QuotaExceeded":
                raise


def test_traces_are_few_and_one_that_is_closed_makes_room(daemon: DaemonProcess) -> None:
    controls = [Control(daemon.socket) for _ in range(MAX_WATCHERS + 1)]
    try:
        for control in controls[:MAX_WATCHERS]:
            assert first_answer(control)["columns"] == list(COLUMNS)

        with pytest.raises(CallFailed, match="QuotaExceeded"):
            next(stream(controls[-1], seconds=60))

        controls[0].close()
        first_answer(controls[-1])
    finally:
        for control in controls:
            control.close()


def test_without_perfetto_the_command_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("perfetto")]:
        monkeypatch.delitem(sys.modules, name)

    monkeypatch.setitem(sys.modules, "perfetto", None)
    options = argparse.Namespace(socket=None, seconds=1, output=tmp_path / "x", json=False)
    with pytest.raises(CommandError, match=r"perfetto, .*pip install 'switchgear\[trace\]'"):
        trace.run(options)


def test_an_answer_of_another_interface_is_an_error() -> None:
    rows = Rows()
    with pytest.raises(ProtocolError, match="trace cannot be read"):
        rows.add({"columns": ["session"], "requests": [[1]]})
