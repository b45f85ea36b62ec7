"""Where a request goes: policies, limits, shares, moves; the same inputs, the same choice."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_helpers import candidate, measured, phone

from switchgear.daemon.routing.candidate import Candidate, Context
from switchgear.daemon.routing.choice import (
    DWELL_S,
    EXPLORE,
    EXPLORE_EVERY,
    HEDGE,
    Inputs,
    choose,
    decide,
)
from switchgear.daemon.routing.estimates import EnergyEstimate
from switchgear.daemon.routing.policies import BY_NUMBER, POLICIES, policy_of
from switchgear.daemon.routing.scores import RESERVE_SHARE, Row, limit_for
from switchgear.ipc.errors import BadRequest
from switchgear.ipc.record import Reason


class Session:
    """A session's choices among candidates, by name."""

    def __init__(self, policy: str = "max_efficiency", limit_ms: float = 50.0) -> None:
        self.places = phone()
        self.policy = POLICIES[policy]
        self.context = Context(limit_ms)
        self.reason = Reason.NONE

    def choose(self, now_s: float = 0.0) -> str:
        places = tuple(self.places.values())
        verdict = choose(places, self.policy, self.context, now_s)
        self.reason = Reason(verdict.reason)
        return places[verdict.chosen].key if verdict.chosen >= 0 else ""


@pytest.mark.parametrize(
    ("policy", "backend", "reason"),
    [
        ("max_performance", "vulkan", Reason.FASTEST),
        ("prefer_gpu", "vulkan", Reason.FASTEST),
        ("prefer_npu", "npu", Reason.POLICY),
        ("max_efficiency", "npu", Reason.POLICY),
        ("min_power", "npu", Reason.POLICY),
    ],
)
def test_each_policy_has_its_choice(policy: str, backend: str, reason: Reason) -> None:
    session = Session(policy)

    assert session.choose() == backend
    assert session.reason is reason


def test_the_preferred_kind_is_left_where_it_would_be_late() -> None:
    session = Session("prefer_cpu", limit_ms=50.0)
    assert session.choose() == "vulkan"

    patient = Session("prefer_cpu", limit_ms=100.0)
    assert patient.choose() == "cpu"


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadRequest, match="max_efficiency"):
        policy_of("fastest")


def test_efficiency_is_not_paid_for_with_lateness() -> None:
    session = Session(limit_ms=30.5)

    assert session.choose() == "vulkan"


def test_a_queue_sends_the_next_request_elsewhere_and_the_home_stays() -> None:
    session = Session()
    assert session.choose(0.0) == "npu"
    session.places["npu"].load.started(31.0, 0.0)

    assert session.choose(0.001) == "vulkan"
    assert session.context.home == "npu"

    session.places["npu"].load.ended()
    assert session.choose(0.04) == "npu"


def test_requests_spread_over_all_backends_as_the_queues_grow() -> None:
    session = Session("max_performance", limit_ms=200.0)
    where = []
    for number in range(6):
        name = session.choose(0.001 * number)
        place = session.places[name]
        place.load.queued(place.estimate.median_ms)
        where.append(name)

    assert set(where) == {"vulkan", "npu", "cpu"}


def test_a_better_place_is_moved_to_after_the_dwell_only() -> None:
    session = Session()
    session.places["npu"].share = 0.0
    session.places["npu"].state = "tripped"
    assert session.choose(0.0) == "vulkan"
    assert session.reason is Reason.TRIPPED

    # A forced move is taken back at once; one for a better score waits.
    session.places["npu"].share = 1.0
    assert session.choose(1.0) == "npu"
    session.policy = POLICIES["max_performance"]
    assert session.choose(2.0) == "npu"
    assert session.choose(1.0 + DWELL_S) == "vulkan"


def test_a_place_that_was_away_is_moved_back_to_at_once() -> None:
    session = Session()
    assert session.choose(0.0) == "npu"
    away = session.places
    session.places = {"cpu": away["cpu"]}
    assert session.choose(1.0) == "cpu"
    session.places = away
    assert session.choose(2.0) == "npu"


def test_a_little_better_is_no_reason_to_move() -> None:
    session = Session("max_performance")
    session.places["npu"].estimate = candidate("npu", "npu", 27.5, 2.5).estimate
    session.context.home = "vulkan"

    assert session.choose(1e3) == "vulkan"


def test_a_place_that_has_become_too_slow_is_left_at_once() -> None:
    session = Session()
    assert session.choose(0.0) == "npu"
    for _ in range(8):
        session.places["npu"].estimate.observe(90.0, 1.0)

    assert session.choose(1.0) == "vulkan"
    assert session.context.home == "vulkan"


def test_a_ramp_of_one_in_eight_is_every_eighth_request() -> None:
    session = Session()
    assert session.choose(0.0) == "npu"
    session.context.home = "vulkan"
    session.places["npu"].share = 1 / 8

    where = [session.choose(100.0 + 0.03 * number) for number in range(32)]

    assert [number for number, name in enumerate(where) if name == "npu"] == [7, 15, 23, 31]
    assert session.context.home == "vulkan"


def test_every_api_of_a_device_shares_its_turn() -> None:
    session = Session("max_performance")
    session.places["opencl"] = candidate("opencl", "gpu", 28.5, 6.8)
    session.context.home = "npu"
    for name in ("vulkan", "opencl"):
        session.places[name].share = 1 / 4

    where = [session.choose(100.0 + 0.03 * number) for number in range(16)]

    assert sum(name in ("vulkan", "opencl") for name in where) <= 4


def test_a_shedding_home_is_left_whole_where_another_answers_in_time() -> None:
    session = Session("max_performance")
    assert session.choose(0.0) == "vulkan"
    session.places["vulkan"].share = 0.75
    session.places["vulkan"].state = "shedding"

    where = [session.choose(0.03 * number) for number in range(1, 40)]

    first = where.index("npu")
    assert set(where[first:]) == {"npu"}


def test_a_share_is_no_reason_to_be_late() -> None:
    session = Session("max_performance")
    del session.places["npu"]
    session.places["vulkan"].share = 1 / 8
    session.places["vulkan"].state = "shedding"

    assert {session.choose(0.03 * number) for number in range(16)} == {"vulkan"}


def test_what_is_late_anyway_does_not_stand_before_what_is_not() -> None:
    session = Session("max_performance")
    del session.places["npu"]
    session.places["vulkan"].load.started(28.0, 0.0)

    # 56 ms on the GPU, 55 ms on the CPU: both late, and the GPU has the next one to answer.
    assert session.choose(0.0) == "cpu"


def test_what_may_be_in_time_is_better_than_what_is_surely_late() -> None:
    session = Session("max_performance")
    del session.places["npu"]
    # 45 ms give or take 5, against a GPU that is busy for another 27 ms.
    session.places["cpu"].estimate = measured(45.0, spread=0.17)
    session.places["vulkan"].load.started(28.0, 0.0)
    gpu, cpu = session.places["vulkan"], session.places["cpu"]
    gpu_ms = gpu.estimate.median_ms + gpu.load.wait_ms(0.001)
    assert gpu_ms - cpu.estimate.median_ms < 3.0 * cpu.estimate.spread_ms

    assert session.choose(0.001) == "cpu"


def test_where_no_run_is_short_enough_the_earliest_answer_decides() -> None:
    session = Session(limit_ms=10.0)

    assert session.choose() == "vulkan"


def test_without_a_limit_energy_decides_within_the_tolerance() -> None:
    session = Session(limit_ms=0.0)

    assert session.choose() == "npu"


def tripped(limit_ms: float = 50.0) -> Session:
    """The GPU is in reserve; the CPU answers within 45 ms."""
    session = Session(limit_ms=limit_ms)
    vulkan = session.places["vulkan"]
    vulkan.share, vulkan.state = RESERVE_SHARE, "tripped"
    session.places = {
        "vulkan": vulkan,
        "cpu": candidate("cpu", "cpu", 45.0, 4.2),
    }
    return session


def test_a_place_in_reserve_has_nothing_that_another_answers_in_time() -> None:
    session = tripped()

    assert {session.choose(0.033 * number) for number in range(200)} == {"cpu"}
    assert session.reason is Reason.ONLY_READY


@pytest.mark.parametrize("share", [RESERVE_SHARE, 0.125])
def test_no_energy_is_a_reason_to_take_more_than_the_share(share: float) -> None:
    session = tripped()
    session.places["vulkan"].share = share
    session.places["cpu"].energy = EnergyEstimate(1e6)

    found = [session.choose(0.033 * number) for number in range(80)]

    assert found.count("vulkan") == int(80 * share)


def test_a_place_in_reserve_has_what_no_other_answers_in_time() -> None:
    session = tripped()
    session.places["cpu"].load.started(45.0, 0.0)

    assert session.choose(0.001) == "vulkan"
    assert session.reason is Reason.FASTEST

    # It moves nobody's home.
    session.places["cpu"].load.clear()
    assert session.choose(0.05) == "cpu"


@pytest.mark.parametrize(("gpu_ms", "backend"), [(70.0, "cpu"), (50.0, "vulkan")])
def test_where_all_are_late_a_place_in_reserve_is_one_of_them(
    gpu_ms: float, backend: str
) -> None:
    session = tripped(limit_ms=20.0)
    session.places["vulkan"].estimate = measured(gpu_ms)
    session.places["cpu"].load.queued(15.0)

    assert session.choose() == backend


def test_a_place_in_reserve_has_no_turn_and_no_copy() -> None:
    session = tripped()
    session.context.hedge = True
    places = tuple(session.places.values())

    for number in range(200):
        verdict = choose(places, session.policy, session.context, 0.033 * number)
        assert (places[verdict.chosen].key, verdict.hedge) == ("cpu", -1)


def test_heat_turns_performance_to_what_lasts() -> None:
    session = Session("max_performance")
    assert session.choose(0.0) == "vulkan"
    session.context.case_headroom_c = 5.0

    assert session.choose(100.0) == "npu"

    # Not taken up again a degree later.
    session.context.case_headroom_c = 11.0
    assert session.choose(200.0) == "npu"
    session.context.case_headroom_c = 20.0
    assert session.choose(300.0) == "vulkan"


def test_a_stateful_session_stays_where_its_state_lives() -> None:
    session = Session()
    session.context.pinned = "cpu"
    session.places["cpu"].share = 0.0

    assert session.choose() == "cpu"
    assert session.reason is Reason.PINNED

    del session.places["cpu"]
    assert session.choose() == ""


def test_nothing_open_is_said() -> None:
    session = Session()
    for place in session.places.values():
        place.share = 0.0

    assert session.choose() == ""


def test_the_only_candidate_says_why() -> None:
    session = Session()
    session.places = {"cpu": session.places["cpu"]}
    assert (session.choose(), session.reason) == ("cpu", Reason.ONLY_READY)

    session.context.requested = True
    assert (session.choose(), session.reason) == ("cpu", Reason.REQUESTED)


def test_an_unsupported_model_is_told_apart_from_a_hot_device() -> None:
    session = Session()
    session.places["npu"].share = 0.0
    session.places["npu"].state = "degraded"

    assert session.choose() == "vulkan"
    assert session.reason is Reason.DEGRADED


def test_exploration_needs_idle_capacity_and_takes_one_in_64() -> None:
    session = Session()
    quiet = [session.choose(100.0) for _ in range(EXPLORE_EVERY)]
    session.context.explore = True
    curious = [session.choose(100.0) for _ in range(2 * EXPLORE_EVERY)]

    assert set(quiet) == {"npu"}
    assert sum(name != "npu" for name in curious) == 2
    assert session.context.home == "npu"


def test_a_second_place_is_named_only_when_hedging_is_asked_for() -> None:
    session = Session()
    places = tuple(session.places.values())
    plain = choose(places, session.policy, Context(50.0), 0.0)
    hedged = choose(places, session.policy, Context(50.0, hedge=True), 0.0)

    assert plain.hedge == -1
    assert places[hedged.chosen].key == "npu"
    assert places[hedged.hedge].key == "vulkan"


@pytest.mark.parametrize("why", ["busy", "shedding"])
def test_a_copy_goes_only_where_it_takes_nobodys_turn(why: str) -> None:
    session = Session()
    vulkan = session.places["vulkan"]
    if why == "busy":
        vulkan.load.started(5.0, 0.0)
    else:
        vulkan.share, vulkan.state = 0.75, "shedding"

    places = tuple(session.places.values())
    hedged = choose(places, session.policy, Context(50.0, hedge=True), 0.0)

    assert places[hedged.chosen].key == "npu"
    assert places[hedged.hedge].key == "cpu"


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, ...]:
    count = draw(st.integers(1, 5))
    found = []
    for number in range(count):
        share = draw(st.sampled_from([0.0, RESERVE_SHARE, 0.125, 0.5, 1.0]))
        found.append(
            Row(
                f"place{number}",
                draw(st.sampled_from(["cpu", "gpu", "npu"])),
                share,
                share >= 1.0 or (share > 0.0 and draw(st.booleans())),
                draw(st.sampled_from(["normal", "tripped", "shedding", "degraded"])),
                draw(st.just(0.0) | st.floats(0.0, 1e3)),
                draw(st.floats(0.1, 1e3)),
                draw(st.floats(0.0, 50.0)),
                draw(st.floats(0.0, 20.0)),
                draw(st.floats(0.1, 1e4)),
                draw(st.floats(-20.0, 80.0) | st.just(inf)),
                draw(st.floats(0.0, 1e4) | st.just(inf)),
            )
        )

    return tuple(found)


INPUTS = st.builds(
    Inputs,
    now_s=st.floats(0.0, 1e6),
    policy=st.sampled_from(sorted(BY_NUMBER)),
    limit_ms=st.sampled_from([0.0, 5.0, 50.0, 500.0]),
    home=st.sampled_from(["", "place0", "place1", "place9"]),
    home_since_s=st.floats(-1e3, 1e6) | st.just(-inf),
    pinned=st.just(""),
    flags=st.sampled_from([0, HEDGE, EXPLORE, HEDGE | EXPLORE]),
    case_headroom_c=st.floats(-10.0, 50.0) | st.just(inf),
    rows=rows(),
)


@given(INPUTS)
def test_a_choice_is_made_among_what_is_open_and_only_once(inputs: Inputs) -> None:
    policy = BY_NUMBER[inputs.policy]

    verdict = decide(inputs, policy)

    assert verdict == decide(inputs, policy)
    able = [number for number, row in enumerate(inputs.rows) if row.share > 0.0]
    if len(inputs.rows) > 1:
        assert (verdict.chosen in able) if able else verdict.chosen == -1

    if verdict.hedge >= 0:
        second = inputs.rows[verdict.hedge]
        assert (second.open, second.share, second.wait_ms) == (True, 1.0, 0.0)
        assert second.kind != inputs.rows[verdict.chosen].kind


@given(INPUTS)
def test_efficiency_never_prefers_a_late_answer_to_one_in_time(inputs: Inputs) -> None:
    policy = POLICIES["max_efficiency"]
    inputs = inputs._replace(policy=policy.number, flags=0, home="")
    verdict = decide(inputs, policy)
    limit_ms = limit_for(inputs.rows, policy, inputs.limit_ms)
    sure = [
        row.wait_ms + row.service_ms + row.switch_ms + 3.0 * row.spread_ms
        for row in inputs.rows
    ]
    full = [number for number, row in enumerate(inputs.rows) if row.share >= 1.0]
    if len(inputs.rows) > 1 and any(sure[number] <= limit_ms for number in full):
        # By less than the millisecond that a share may cost.
        assert sure[verdict.chosen] <= limit_ms + 1e-6 or inputs.rows[verdict.chosen].open


def test_policies_have_numbers_of_their_own() -> None:
    assert sorted(BY_NUMBER) == list(range(len(POLICIES)))
    assert replace(POLICIES["min_power"]) == POLICIES["min_power"]


def test_candidates_of_one_row_stay_cheap_to_build() -> None:
    place: Candidate = phone()["npu"]

    row = place.row(12.0)

    assert (row.key, row.open, row.wait_ms) == ("npu", True, 0.0)
    assert row.unseen_s == 12.0
