"""Sensors found in a sysfs tree, and readings: what is a temperature and what is none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import add_hwmon, add_zone, build_device, device_files

from switchgear.daemon.thermal.plausible import implausible, trip_temperature_mc
from switchgear.daemon.thermal.zones import (
    Sensor,
    find_sensors,
    hottest_mc,
    read_sensor,
    same_everywhere,
)
from switchgear.fingerprints.zones_model import Reading, passive_trip_mc


def device(name: str) -> Path:
    return next(file for file in device_files() if file.stem == name)


def only(root: Path) -> Sensor:
    (sensor,) = find_sensors(root).sensors
    return sensor


@pytest.mark.parametrize("file", device_files(), ids=lambda file: file.stem)
def test_a_dumped_device_is_found_whole(tmp_path: Path, file: Path) -> None:
    dump = build_device(file, tmp_path)
    found = find_sensors(tmp_path)
    temperatures = [z for z in dump["zones"] if z["domain"] != "not_temperature"]
    zones = [zone for zone in found.zones if zone.source == "thermal"]
    assert [zone.type for zone in zones] == [z["type"] for z in temperatures]
    assert len(found.excluded) == len(dump["zones"]) - len(temperatures)
    assert len({zone.zone_id for zone in found.zones}) == len(found.zones)
    for zone, source in zip(zones, temperatures, strict=True):
        assert [trip.raw_mc for trip in zone.trips] == [t["temp"] for t in source["trips"]]


@pytest.mark.parametrize("file", device_files(), ids=lambda file: file.stem)
def test_readings_of_a_dumped_device(tmp_path: Path, file: Path) -> None:
    dump = build_device(file, tmp_path)
    sensors = [s for s in find_sensors(tmp_path).sensors if s.zone.source == "thermal"]
    temperatures = [z for z in dump["zones"] if z["domain"] != "not_temperature"]
    for sensor, source in zip(sensors, temperatures, strict=True):
        reading = read_sensor(sensor)
        stub = source["type"] == "acpitz" and source["temp"] == 16800
        expected = None if stub else source["temp"]
        assert reading.temperature_mc == expected, source["type"]
        assert (reading.reason == "") == (expected is not None)


@pytest.mark.parametrize(
    ("name", "role", "trip_mc"),
    [
        ("rk3568_rock3a_mainline", "gpu", 70_000),
        ("rk3588_rock5b_mainline", "gpu", 85_000),
        ("rk3588_rock5b_mainline", "npu", None),
        ("sm8550_mtp_mainline", "gpu", 85_000),
        ("sm8550_mtp_mainline", "npu", 95_000),
        ("sm8650_snapdragon8gen3_android", "npu", 100_000),
        ("pixel8pro_tensor_g3", "gpu", 80_000),
        ("intel_laptop_t14s", "cpu", 90_000),
        ("rpi5_bcm2712", "cpu", None),
        ("amd_desktop", "cpu", None),
    ],
)
def test_the_passive_trip_of_a_role(
    tmp_path: Path, name: str, role: str, trip_mc: int | None
) -> None:
    build_device(device(name), tmp_path)
    zones = tuple(zone for zone in find_sensors(tmp_path).zones if zone.role == role)
    assert zones
    assert passive_trip_mc(zones) == trip_mc


def test_cooling_devices_are_named(tmp_path: Path) -> None:
    build_device(device("rk3588_rock5b_mainline"), tmp_path)
    zones = {zone.type: zone for zone in find_sensors(tmp_path).zones}
    assert zones["gpu-thermal"].cooling == ("devfreq-fb000000.gpu",)
    assert zones["bigcore0-thermal"].cooling == ("cpufreq-cpu@400", "cpufreq-cpu@500")


def test_hwmon_of_a_desktop(tmp_path: Path) -> None:
    build_device(device("amd_desktop"), tmp_path)
    sensors = [s for s in find_sensors(tmp_path).sensors if s.zone.source == "hwmon"]
    roles = {sensor.zone.zone_id: sensor.zone.role for sensor in sensors}
    assert roles["k10temp/Tctl"] == "cpu"
    assert roles["amdgpu/junction"] == "gpu"
    gpu = [read_sensor(sensor) for sensor in sensors if sensor.zone.role == "gpu"]
    assert hottest_mc(gpu) == 50_000


def test_a_card_has_its_own_sensor(tmp_path: Path) -> None:
    for number, address in enumerate(["0000:03:00.0", "0000:0b:00.0"]):
        files = {"name": "amdgpu", "temp1_input": 41000 + number, "temp1_label": "edge"}
        add_hwmon(tmp_path, number, {**files, "temp1_crit": 110000}, address)

    first, second = find_sensors(tmp_path).zones
    assert (first.pci_address, second.pci_address) == ("0000:03:00.0", "0000:0b:00.0")
    assert (first.zone_id, second.zone_id) == ("amdgpu/edge", "amdgpu/edge#2")
    assert [(trip.kind, trip.temperature_mc) for trip in first.trips] == [("critical", 110000)]


def test_the_mirror_of_a_zone_in_hwmon_is_not_listed_twice(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "cpu-thermal", 48000)
    add_hwmon(tmp_path, 0, {"name": "cpu_thermal", "temp1_input": 48000})
    assert [zone.zone_id for zone in find_sensors(tmp_path).zones] == ["cpu-thermal"]


def test_no_sensors_at_all(tmp_path: Path) -> None:
    found = find_sensors(tmp_path)
    assert (found.sensors, found.excluded, found.problems) == ((), (), ())


def test_a_class_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class/thermal").write_text("in the folder's place")
    add_hwmon(tmp_path, 0, {"name": "k10temp", "temp1_input": 48000})
    found = find_sensors(tmp_path)
    assert [zone.zone_id for zone in found.zones] == ["k10temp/temp1"]
    assert found.problems == (f"{tmp_path}/class/thermal: {os.strerror(errno.ENOTDIR)}",)


@pytest.mark.parametrize(
    "text", ["-273000", "-40000", "-127000", "0", "41", "150000", "", "hot", "4e4", "1" * 5000]
)
def test_numbers_that_are_no_temperature(tmp_path: Path, text: str) -> None:
    add_zone(tmp_path, 0, "gpu-thermal", text)
    reading = read_sensor(only(tmp_path))
    assert reading.temperature_mc is None
    assert reading.reason
    assert reading.errno == 0


def test_a_read_error_keeps_its_errno(tmp_path: Path) -> None:
    # Reading address 0 of one's own memory is the EIO that every Linux has at hand.
    folder = add_zone(tmp_path, 0, "gpu-thermal", Path("/proc/self/mem"))
    reading = read_sensor(only(tmp_path))
    assert (reading.temperature_mc, reading.errno) == (None, errno.EIO)
    (folder / "temp").unlink()
    assert read_sensor(only(tmp_path)).errno == errno.ENOENT


def test_a_sleeping_sensor_is_skipped_at_once(tmp_path: Path) -> None:
    """A pipe that someone holds open and never writes to: EAGAIN, and no waiting."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    add_zone(tmp_path, 0, "iwlwifi_1", pipe)
    holder = os.open(pipe, os.O_RDWR)
    try:
        reading = read_sensor(only(tmp_path))
    finally:
        os.close(holder)

    assert (reading.temperature_mc, reading.errno) == (None, errno.EAGAIN)


@pytest.mark.parametrize("code", [errno.ENODATA, errno.EINVAL, errno.ETIMEDOUT, errno.EACCES])
def test_errors_only_a_driver_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    add_zone(tmp_path, 0, "gpu-thermal", 41000)
    sensor = only(tmp_path)
    real_open = os.open

    def failing_open(path: str, flags: int) -> int:
        if str(path).endswith("/temp"):
            raise OSError(code, os.strerror(code))

        return real_open(path, flags)

    monkeypatch.setattr(os, "open", failing_open)
    reading = read_sensor(sensor)
    assert (reading.temperature_mc, reading.errno) == (None, code)
    assert errno.errorcode[code] in reading.reason


def test_a_path_that_another_zone_took_over_is_stale(tmp_path: Path) -> None:
    folder = add_zone(tmp_path, 0, "gpu-thermal", 41000)
    sensor = only(tmp_path)
    (folder / "type").write_text("battery\n")
    assert read_sensor(sensor).errno == errno.ESTALE
    assert only(tmp_path).zone.role == "other"


def test_a_scale_is_the_operators_word(tmp_path: Path) -> None:
    add_zone(tmp_path, 0, "tsens_tz_sensor9", 41)
    (sensor,) = find_sensors(tmp_path, {"tsens_tz_sensor9": 1000.0}).sensors
    assert read_sensor(sensor).temperature_mc == 41_000


def test_unset_trips_count_for_nothing(tmp_path: Path) -> None:
    trips = [("passive", raw, 0) for raw in (-274000, 0, -32768000, 88000)]
    add_zone(tmp_path, 0, "gpu-thermal", 41000, trips=trips)
    zone = only(tmp_path).zone
    assert [trip.temperature_mc for trip in zone.trips] == [None, None, None, 88_000]
    assert zone.passive_trip_mc == 88_000


def test_one_number_in_every_zone() -> None:
    readings = [Reading(f"z{index}", 41_000) for index in range(4)]
    assert same_everywhere(readings)
    assert not same_everywhere(readings[:3])
    assert not same_everywhere([*readings, Reading("z4", 41_001)])
    assert hottest_mc([Reading("a", None, "ENODATA", errno.ENODATA)]) is None


@given(st.integers(-(10**12), 10**12), st.sampled_from(["acpitz", "gpu", ""]))
def test_what_is_plausible_lies_between_the_bounds(raw: int, kind: str) -> None:
    if not implausible(raw, kind):
        assert -40_000 < raw < 150_000
        assert abs(raw) >= 1_000

    trip = trip_temperature_mc(raw)
    assert trip is None or 25_000 <= trip == raw < 150_000
