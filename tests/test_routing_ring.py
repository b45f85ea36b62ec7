"""Decisions in the ring: kept, dumped, replayed to the same choices, and said in words."""

from __future__ import annotations

import json
import random

import pytest
from routing_helpers import phone

from switchgear.daemon.routing.candidate import Context
from switchgear.daemon.routing.choice import choose
from switchgear.daemon.routing.explain import explain, table
from switchgear.daemon.routing.policies import POLICIES
from switchgear.daemon.routing.ring import (
    RING_DECISIONS,
    DecisionRing,
    Entry,
    dump,
    load,
    replay,
)
from switchgear.daemon.routing.scores import RESERVE_SHARE


def filled(ring: DecisionRing, decisions: int) -> list[int]:
    """Decisions of a session whose lanes, limits and shares change at random; the choices."""
    draw = random.Random(5)
    places = phone()
    context = Context(50.0)
    chosen = []
    for number in range(decisions):
        for place in places.values():
            place.load.clear()
            place.load.queued(draw.uniform(0.0, 40.0))
            place.share = draw.choice([0.0, 0.125, 1.0, 1.0])
            place.headroom_c = draw.uniform(0.0, 30.0)

        policy = draw.choice(list(POLICIES.values()))
        context.hedge = draw.random() < 0.1
        context.explore = draw.random() < 0.5
        verdict = choose(tuple(places.values()), policy, context, number * 0.03, ring, number)
        chosen.append(verdict.chosen)

    return chosen


def test_every_decision_is_replayed_to_the_same_choice() -> None:
    ring = DecisionRing()
    chosen = filled(ring, 1000)

    entries = list(load(dump(ring)))

    assert [entry.verdict.chosen for entry in entries] == chosen
    assert [replay(entry) for entry in entries] == [entry.verdict for entry in entries]
    assert len(set(chosen)) > 2


def test_a_dump_is_read_back_as_it_was() -> None:
    ring = DecisionRing()
    filled(ring, 200)

    assert list(load(dump(ring))) == list(ring)


def test_a_dump_is_json_lines_without_numbers_that_json_lacks() -> None:
    ring = DecisionRing()
    filled(ring, 3)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = list(dump(ring))
    assert len(lines) == 4
    for line in lines:
        json.loads(line, parse_constant=refuse)


def test_the_ring_keeps_the_last_4096() -> None:
    ring = DecisionRing()
    filled(ring, RING_DECISIONS + 10)

    assert len(ring) == RING_DECISIONS
    entries = list(ring)
    assert [entries[0].sequence, entries[-1].sequence] == [10, RING_DECISIONS + 9]
    assert [entry.request for entry in ring.last(2)] == [4104, 4105]
    assert ring.last(0) == []
    assert [entry.request for entry in ring.of_request(500)] == [500]
    assert ring.of_request(3) == []


@pytest.mark.parametrize("lines", [[], ["{}"], ["3"], ['{"switchgear_decisions": 99}']])
def test_what_is_no_dump_is_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="no dump"):
        list(load(lines))


def test_a_damaged_decision_is_refused() -> None:
    ring = DecisionRing()
    filled(ring, 1)
    head, line = dump(ring)

    with pytest.raises(ValueError, match="no decision"):
        list(load([head, line.replace("limit_ms", "limit")]))


def test_a_policy_of_another_version_is_refused() -> None:
    ring = DecisionRing()
    filled(ring, 1)
    (entry,) = ring
    other = entry._replace(inputs=entry.inputs._replace(policy=99))

    with pytest.raises(ValueError, match="policy number 99"):
        replay(other)


def decided(*, npu_share: float = 1.0, gpu_share: float = 0.0, wait_ms: float = 0.0) -> Entry:
    ring = DecisionRing()
    places = phone()
    places["vulkan"].share = gpu_share
    places["vulkan"].state = "tripped" if not gpu_share else "recovering"
    places["npu"].share = npu_share
    places["cpu"].load.queued(wait_ms)
    choose(tuple(places.values()), POLICIES["max_efficiency"], Context(50.0), 1.0, ring, 7)
    (entry,) = ring
    return entry


def test_a_decision_is_said_in_words() -> None:
    cause = "66.1 C over 65.0 and 3 frames over 200 ms"

    text = explain(decided(wait_ms=4.0), {"vulkan": cause})

    assert text.startswith(
        f"vulkan is tripped: {cause}; npu chosen: 31 ms expected + 0 ms queue"
    )
    assert text.endswith("; cpu 55 ms expected + 4 ms queue")


def test_a_policy_says_what_it_weighed() -> None:
    text = explain(decided(gpu_share=1.0))

    assert "npu chosen" in text
    assert "77.5 mJ, within 50 ms (max_efficiency)" in text


def test_a_place_in_reserve_is_said_with_what_closed_it() -> None:
    causes = {"vulkan": "it is too warm"}
    idle = explain(decided(gpu_share=RESERVE_SHARE), causes)
    assert idle.startswith("vulkan is recovering: it is too warm; npu chosen")

    busy = explain(decided(gpu_share=RESERVE_SHARE, npu_share=0.0, wait_ms=9.0), causes)
    assert "vulkan is recovering: it is too warm" in busy
    assert "vulkan chosen: 28 ms expected + 0 ms queue, no other place answers in time" in busy


def test_a_share_is_said() -> None:
    assert "vulkan is recovering: 12% of the requests" in explain(decided(gpu_share=0.125))


def test_a_second_copy_is_said_and_is_one_decision() -> None:
    places, ring = phone(), DecisionRing()
    context = Context(50.0, hedge=True)
    choose(tuple(places.values()), POLICIES["max_efficiency"], context, 1.0, ring, 7)
    (entry,) = ring.of_request(7)
    assert "vulkan 28 ms expected + 0 ms queue, a copy runs there" in explain(entry)
    marked = {row["backend"]: (row["chosen"], row["copy"]) for row in table(entry)}
    assert marked == {"vulkan": (False, True), "npu": (True, False), "cpu": (False, False)}


def test_no_place_is_said() -> None:
    entry = decided(npu_share=0.0)
    rows = tuple(row._replace(share=0.0, open=False) for row in entry.inputs.rows)
    entry = entry._replace(inputs=entry.inputs._replace(rows=rows))
    entry = entry._replace(verdict=replay(entry))

    assert explain(entry).endswith("no place is open")


def test_the_candidates_are_given_as_rows_with_the_chosen_one_marked() -> None:
    rows = table(decided(wait_ms=4.0))

    assert [row["backend"] for row in rows if row["chosen"]] == ["npu"]
    assert [row["wait_ms"] for row in rows] == [0.0, 0.0, 4.0]
    assert json.loads(json.dumps(rows)) == rows
