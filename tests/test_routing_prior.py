"""What an unmeasured pair is expected to take, and the rule of thumb where nothing is known."""

from __future__ import annotations

import pytest

from switchgear.daemon.routing.prior import Speed, Work, prior, rule_of_thumb

MB = 1_000_000


def test_the_fingerprint_gives_arithmetic_moving_and_submitting() -> None:
    work = Work(17 * MB, multiply_adds=569_000_000, moved_bytes=600_000)
    speed = Speed("gpu", gigaflops=500.0, bandwidth_mb_s=3000.0, submit_ms=0.4)

    found = prior(work, speed, cpu_ms=20.0)

    # 1.138e9 operations at 5e11 a second, 0.6 MB at 3000 MB/s, and the overhead.
    assert found.expected_ms == pytest.approx(2.276 + 0.2 + 0.4)
    assert found.why.startswith("fingerprint: 2.3 ms of arithmetic")


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (Work(49_999_999, wanted_ms=10.1), "gpu"),
        (Work(49_999_999), "gpu"),
        (Work(49_999_999, wanted_ms=10.0), "cpu"),
        (Work(49_999_999, wanted_ms=5.0), "cpu"),
        (Work(49_999_999, wanted_ms=4.9), "npu"),
        (Work(50_000_000, wanted_ms=30.0), "npu"),
        (Work(1000, video=True), "npu"),
    ],
)
def test_the_rule_of_thumb_on_both_sides_of_each_number(work: Work, kind: str) -> None:
    assert rule_of_thumb(work)[0] == kind


def test_the_rule_names_its_clause_and_who_answers_meanwhile() -> None:
    found = prior(Work(4 * MB, wanted_ms=33.0), Speed("gpu"), cpu_ms=40.0)

    assert found.expected_ms == 20.0
    assert "under 50 MB with more than 10 ms" in found.why
    assert "the CPU answers meanwhile" in found.why


def test_a_device_that_the_rule_does_not_name_is_no_faster_than_the_cpu() -> None:
    found = prior(Work(4 * MB, video=True), Speed("gpu", submit_ms=0.5), cpu_ms=40.0)

    assert found.expected_ms == 40.5
    assert "video" in found.why


def test_the_cpu_is_measured() -> None:
    assert prior(Work(4 * MB), Speed("cpu"), cpu_ms=40.0).expected_ms == 40.0


def test_a_cpu_without_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        prior(Work(1), Speed("gpu"), cpu_ms=0.0)
