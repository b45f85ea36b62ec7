"""Metrics over OTLP: what a collector receives, read by OpenTelemetry's own messages."""

from __future__ import annotations

import argparse
import gzip
import importlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from top_helpers import metrics

from switchgear.backends import generate
from switchgear.client import connect
from switchgear.daemon.cli import metrics as command
from switchgear.daemon.cli import metrics_otlp
from switchgear.daemon.cli.command import CommandError, UsageError
from switchgear.daemon.telemetry.families import Family

if TYPE_CHECKING:
    from collections.abc import Iterator

# OpenTelemetry comes with the first Python's packages only.
pytestmark = pytest.mark.engine


class Collector:
    """Takes what is sent to /v1/metrics; `status` is what it answers."""

    def __init__(self) -> None:
        collector = self
        self.received: list[Any] = []
        self.status = 200
        service = importlib.import_module(
            "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2"
        )

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)

                assert self.path == "/v1/metrics"
                request = service.ExportMetricsServiceRequest.FromString(data)
                collector.received.append(request)
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config="[cpu]\nthreads = 1\n") as running:
        yield running


def attributes(point: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in point.attributes}


def test_a_collector_receives_what_the_daemon_counts(
    daemon: DaemonProcess, collector: Collector
) -> None:
    with connect(daemon.socket) as client:
        client.load_model(generate.two_inputs(), "pair")
        with client.open_session("pair") as session:
            for _ in range(9):
                session.run(a=[1.0] * 4, b=[2.0] * 4)

    sender = metrics_otlp.Sender(str(daemon.socket), collector.url)
    assert sender.send()
    sender.close()
    (request,) = collector.received
    (resource,) = request.resource_metrics
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert about["service.name"] == "switchgear"
    assert about["service.instance.id"] == str(daemon.pid)
    (scope,) = resource.scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    requests = found["switchgear_requests_total"]
    assert requests.sum.is_monotonic
    (point,) = requests.sum.data_points
    assert point.as_double == 9
    assert attributes(point)["outcome"] == "ok"
    latency = found["switchgear_request_duration_seconds"]
    assert latency.unit == "s"
    (times,) = latency.histogram.data_points
    assert times.count == sum(times.bucket_counts) == 9
    assert len(times.bucket_counts) == len(times.explicit_bounds) + 1
    assert 0 < times.sum < 60
    assert not times.HasField("min"), "nobody kept it"
    assert 0 < times.time_unix_nano - times.start_time_unix_nano < 300e9
    (ready,) = found["switchgear_ready"].gauge.data_points
    assert ready.as_double == 1
    assert found["switchgear_memory_rss_bytes"].unit == "By"


def test_every_kind_of_family_has_its_kind_of_data() -> None:
    uptime = Family("switchgear_uptime_seconds", "gauge", "")
    uptime.set(100.0)
    families = [*metrics({"cpu": [1, 2, 0, 0, 3]}, temperature_mc=50_000), uptime]
    data = metrics_otlp.metrics_data(families, 7, 10**18)
    (scope,) = data.resource_metrics[0].scope_metrics
    kinds = {metric.name: type(metric.data).__name__ for metric in scope.metrics}
    assert kinds["switchgear_request_duration_seconds"] == "Histogram"
    assert kinds["switchgear_requests_total"] == "Sum"
    assert kinds["switchgear_temperature_celsius"] == "Gauge"
    units = {metric.name: metric.unit for metric in scope.metrics}
    assert units["switchgear_temperature_celsius"] == "Cel"
    (histogram,) = [m for m in scope.metrics if m.name == "switchgear_request_duration_seconds"]
    (point,) = histogram.data.data_points
    assert (list(point.bucket_counts), point.count) == ([1, 2, 0, 0, 3], 6)
    assert point.start_time_unix_nano == 10**18 - 100 * 10**9


def test_a_daemon_that_is_away_is_told_once_and_asked_again(
    daemon: DaemonProcess, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    sender = metrics_otlp.Sender("/nowhere/switchgear.sock", collector.url)
    assert not sender.send()
    assert not sender.send()
    assert capsys.readouterr().err.count("no daemon answers") == 1
    sender._socket = str(daemon.socket)
    assert sender.send()
    assert "sent again" in capsys.readouterr().err
    sender.close()


def test_a_collector_that_refuses_is_told(
    daemon: DaemonProcess, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 400
    sender = metrics_otlp.Sender(str(daemon.socket), collector.url)
    assert not sender.send()
    assert f"{collector.url} takes no metrics" in capsys.readouterr().err
    sender.close()


def test_it_is_sent_at_each_turn_until_it_is_interrupted(
    daemon: DaemonProcess, collector: Collector
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        metrics_otlp.follow(metrics_otlp.Sender(str(daemon.socket), collector.url), 60.0, sleep)

    assert len(collector.received) == 3
    assert all(0 < seconds <= 60 for seconds in slept)


def options(**fields: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"socket": None, "json": False, "every": 10.0, **fields})


def test_what_is_typed_wrongly() -> None:
    for every in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="--every"):
            command.run(options(otlp="http://127.0.0.1:1/", every=every))

    with pytest.raises(UsageError, match="--otlp needs a URL"):
        command.run(options(otlp="127.0.0.1:4318"))


def test_without_opentelemetry_it_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(CommandError, match=r"pip install 'switchgear\[otel\]'"):
        command.run(options(otlp="http://127.0.0.1:1/"))
