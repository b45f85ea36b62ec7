"""Niceness, processors and threads of workers, as the kernel has them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from daemon_process import DaemonProcess
from raw_client import Control, error_name

from switchgear.backends import generate

pytestmark = pytest.mark.engine

ONE = max(os.sched_getaffinity(0))
ABSENT = 4095


def workers(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """The worker of each lane, both of which have served."""
    with Control(daemon.socket) as control:
        control.load(generate.identity((4,)), name="quick")
        for priority in ("normal", "batch"):
            with control.open_session("quick", priority=priority) as session:
                session.infer(1)
                assert error_name(session.receive()) == ""

        status = control.call("GetStatus")
        return {worker["lane"]: worker for worker in status["workers"]}


def niceness(worker: dict[str, Any]) -> int:
    return os.getpriority(os.PRIO_PROCESS, worker["pid"])


def test_each_lane_has_its_own() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    config = (
        f"[cpu]\nthreads = 2\nniceness = {own + 3}\naffinity = [{ONE}]\n"
        f"batch_threads = 1\nbatch_niceness = {own + 7}\n"
    )
    with DaemonProcess(config=config) as daemon:
        by_lane = workers(daemon)
        assert niceness(by_lane["interactive"]) == own + 3
        assert niceness(by_lane["batch"]) == own + 7
        assert [by_lane[lane]["threads"] for lane in ("interactive", "batch")] == [2, 1]
        for worker in by_lane.values():
            assert os.sched_getaffinity(worker["pid"]) == {ONE}


def test_a_processor_that_is_not_there_is_told_and_the_rest_applies() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    config = f"[cpu]\naffinity = [{ABSENT}]\nniceness = {own + 3}\n"
    with DaemonProcess(config=config) as daemon:
        assert niceness(workers(daemon)["interactive"]) == own + 3
        status = daemon.call("GetStatus")["parameters"]
        assert status["problems"] == [f"cpu.affinity: there is no processor {ABSENT} here"]
        assert f"affinity [{ABSENT}] not applied: " in daemon.log_text()
