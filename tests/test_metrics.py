"""The metrics' families, their text, and the counting of requests."""

from __future__ import annotations

import asyncio
import hashlib
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fake_worker import FakeWorker, new_lane, new_session
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from switchgear.daemon import lane as lane_module
from switchgear.daemon.telemetry import metrics as metrics_module
from switchgear.daemon.telemetry import requests
from switchgear.daemon.telemetry.device_families import (
    BREAKER_STATES,
    BreakerRow,
    CacheRow,
    PoolRow,
    ZoneRow,
    breaker_families,
    cache_families,
    pool_families,
    zone_families,
)
from switchgear.daemon.telemetry.exposition import parse, render
from switchgear.daemon.telemetry.families import MAX_SAMPLES, Distribution, Family
from switchgear.daemon.telemetry.metrics import Metrics
from switchgear.daemon.telemetry.requests import BOUNDS_NS, OTHER, RequestCounts
from switchgear.ipc.errors import BY_CODE
from switchgear.ipc.record import Kind, Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from switchgear.daemon.lane import Lane

# What reads it comes with the first Python's packages only.
pytestmark = pytest.mark.engine


def text_of(families: Iterable[Family]) -> str:
    return "".join(render(families))


def foreign(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """What Prometheus's own parser reads: values by sample name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[key] = sample.value

    return found


label_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.dictionaries(label_text, st.floats(allow_nan=False), max_size=4),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
)
def test_any_label_and_value_is_read_back(values: dict[str, float], help_text: str) -> None:
    family = Family("a_total", "counter", help_text, ("name",))
    for label, value in values.items():
        family.set(value, label)

    text = text_of([family])
    read = foreign(text).get("a_total", {})
    assert read == {(("name", label),): value for label, value in values.items()}
    assert [one.samples for one in parse(text)] == ([family.samples] if values else [])


def test_a_histogram_is_cumulative_and_its_bounds_belong_to_it() -> None:
    family = Family("t_seconds", "histogram", "Times.", ("model",))
    family.set(Distribution([0.1, 1.0], [2, 0, 3], 12.5), "face")
    read = foreign(text_of([family]))
    by_bound = {dict(key)["le"]: value for key, value in read["t_seconds_bucket"].items()}
    assert by_bound == {"0.1": 2, "1": 2, "+Inf": 5}
    assert read["t_seconds_count"] == {(("model", "face"),): 5}
    assert read["t_seconds_sum"] == {(("model", "face"),): 12.5}
    (ours,) = parse(text_of([family]))
    value = ours.samples[("face",)]
    assert isinstance(value, Distribution)
    assert (list(value.bounds), list(value.counts), value.total) == ([0.1, 1], [2, 0, 3], 12.5)


def test_a_family_has_the_labels_it_names_and_is_cut_at_its_bound() -> None:
    family = Family("g", "gauge", "", ("a",))
    with pytest.raises(ValueError, match="labels"):
        family.set(1.0, "x", "y")

    for number in range(MAX_SAMPLES + 5):
        family.set(1.0, str(number))

    family.set(2.0, "0")
    assert (len(family.samples), family.cut) == (MAX_SAMPLES, 5)
    assert family.samples[("0",)] == 2.0


@pytest.mark.parametrize("line", ["a b c", "a{x=1} 1", "# TYPE a summary", "lonely 1"])
def test_what_is_no_metric_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse(line)


# What lies beyond the daemon.


def test_what_nobody_measured_is_left_out() -> None:
    families = [
        *breaker_families([]),
        *zone_families([]),
        *pool_families([]),
        *cache_families([]),
    ]
    assert text_of(families) == ""
    pool = text_of(pool_families([PoolRow("arena", 64, 0, 0, 1)]))
    assert "switchgear_pool_bytes" in pool
    assert "fragmentation" not in pool, "nothing is free: it has no fragmentation"
    zone = text_of(zone_families([ZoneRow("cpu", "cpu", 40_000, 0.5)]))
    assert "headroom" not in zone


def test_breakers_zones_pools_and_caches() -> None:
    breaker = BreakerRow("device", "gpu0", "open", {"heat": 2}, {"good": 3, "bad": 1})
    read = foreign(
        text_of(
            [
                *breaker_families([breaker]),
                *zone_families([ZoneRow("gpu-thermal", "gpu0", 61_500, 0.02, 3_500)]),
                *pool_families([PoolRow("arena", 700, 300, 100, 4)]),
                *cache_families([CacheRow("kernels", 9, 1, 4096)]),
            ]
        )
    )
    states = {dict(k)["state"]: v for k, v in read["switchgear_breaker_state"].items()}
    assert states == {state: float(state == "open") for state in BREAKER_STATES}
    assert list(read["switchgear_breaker_trips_total"].values()) == [2]
    assert sum(read["switchgear_breaker_probes_total"].values()) == 4
    assert list(read["switchgear_temperature_celsius"].values()) == [61.5]
    assert list(read["switchgear_headroom_celsius"].values()) == [3.5]
    (fragmentation,) = read["switchgear_pool_fragmentation_ratio"].values()
    assert math.isclose(fragmentation, 2 / 3)
    hits = {dict(k)["result"]: v for k, v in read["switchgear_cache_requests_total"].items()}
    assert hits == {"hit": 9, "miss": 1}


# Requests.


def named(name: str) -> Any:
    return SimpleNamespace(digest=hashlib.sha256(name.encode()).hexdigest(), label=name)


def served(counts: RequestCounts, model: Any, *times_ms: float) -> None:
    """Requests of a session of their own that took `times_ms` in all, half of it queued."""
    meter = counts.meter(model)
    for time_ms in times_ms:
        total_ns = int(time_ms * 1e6)
        request = SimpleNamespace(
            lane=SimpleNamespace(backend="cpu"),
            arrival_ns=1000,
            dispatch_ns=1000 + total_ns // 2,
        )
        reply = bytearray(Record(Kind.REPLY).pack())
        meter.finished(request, reply, total_ns // 4, 1000 + total_ns)  # type: ignore[arg-type]

    meter.close()


def by_name(counts: RequestCounts, **options: Any) -> dict[str, Family]:
    name_of = options.get("name_of")
    return {family.name: family for family in counts.families(name_of)}


@given(st.lists(st.floats(0, 20_000), min_size=1, max_size=50))
def test_each_time_is_in_the_bucket_of_its_bounds(times_ms: list[float]) -> None:
    counts = RequestCounts()
    served(counts, named("face"), *times_ms)
    family = by_name(counts)["switchgear_request_duration_seconds"]
    value = family.samples[("face", named("face").digest[:12], "cpu")]
    assert isinstance(value, Distribution)
    low = -1
    for bound, count in zip((*BOUNDS_NS, math.inf), value.counts, strict=True):
        assert count == sum(low < int(time * 1e6) <= bound for time in times_ms)
        low = int(bound) if bound != math.inf else 0

    assert math.isclose(value.total, sum(int(t * 1e6) for t in times_ms) / 1e9, abs_tol=1e-9)


def test_the_three_times_are_apart() -> None:
    counts = RequestCounts()
    served(counts, named("face"), 8.0, 8.0)
    sums = {}
    for name, family in by_name(counts).items():
        (value,) = family.samples.values()
        sums[name] = value.total if isinstance(value, Distribution) else value

    assert sums == {
        "switchgear_requests_total": 2,
        "switchgear_request_duration_seconds": 0.016,
        "switchgear_request_queue_seconds": 0.008,
        "switchgear_request_run_seconds": 0.004,
    }


def test_hostile_names_cost_a_bounded_amount() -> None:
    counts = RequestCounts()
    open_meter = counts.meter(named("kept"))
    for number in range(3 * requests.MAX_MODELS):
        served(counts, named(f"junk{number}"), 1.0)

    served(counts, named("kept"), 1.0)
    open_meter.close()
    family = by_name(counts)["switchgear_requests_total"]
    assert len(family.samples) <= requests.MAX_MODELS + 1
    assert family.samples[("kept", named("kept").digest[:12], "cpu", "ok")] == 1
    total = sum(value for value in family.samples.values() if isinstance(value, int))
    assert total == 3 * requests.MAX_MODELS + 1, "none is lost: the rest counts under other"
    assert (OTHER, "", "cpu", "ok") in family.samples


def test_open_sessions_beyond_the_bound_share_one_row() -> None:
    counts = RequestCounts()
    meters = [counts.meter(named(f"m{n}")) for n in range(requests.MAX_MODELS + 3)]
    for meter in meters:
        meter.rejected(100)

    family = by_name(counts)["switchgear_requests_total"]
    assert family.samples[(OTHER, "", "none", "BadRequest")] == 3
    assert len(family.samples) == requests.MAX_MODELS + 1


def test_outcomes_are_bounded_too() -> None:
    counts = RequestCounts()
    meters = [counts.meter(named(f"m{n}")) for n in range(requests.MAX_MODELS)]
    for meter in meters:
        for code in BY_CODE:
            meter.rejected(code)

    family = by_name(counts)["switchgear_requests_total"]
    assert len(family.samples) <= requests.MAX_OUTCOMES + len(BY_CODE)
    total = sum(value for value in family.samples.values() if isinstance(value, int))
    assert total == len(meters) * len(BY_CODE)


def test_models_of_others_count_under_other() -> None:
    counts = RequestCounts()
    served(counts, named("mine"), 1.0)
    served(counts, named("theirs"), 1.0, 2.0)
    mine = named("mine").digest
    family = by_name(counts, name_of={mine: "my-name"}.get)["switchgear_requests_total"]
    assert family.samples == {
        ("my-name", mine[:12], "cpu", "ok"): 1,
        (OTHER, "", "cpu", "ok"): 2,
    }


# Through a session and a lane.


class Bench:
    """One session with a meter on a lane whose worker answers when told."""

    def __init__(self) -> None:
        self.counts = RequestCounts()
        model = SimpleNamespace(
            state=False,
            quarantined=set(),
            deaths={},
            slowest_run_ns=0,
            label="face",
            digest="ab" * 8,
            threads=1,
        )
        self.lane: Lane = new_lane(queue_limit=1)
        self.session = new_session(1, self.lane, model, lambda data: None)
        self.session.meter = self.counts.meter(model)  # type: ignore[arg-type]
        self._next = 1

    def send(self, source: int = 0, target: int = 0) -> None:
        record = Record(Kind.INFER, self._next, epoch=1, input_slot=source, output_slot=target)
        self._next += 1
        self.session.receive(bytearray(record.pack()))

    @property
    def worker(self) -> FakeWorker:
        worker: object = self.lane.worker
        assert isinstance(worker, FakeWorker)
        return worker

    def outcomes(self) -> dict[tuple[str, str], float]:
        family = by_name(self.counts)["switchgear_requests_total"]
        return {key[2:]: v for key, v in family.samples.items() if isinstance(v, int)}  # type: ignore[misc]


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "WorkerProcess", FakeWorker)


@pytest.mark.usefixtures("without_processes")
def test_every_way_to_be_answered_is_counted_once() -> None:
    async def scenario() -> dict[tuple[str, str], float]:
        bench = Bench()
        bench.lane.start()
        bench.worker.become_ready()
        bench.send()
        bench.worker.answer()
        bench.send()
        bench.worker.answer(failed=True)
        bench.send(source=7)  # no such slot
        bench.send()
        bench.send()  # the slot is in flight
        bench.session.receive(bytearray(Record(Kind.CANCEL, bench._next - 2).pack()))
        bench.worker.answer()  # of the cancelled one: nobody hears it
        bench.send(target=1)
        bench.session.end()
        return bench.outcomes()

    assert asyncio.run(scenario()) == {
        ("cpu", "ok"): 1,
        ("cpu", "BackendFailed"): 1,
        ("none", "BadSlot"): 1,
        ("none", "SlotBusy"): 1,
        ("cpu", "Cancelled"): 1,
        ("cpu", "ClientGone"): 1,
    }


# A whole answer.


class Pool:
    @staticmethod
    def lanes() -> list[Any]:
        return []


def metrics_of(monkeypatch: pytest.MonkeyPatch, *visible_to_user: Any) -> Metrics:
    """Metrics of a service whose user 1 sees some models, and whose operator is user 0."""
    monkeypatch.setattr("switchgear.daemon.status.backend_states", lambda service: [])
    verdicts = SimpleNamespace(hits=0, misses=0, size_bytes=0)
    service: Any = SimpleNamespace(
        ready=True,
        version="0",
        info=lambda: {"uptime_s": 1.0},
        problems=[],
        pool=Pool,
        router=SimpleNamespace(board=None),
        sessions=SimpleNamespace(opened=0, in_flight=0, all=list),
        server=SimpleNamespace(connections=[]),
        models=SimpleNamespace(
            all_for=lambda uid: list(visible_to_user) if uid else [], verdicts=verdicts
        ),
        preparing=SimpleNamespace(verdicts=verdicts),
        is_operator=lambda uid: uid == 0,
    )
    service.pool.group_of = str
    return Metrics(service)


def test_a_user_sees_the_own_models_by_name_and_an_operator_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = metrics_of(monkeypatch, named("mine"))
    served(metrics.requests, named("mine"), 1.0)
    served(metrics.requests, named("theirs"), 1.0)

    def names(viewer: int | None) -> set[str]:
        read = foreign(asyncio.run(metrics.text(viewer)))
        return {dict(key)["model"] for key in read["switchgear_requests_total"]}

    assert names(0) == names(None) == {"mine", "theirs"}
    assert names(1) == {"mine", OTHER}


def test_an_answer_takes_turns_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "TURN_NS", 0)
    metrics = metrics_of(monkeypatch)
    for number in range(20):
        served(metrics.requests, named(f"m{number}"), 1.0)

    async def scenario() -> int:
        turns = 0
        task = asyncio.create_task(metrics.text(None))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)

        return turns

    assert asyncio.run(scenario()) > 60


def test_what_was_cut_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = metrics_of(monkeypatch)
    full = Family("g", "gauge", "", ("a",))
    for number in range(MAX_SAMPLES + 3):
        full.set(1.0, str(number))

    metrics.sources.append(lambda viewer: [full])
    read = foreign(asyncio.run(metrics.text(None)))
    assert read["switchgear_metrics_cut"] == {(): 3}
