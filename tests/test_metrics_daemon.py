"""The metrics of a real daemon: what it counts, and both ways to ask for it."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from daemon_process import DaemonProcess
from http_helpers import get
from prometheus_client.parser import text_string_to_metric_families
from raw_client import Control

from switchgear.backends import generate
from switchgear.client import Client, connect
from switchgear.daemon.cli import metrics as command
from switchgear.daemon.telemetry.exposition import parse
from switchgear.daemon.telemetry.families import Distribution, Family

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine

CONFIG = '[cpu]\nthreads = 1\n[metrics]\nlisten = "127.0.0.1:0"\n'


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as running:
        yield running


def scrape(daemon: DaemonProcess) -> dict[str, Family]:
    text = daemon.call("GetMetrics")["parameters"]["text"]
    # Prometheus's own parser has no objection either.
    names = {family.name for family in text_string_to_metric_families(text)}
    assert "switchgear_ready" in names
    return {family.name: family for family in parse(text)}


def run_some(client: Client, name: str, count: int) -> None:
    with client.open_session(name) as session:
        for _ in range(count):
            session.run(a=[1.0] * 4, b=[2.0] * 4)


def endpoint_of(daemon: DaemonProcess) -> tuple[str, int]:
    match = re.search(r"metrics on http://([0-9.]+):(\d+)/metrics", daemon.log_text())
    assert match is not None, daemon.log_text()
    return match.group(1), int(match.group(2))


def test_requests_are_counted_by_model_backend_and_outcome(daemon: DaemonProcess) -> None:
    with connect(daemon.socket) as client:
        client.load_model(generate.two_inputs(), "counted")
        run_some(client, "counted", 7)
        found = scrape(daemon)
        requests = {
            (model, backend, outcome): count
            for (model, _, backend, outcome), count in found[
                "switchgear_requests_total"
            ].samples.items()
        }
        assert requests[("counted", "cpu", "ok")] == 7
        for part in ("duration", "queue", "run"):
            family = found[f"switchgear_request_{part}_seconds"]
            (times,) = [v for key, v in family.samples.items() if key[0] == "counted"]
            assert isinstance(times, Distribution)
            assert times.count == 7
            assert times.total > 0


def test_the_state_of_the_daemon(daemon: DaemonProcess) -> None:
    found = scrape(daemon)
    assert found["switchgear_ready"].samples == {(): 1}
    assert found["switchgear_backend_ready"].samples[("cpu",)] == 1
    memory = found["switchgear_memory_rss_bytes"].samples
    own = memory[("daemon", "", "", "")]
    assert isinstance(own, float)
    assert 10e6 < own < 200e6
    group = str(os.geteuid())
    assert ("worker", "cpu", "interactive", group) in memory
    assert found["switchgear_metrics_cut"].samples == {(): 0}
    # Nothing has tripped, and nobody measures pools: they are left out.
    assert not [name for name in found if re.search("trips|probes|pool", name)]


def test_what_the_arenas_waste(daemon: DaemonProcess) -> None:
    """Against the layout that a client is told."""
    with connect(daemon.socket) as client:
        client.load_model(generate.two_inputs(), "wasteful")

    assert scrape(daemon)["switchgear_arena_fragmentation_ratio"].samples == {(): 0.0}
    with Control(daemon.socket) as control:
        reply, fds = control.call_with_fds("OpenSession", model="wasteful")
        layout = reply["layout"]
        slots = [*layout["inputs"], *layout["outputs"], layout["headers"]]
        filled = sum(length for slot in slots for _, _, length in slot)
        ratio = scrape(daemon)["switchgear_arena_fragmentation_ratio"].samples[()]
        assert ratio == pytest.approx(1 - filled / layout["size_bytes"])
        # Tensors of 16 bytes in pages of their own.
        assert isinstance(ratio, float)
        assert ratio > 0.9
        for fd in fds:
            os.close(fd)


def test_a_model_that_was_seen_before_is_a_hit(daemon: DaemonProcess) -> None:
    def asked(result: str) -> float:
        found = scrape(daemon)["switchgear_cache_requests_total"].samples
        value = found[("models", result)]
        assert isinstance(value, float)
        return value

    with connect(daemon.socket) as client:
        misses, hits = asked("miss"), asked("hit")
        client.load_model(generate.identity(), "one")
        assert asked("miss") == misses + 1
        client.unload_model("one")
        client.load_model(generate.identity(), "two")
        assert asked("hit") == hits + 1

    sizes = scrape(daemon)["switchgear_cache_bytes"].samples
    assert sizes[("models",)] != 0
    assert ("prepared",) in sizes


def test_the_port_tells_the_same(daemon: DaemonProcess) -> None:
    before: dict[str, Family] = {}
    ours = scrape(daemon)
    # Families come while the daemon's parts do, behind its start: a moment without any is
    # what can be compared.
    while set(before) != set(ours):
        before = ours
        answer = get(endpoint_of(daemon))
        assert answer.status == 200
        ours = scrape(daemon)

    theirs = {family.name: family for family in parse(answer.body)}
    assert set(theirs) == set(ours)
    for name in ("switchgear_requests_total", "switchgear_build_info"):
        assert theirs[name].samples == ours[name].samples


def test_a_worker_that_was_killed_is_a_restart(daemon: DaemonProcess) -> None:
    key = ("cpu", "interactive", str(os.geteuid()))

    def restarts() -> float:
        value = scrape(daemon)["switchgear_worker_restarts_total"].samples[key]
        assert isinstance(value, float)
        return value

    before = restarts()
    with connect(daemon.socket) as client:
        (worker,) = [w for w in client.status()["workers"] if w["lane"] == "interactive"]
        os.kill(worker["pid"], signal.SIGKILL)
        while restarts() == before:
            assert daemon.running

        client.load_model(generate.two_inputs(), "counted")
        run_some(client, "counted", 1)

    assert restarts() == before + 1


def test_a_port_that_is_taken_stops_no_daemon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = f'[metrics]\nlisten = "127.0.0.1:{port}"\n'
        with DaemonProcess(config=config, wait="listening") as daemon:
            # Its socket answers before it has tried the port.
            while not (problems := daemon.call("GetStatus")["parameters"]["problems"]):
                pass

            (problem,) = problems
            assert f"metrics.listen: 127.0.0.1:{port}" in problem
            assert "in use" in problem


def test_a_foreign_address_stops_the_start() -> None:
    process = DaemonProcess(config='[metrics]\nlisten = "0.0.0.0:9464"\n')
    try:
        with pytest.raises(AssertionError, match="the daemon ended"):
            process.start()

        assert "metrics.listen" in process.log_text()
        assert "other machines" in process.log_text()
    finally:
        process.remove()


def test_the_command_prints_text_or_json(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(socket=str(daemon.socket), json=False, otlp=None, every=10.0)
    assert command.run(options) == 0
    text = capsys.readouterr().out
    names = [family.name for family in parse(text)]
    assert "switchgear_uptime_seconds" in names
    options.json = True
    assert command.run(options) == 0
    told = json.loads(capsys.readouterr().out)
    assert {family["name"] for family in told} >= set(names)
    (info,) = [family for family in told if family["name"] == "switchgear_build_info"]
    (sample,) = info["samples"]
    assert sample["value"] == 1
    assert sample["labels"]["version"] == daemon.call("GetInfo")["parameters"]["version"]
