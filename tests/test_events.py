"""Who hears of what the protocol did, and what is kept for one that does not listen."""

from __future__ import annotations

import asyncio

from switchgear.daemon.events import QUEUED_EVENTS, Events
from switchgear.daemon.protocol.answers import Event
from switchgear.daemon.protocol.topology import PairKey, Target


def pair_event(model: str) -> Event:
    target = Target("pair", PairKey(model, "npu", "fp32"))
    return Event(1.0, "breaker", target, "closed", "open", "slow", "3 slow frames")  # type: ignore[arg-type]


def device_event() -> Event:
    return Event(1.0, "breaker", Target("device", "npu"), "closed", "open", "heat", "66 C")  # type: ignore[arg-type]


def test_pairs_of_others_models_are_not_told() -> None:
    async def run() -> None:
        events = Events()
        with (
            events.subscribe(lambda model: model in ("", "aa")) as mine,
            events.subscribe(lambda _: True) as operators,
        ):
            for event in (pair_event("aa"), pair_event("bb"), device_event()):
                events.tell(event)

            assert "aa" in (await mine.next())["target"]
            assert (await mine.next())["level"] == "device"
            assert [(await operators.next())["level"] for _ in range(3)] == [
                *("pair", "pair", "device"),
            ]

        assert len(events.last(lambda model: model in ("", "bb"))) == 2
        assert not events.subscriptions

    asyncio.run(run())


def test_one_that_does_not_read_loses_the_oldest_and_is_told_how_many() -> None:
    async def run() -> None:
        events = Events()
        with events.subscribe(lambda _: True) as slow:
            for _ in range(QUEUED_EVENTS + 3):
                events.tell(device_event())

            assert slow.lost == 3
            assert (await slow.next())["target"] == "device npu"

    asyncio.run(run())
