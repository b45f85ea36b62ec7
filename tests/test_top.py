"""What `switchgear top` works out of a daemon's answers, and its lines."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from top_helpers import BOUNDS, metrics, status, worker

from switchgear.daemon.cli import top, top_text
from switchgear.daemon.cli.command import CommandError, UsageError
from switchgear.daemon.cli.status_figures import breaker_faults, lines
from switchgear.daemon.cli.top_figures import ms_text, quantile, read_figures, since
from switchgear.daemon.cli.top_picture import EVENTS, POINTS, History, Picture
from switchgear.daemon.telemetry.families import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 80


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.0), (0.25, 0.0005), (0.5, 0.001), (0.75, 0.0015), (1.0, 0.002)],
)
def test_a_quantile_lies_on_a_line_within_its_bucket(share: float, expected: float) -> None:
    value = quantile(Distribution(BOUNDS, [10, 10, 0, 0, 0], 0.0), share)
    assert value is not None
    assert math.isclose(value, expected)


def test_quantiles_at_the_edges() -> None:
    assert quantile(Distribution(BOUNDS, [0] * 5, 0.0), 0.5) is None
    # Above the last bound nothing more is known.
    assert quantile(Distribution(BOUNDS, [0, 0, 0, 0, 3], 0.0), 0.5) == BOUNDS[-1]


@given(st.lists(st.integers(0, 50), min_size=5, max_size=5).filter(any), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_of_its_rank(counts: list[int], share: float) -> None:
    value = quantile(Distribution(BOUNDS, counts, 0.0), share)
    assert value is not None
    rank = share * sum(counts)
    below = 0
    for low, high, count in zip((0.0, *BOUNDS), (*BOUNDS, BOUNDS[-1]), counts, strict=True):
        if count and below + count >= rank:
            assert low - 1e-12 <= value <= high + 1e-12
            return

        below += count


def test_only_what_came_since_the_last_answer_counts() -> None:
    before = Distribution(BOUNDS, [5, 0, 0, 0, 1], 1.0)
    now = Distribution(BOUNDS, [7, 0, 2, 0, 1], 1.5)
    recent = since(now, before)
    assert (list(recent.counts), recent.total) == ([2, 0, 2, 0, 0], 0.5)
    assert since(now, None) is now
    assert since(before, now) is before, "it began anew"


def test_milliseconds_have_the_digits_that_matter() -> None:
    assert [ms_text(v) for v in (0.00021, 0.0049, 0.068, 1.5, None)] == [
        "0.21", "4.9", "68", "1500", "-",
    ]  # fmt: skip


def test_rates_and_medians_are_of_the_last_interval() -> None:
    history = History()
    first = history.add(status(), metrics({"cpu": [0, 0, 0, 0, 9]}), 10.0, "12:00:00")
    assert first.backends[0].rate is None, "one answer tells no rate"
    second = history.add(status(), metrics({"cpu": [40, 0, 0, 0, 9]}), 12.0, "12:00:02")
    cpu, vulkan = second.backends
    assert cpu.rate == 20.0
    assert cpu.median_s is not None
    assert math.isclose(cpu.median_s, 0.0005)
    assert (vulkan.rate, vulkan.median_s) == (0.0, None)
    third = history.add(status(), metrics({"cpu": [40, 0, 0, 0, 9]}), 13.0, "12:00:03")
    assert third.backends[0].rate == 0.0
    assert third.latency == {"cpu": (cpu.median_s, None)}


def test_a_minute_is_kept() -> None:
    history = History()
    for second in range(POINTS + 10):
        picture = history.add(status(), metrics({"cpu": [second, 0, 0, 0, 0]}), second, "")

    assert len(picture.latency["cpu"]) == POINTS


def test_changes_become_events() -> None:
    history = History()
    history.add(status(), metrics({"cpu": [1, 0, 0, 0, 0]}), 0.0, "12:00:00")
    died = worker("cpu", "interactive", 5000, restarts=1, last_end="signal:9 SIGKILL")
    changed = status(
        backends=[
            {"name": "cpu", "state": "ready", "reason": "exact"},
            {"name": "vulkan", "state": "absent", "reason": "errno:2 no driver"},
        ],
        workers=[died],
        problems=["metrics.listen: in use"],
        models=[{"model": "cd" * 32, "name": "pose", "status": "ready"}],
    )
    later = metrics({"cpu": [1, 0, 0, 0, 0]}, {("none", "Busy"): 3}, breaker="open")
    picture = history.add(changed, later, 1.0, "12:00:01")
    assert list(picture.events)[1:] == [
        "12:00:01  vulkan is absent: errno:2 no driver",
        "12:00:01  the cpu interactive worker ended: signal:9 SIGKILL",
        "12:00:01  breaker of device gpu0: closed -> open",
        "12:00:01  metrics.listen: in use",
        "12:00:01  model pose was loaded",
        "12:00:01  model face is gone",
        "12:00:01  3 x Busy",
    ]
    again = history.add(changed, later, 2.0, "12:00:02")
    assert again.events == picture.events, "told once"


def test_events_are_bounded() -> None:
    history = History()
    for second in range(EVENTS + 50):
        picture = history.add(status(state=f"s{second}"), [], second, "")

    assert len(picture.events) == EVENTS


def test_a_daemon_that_goes_away_and_another_that_comes() -> None:
    history = History()
    history.add(status(), metrics({"cpu": [9, 0, 0, 0, 0]}), 0.0, "12:00:00")
    gone = history.gone("no daemon answers", "12:00:01")
    assert gone.headline == "NOT FINE: no daemon answers"
    assert not gone.good
    still = history.gone("no daemon answers", "12:00:02")
    assert len(still.events) == len(gone.events), "told once"
    back = history.add(status(pid=9), metrics({"cpu": [1, 0, 0, 0, 0]}), 3.0, "12:00:03")
    assert back.backends[0].rate is None, "counts of another daemon are not compared"
    assert back.good


def test_the_state_of_a_backend_is_its_breakers_where_that_says_more() -> None:
    history = History()
    picture = history.add(
        status(), metrics({}, breaker="half_open", temperature_mc=61_500), 0.0, ""
    )
    cpu, vulkan = picture.backends
    assert (cpu.state, cpu.zone) == ("ready", None)
    assert vulkan.state == "recovering"
    assert vulkan.zone is not None
    assert (vulkan.zone.temperature_c, vulkan.zone.headroom_c) == (61.5, 3.5)


def full_picture() -> Picture:
    history = History()
    history.add(status(), metrics({"cpu": [0] * 5, "vulkan": [0] * 5}), 0.0, "12:00:00")
    done = [0] * 5
    for second, load in enumerate((3, 9, 27, 5), 1):
        done[second % 4] += load
        picture = history.add(
            status(workers=[worker("cpu", "interactive", 4712, queued=7, running=2)]),
            metrics(
                {"cpu": list(done), "vulkan": [0] * 5},
                temperature_mc=64_900,
                breaker="shedding",
            ),
            float(second),
            f"12:00:0{second}",
        )

    return picture


def test_every_line_fits_the_screen() -> None:
    picture = full_picture()
    for width in (80, 60, 200):
        rows = [
            *top_text.backends(picture.backends, width),
            *top_text.reasons(picture.backends, width),
            *top_text.latency(picture, width),
            *top_text.queues(picture.queues, width),
            *top_text.zones(picture.zones, width),
        ]
        assert max(map(len, rows)) <= width

    (row,) = top_text.queues(picture.queues, WIDTH)
    assert "waits 7" in row
    assert row.endswith("#" * 7)


def test_a_sparkline_is_scaled_to_its_highest_point() -> None:
    assert top_text.sparkline([0.0, 0.5, 1.0, None, 1.0]) == "▁▅█ █"
    assert top_text.sparkline([0.0, 0.0]) == "▁▁"
    assert top_text.sparkline([]) == ""


# The status has the same figures.


def test_the_status_tells_requests_temperatures_and_breakers() -> None:
    failed = {("none", "Busy"): 10, ("cpu", "BackendFailed"): 2, ("none", "Cancelled"): 3}
    figures = read_figures(
        metrics({"cpu": [98, 0, 0, 2, 0]}, failed, breaker="open", temperature_mc=66_000)
    )
    text = lines(figures)
    assert "\nrequests" in text
    assert "  cpu      100 ok, median 0.51 ms, 99 % under 7.5 ms; BackendFailed 2" in text
    assert "  refused  Busy 10, Cancelled 3" in text
    assert "  gpu-thermal 66.0 C (-1.0 left)" in text
    assert breaker_faults(figures) == ["device gpu0 is tripped"]
    assert lines(read_figures([])) == []
    assert breaker_faults(read_figures(metrics({}))) == []


# The command.


@pytest.fixture
def without_textual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "switchgear.daemon.cli.top_screen", raising=False)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    monkeypatch.setitem(sys.modules, "textual", None)
    yield
    sys.modules.pop("switchgear.daemon.cli.top_screen", None)


def options(**fields: Any) -> argparse.Namespace:
    return argparse.Namespace(socket=None, json=False, **fields)


@pytest.mark.usefixtures("without_textual")
def test_without_textual_the_command_names_what_to_install() -> None:
    with pytest.raises(
        CommandError, match=r"(textual|rich), .*pip install 'switchgear\[screens\]'"
    ):
        top.run(options())


@pytest.mark.engine
def test_without_a_terminal_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(UsageError, match="terminal"):
            top.run(options())
