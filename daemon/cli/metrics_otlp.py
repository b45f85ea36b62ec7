"""Sends a daemon's metrics to an OpenTelemetry collector: the same families, over OTLP."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.cli.command import CommandError, say
from switchgear.daemon.cli.metrics_answer import ANSWER_LIMIT_S, metrics_text, reach, read
from switchgear.daemon.telemetry.families import Distribution, Family
from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from types import ModuleType

INSTALL: Final = "python -m pip install 'switchgear[otel]'"
# UCUM units (https://ucum.org) by the ends of our names.
_UNITS: Final = {"_seconds": "s", "_bytes": "By", "_celsius": "Cel"}
_SDK: Final = "opentelemetry.sdk"
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.metric_exporter"


class Sender:
    """Asks the daemon and sends what it tells. `send` blocks; it never raises for a daemon or
    a collector that is away, and says that once."""

    def __init__(self, socket: str | None, endpoint: str) -> None:
        """:raises CommandError: the packages are not installed."""
        self._socket = socket
        self._endpoint = endpoint
        self._exporter = _module(_EXPORTER).OTLPMetricExporter(
            endpoint=endpoint, timeout=ANSWER_LIMIT_S
        )
        self._trouble = ""

    def send(self) -> bool:
        """One answer of the daemon; whether the collector took it."""
        try:
            with closing(reach(self._socket)) as control:
                pid = int(control.call("GetInfo", timeout_s=ANSWER_LIMIT_S).parameters["pid"])
                families = read(metrics_text(control))
        except SwitchgearError as error:
            self._tell(error.text)
            return False

        result = self._exporter.export(metrics_data(families, pid, time.time_ns()))
        if result.name != "SUCCESS":
            self._tell(f"{self._endpoint} takes no metrics")
            return False

        self._tell("")
        return True

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            say(f"switchgear: {trouble}" if trouble else "switchgear: metrics are sent again")

        self._trouble = trouble

    def close(self) -> None:
        """Ends the connection to the collector."""
        self._exporter.shutdown()


def follow(
    sender: Sender, every_s: float, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Sends until it is interrupted; a slow turn moves the next one, none is made up for."""
    try:
        while True:
            begin = time.monotonic()
            sender.send()
            sleep(max(0.0, every_s - (time.monotonic() - begin)))
    finally:
        sender.close()


def metrics_data(families: Sequence[Family], pid: int, now_ns: int) -> Any:
    """The families as the SDK's `MetricsData`; `now_ns` is since the epoch.

    Counters and histograms are cumulative since the daemon's start. The least and the greatest
    value of a histogram are not known, and not told.
    """
    sdk = _module(f"{_SDK}.metrics.export")
    start_ns = now_ns - int(_single(families, "switchgear_uptime_seconds") * 1e9)
    version = next(
        (
            labels[0]
            for family in families
            if family.name == "switchgear_build_info"
            for labels in family.samples
        ),
        "",
    )
    resource = _module(f"{_SDK}.resources").Resource(
        {
            "service.name": "switchgear",
            "service.version": version,
            "service.instance.id": str(pid),
        }
    )
    scope = _module(f"{_SDK}.util.instrumentation").InstrumentationScope(
        "switchgear", version or None
    )
    metrics = [_metric(sdk, family, start_ns, now_ns) for family in families if family.samples]
    return sdk.MetricsData(
        [sdk.ResourceMetrics(resource, [sdk.ScopeMetrics(scope, metrics, "")], "")]
    )


def _metric(sdk: ModuleType, family: Family, start_ns: int, now_ns: int) -> Any:
    cumulative = sdk.AggregationTemporality.CUMULATIVE
    points = []
    for values, value in family.samples.items():
        attributes = dict(zip(family.labels, values, strict=True))
        if isinstance(value, Distribution):
            points.append(
                sdk.HistogramDataPoint(
                    attributes,
                    start_ns,
                    now_ns,
                    value.count,
                    value.total,
                    list(value.counts),
                    list(value.bounds),
                    None,
                    None,
                )
            )
        else:
            points.append(sdk.NumberDataPoint(attributes, start_ns, now_ns, value))

    if family.kind == "histogram":
        data = sdk.Histogram(points, cumulative)
    elif family.kind == "counter":
        data = sdk.Sum(points, cumulative, is_monotonic=True)
    else:
        data = sdk.Gauge(points)

    return sdk.Metric(family.name, family.text, _unit(family.name), data)


def _unit(name: str) -> str:
    stem = name.removesuffix("_total")
    return next((unit for end, unit in _UNITS.items() if stem.endswith(end)), "1")


def _single(families: Sequence[Family], name: str) -> float:
    for family in families:
        if family.name == name:
            for value in family.samples.values():
                if not isinstance(value, Distribution):
                    return value

    return 0.0


def _module(name: str) -> Any:
    """:raises CommandError: its package is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("opentelemetry", "requests")):
            raise

        raise CommandError(
            f"OTLP needs {error.name}, which is not installed: {INSTALL}"
        ) from None
