"""The case's headroom: from its zones, through the sensors' process, into a choice."""

from __future__ import annotations

import asyncio
from math import inf
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest
from sysfs_tree import add_zone

from switchgear.daemon.config import Configuration, ThermalSection
from switchgear.daemon.options import Options
from switchgear.daemon.protocol.reading import NO_SENSOR, Reading
from switchgear.daemon.switchboard.case import CASE, LOST_MS, Case
from switchgear.daemon.switchboard.operation import Operation
from switchgear.fingerprints.zones_model import TripPoint, Zone

LIMIT_MS = 50


def skin(name: str, *passive_mc: int) -> Zone:
    trips = tuple(TripPoint("passive", trip_mc, trip_mc) for trip_mc in passive_mc)
    return Zone(name, name, "skin", trips=trips)


CHIP = Zone("cpu-thermal", "cpu-thermal", "cpu", trips=(TripPoint("passive", 30_000, 30_000),))


def test_the_lowest_passive_trip_of_the_skins_zones_counts() -> None:
    case = Case()
    zones = (CHIP, skin("skin-therm", 46_000, 44_000), skin("quiet-therm"))
    sensors = case.sensors(zones)[CASE]
    assert sensors.zones == ("skin-therm", "quiet-therm")
    assert sensors.limit_mc == 44_000
    assert case.headroom_c(Reading(41_500)) == 2.5
    assert case.headroom_c(Reading(45_000, "held")) == -1.0


def test_without_a_trip_there_is_no_limit_and_nothing_to_follow() -> None:
    case = Case()
    assert case.sensors((CHIP, skin("skin-therm"))) == {}
    assert case.headroom_c(Reading(90_000)) == inf


def test_a_lost_sensor_counts_as_it_was_and_then_as_none() -> None:
    case = Case()
    case.sensors((skin("skin-therm", 44_000),))
    assert case.headroom_c(NO_SENSOR) == inf
    case.headroom_c(Reading(43_000))
    assert case.headroom_c(Reading(None, "lost", 15_000)) == 1.0
    assert case.headroom_c(Reading(None, "lost", LOST_MS + 1)) == inf


def test_zones_that_went_leave_no_limit() -> None:
    case = Case()
    case.sensors((skin("skin-therm", 44_000),))
    case.headroom_c(Reading(43_000))
    case.sensors((CHIP,))
    assert case.headroom_c(Reading(None, "lost", 0)) == inf


def chosen_with(operation: Operation) -> Any:
    """The inputs of a choice made now, as the ring has them."""
    board = operation.board
    assert board is not None
    lane = SimpleNamespace(is_idle=True, wait_ms=lambda _now_s: 0.0)
    target = SimpleNamespace(
        backend="cpu", pair=None, lane=lane, precision=0, is_warm=lambda _: True
    )
    options = Options(2, "reject", 2, ("cpu",), strict=False)
    model = SimpleNamespace(digest="m", state=False, run_us=1000, pairs={})
    session: Any = SimpleNamespace(
        options=options,
        model=model,
        targets=(target,),
        identity=1,
        peer=SimpleNamespace(uid=0),
        seat=None,
    )
    board.add_model(model)  # type: ignore[arg-type]
    arrival_ns = monotonic_ns()
    request: Any = SimpleNamespace(
        arrival_ns=arrival_ns,
        deadline_ns=arrival_ns + LIMIT_MS * 1_000_000,
        identity=1,
        priority=2,
        place=None,
    )
    row = board.choose(session, board.seat(session), request)
    assert row is not None
    return board.ring.last(1)[0].inputs


@pytest.mark.parametrize("trip_mc", [44_000, None])
def test_a_choice_knows_the_cases_headroom(tmp_path: Path, trip_mc: int | None) -> None:
    trips = [] if trip_mc is None else [("passive", trip_mc, 0)]
    zone = add_zone(tmp_path, 0, "skin-therm", 41_000, trips=trips)
    add_zone(tmp_path, 1, "cpu-thermal", 50_000)

    async def test() -> None:
        configuration = Configuration(thermal=ThermalSection(sysfs_root=tmp_path))
        pool: Any = SimpleNamespace(lanes=list)
        models: Any = SimpleNamespace(all_for=lambda _uid: [])
        operation = Operation(configuration, tmp_path, pool, models, lambda _event: None)
        board = await operation.start({"cpu": {}})
        try:
            if trip_mc is None:
                # By then the skin's zone would have been heard, too.
                await heard(operation, "cpu")
                assert chosen_with(operation).case_headroom_c == inf
                return

            await heard(operation, CASE)
            chosen = chosen_with(operation)
            assert chosen.case_headroom_c == pytest.approx(3.0)
            # With the CPU alone, too, the record is of this moment and this request.
            assert chosen.limit_ms == LIMIT_MS
            (row,) = chosen.rows
            assert 0 <= row.unseen_s < 18
            (zone / "temp").write_text("48000\n")
            while board.case_headroom_c > -3.0:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.02)

            assert chosen_with(operation).case_headroom_c < -3.0
        finally:
            await operation.stop()

    asyncio.run(asyncio.wait_for(test(), 18))


async def heard(operation: Operation, name: str) -> None:
    while operation.watch.reading(name).temperature_mc is None:  # noqa: ASYNC110  # no event
        await asyncio.sleep(0.02)
