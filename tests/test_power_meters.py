"""Sources of power: which are found in sysfs, what they cover, and what two readings mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from power_tree import RANGE_UJ, add_battery, add_powercap
from sysfs_tree import add_hwmon

from switchgear.backends.subject import Subject
from switchgear.daemon.switchboard.power_meters import (
    PACKAGE,
    SYSTEM,
    Meter,
    Taken,
    choose_meter,
    find_meters,
)
from switchgear.daemon.switchboard.topology import Part

CARD = "0000:03:00.0"
CPU = Part("cpu", "cpu")
INTEGRATED = Part("gpu", "gpu", (Subject("vulkan", "Mali", device_type="integrated"),))
DISCRETE = Part(
    "gpu", "gpu", (Subject("vulkan", "Radeon", device_type="discrete", pci_address=CARD),)
)
NPU = Part("npu", "npu", (Subject("npu", "Ethos"),))
COUNTER = Meter("powercap", PACKAGE, (Path("a"), Path("b")), (1000, 1000))
RAIL = Meter("hwmon", PACKAGE, (Path("a"),))


def found(root: Path) -> dict[tuple[str, str], Meter]:
    meters, problems = find_meters(root)
    assert problems == []
    return {(meter.method, meter.scope): meter for meter in meters}


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert find_meters(tmp_path) == ([], [])


def test_packages_are_counted_once_and_their_parts_not_at_all(tmp_path: Path) -> None:
    add_powercap(tmp_path, "intel-rapl:0", "package-0", 7)
    add_powercap(tmp_path, "intel-rapl:0:0", "core", 3)
    add_powercap(tmp_path, "intel-rapl:1", "package-1", 5)
    add_powercap(tmp_path, "intel-rapl-mmio:0", "package-0", 7)
    add_powercap(tmp_path, "intel-rapl:2", "psys", 20)
    meters = found(tmp_path)
    package = meters["powercap", PACKAGE].take()
    assert package is not None
    assert sorted(package.counters_uj) == [5, 7]
    assert meters["powercap", PACKAGE].wraps_uj == (RANGE_UJ, RANGE_UJ)
    system = meters["powercap", SYSTEM].take()
    assert system is not None
    assert system.counters_uj == (20,)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    counter = add_powercap(tmp_path, "intel-rapl:0", "package-0", 0)
    counter.unlink()
    # A test that runs as root may read every file, but no folder.
    counter.mkdir()
    assert find_meters(tmp_path) == ([], ["powercap intel-rapl:0: Is a directory"])


def test_rails_of_a_board_are_summed_and_a_card_stands_alone(tmp_path: Path) -> None:
    add_hwmon(tmp_path, 0, {"name": "ina3221", "power1_input": 700, "power2_input": 40})
    card = {"name": "amdgpu", "power1_average": 9, "power1_input": 12, "power1_cap": 1}
    add_hwmon(tmp_path, 1, card, CARD)
    meters = found(tmp_path)
    rails, own = meters["hwmon", PACKAGE].take(), meters["hwmon", CARD].take()
    assert rails is not None
    assert own is not None
    assert (rails.power_uw, own.power_uw) == (740, 9)


def test_a_rail_that_all_others_hang_on_stands_for_them(tmp_path: Path) -> None:
    names = {"power1_label": "VDD_GPU", "power2_label": "VDD_IN"}
    add_hwmon(tmp_path, 0, {"power1_input": 700, "power2_input": 5000, **names})
    taken = found(tmp_path)["hwmon", SYSTEM].take()
    assert taken is not None
    assert taken.power_uw == 5000


def test_a_battery_is_read_while_it_discharges(tmp_path: Path) -> None:
    # Some drivers sign it.
    folder = add_battery(
        tmp_path, "BAT0", "Discharging", current_now=-500_000, voltage_now=4_000_000
    )
    add_battery(tmp_path, "hidpp_battery_0", "Discharging", scope="Device", power_now=1)
    meter = found(tmp_path)["battery", SYSTEM]
    taken = meter.take()
    assert taken is not None
    assert taken.power_uw == 2_000_000
    (folder / "power_now").write_text("1900000\n")
    taken = meter.take()
    assert taken is not None
    assert taken.power_uw == 1_900_000
    (folder / "status").write_text("Charging\n")
    assert meter.take() is None


@pytest.mark.parametrize(
    ("scope", "part", "covers"),
    [
        (PACKAGE, CPU, True),
        (PACKAGE, INTEGRATED, True),
        (PACKAGE, DISCRETE, False),
        (PACKAGE, NPU, False),
        (SYSTEM, DISCRETE, True),
        (SYSTEM, NPU, True),
        (CARD, DISCRETE, True),
        (CARD, CPU, False),
    ],
)
def test_what_a_meter_covers(scope: str, part: Part, covers: bool) -> None:
    assert Meter("hwmon", scope, ()).covers(part) is covers


def test_a_cards_own_meter_goes_first() -> None:
    system = Meter("battery", SYSTEM, ())
    package = Meter("powercap", PACKAGE, ())
    card = Meter("hwmon", CARD, ())
    meters = [system, package, card]
    assert choose_meter(meters, DISCRETE) is card
    assert choose_meter(meters[1:], CPU) is package
    assert choose_meter([package], DISCRETE) is None


@pytest.mark.parametrize(
    ("meter", "before", "after", "energy_uj"),
    [
        (COUNTER, Taken(0.0, (100, 0), 0), Taken(1.0, (300, 50), 0), 250),
        # One of the two started again at 0 after 1000.
        (COUNTER, Taken(0.0, (900, 0), 0), Taken(1.0, (100, 50), 0), 250),
        # The mean of both readings over the time between them.
        (RAIL, Taken(0.0, (), 2e6), Taken(0.5, (), 4e6), 1.5e6),
        # A counter that was reset, not one that came round: nothing takes a kilowatt.
        (
            Meter("powercap", PACKAGE, (Path("a"),), (RANGE_UJ,)),
            Taken(0.0, (5000,), 0),
            Taken(1.0, (0,), 0),
            None,
        ),
    ],
)
def test_the_energy_between_two_readings(
    meter: Meter, before: Taken, after: Taken, energy_uj: float | None
) -> None:
    assert meter.energy_uj(before, after) == energy_uj
