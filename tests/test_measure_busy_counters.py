"""Busy counters: found by what they are, read as their drivers write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from switchgear.fingerprints.measure.busy_counters import BusyCounter, find

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def found(root: Path) -> BusyCounter:
    counter = find(root)
    assert counter is not None
    return counter


@pytest.mark.parametrize(
    ("text", "busy_pct"),
    [
        ("NPU load:  Core0:  0%, Core1:  0%, Core2:  0%,\n", 0),
        ("NPU load:  Core0: 90%, Core1: 30%, Core2:  0%,\n", 40),
        ("NPU load:  37%\n", 37),
    ],
)
def test_rockchip(text: str, busy_pct: float, tmp_path: Path) -> None:
    write(tmp_path, "kernel/debug/rknpu/load", text)
    assert found(tmp_path).busy_pct() == busy_pct


def test_devfreq_is_never_above_all(tmp_path: Path) -> None:
    path = "class/devfreq/fdab0000.npu/load"
    load = write(tmp_path, path, "100@1000000000Hz\n")
    counter = found(tmp_path)
    assert counter.busy_pct() == 100
    load.write_text("250@1000000000Hz\n")
    assert counter.busy_pct() == 100


def test_a_gpus_devfreq_is_no_npu(tmp_path: Path) -> None:
    write(tmp_path, "class/devfreq/fb000000.gpu/load", "88@300000000Hz\n")
    assert find(tmp_path) is None


def test_cumulative_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(f"{find.__module__}.time.monotonic", lambda: now[0])
    device = "class/accel/accel0/device"
    write(tmp_path, f"{device}/uevent", "MODALIAS=pci:v00008086\nDRIVER=intel_vpu\n")
    file = write(tmp_path, f"{device}/npu_busy_time_us", "1000000\n")
    counter = found(tmp_path)
    assert counter.busy_pct() is None
    now[0], _ = 102.0, file.write_text("1500000\n")
    assert counter.busy_pct() == 25
    # Reset by a suspend: the sample is dropped, the next one counts again.
    now[0], _ = 103.0, file.write_text("10\n")
    assert counter.busy_pct() is None
    now[0], _ = 104.0, file.write_text("1000010\n")
    assert counter.busy_pct() == 100
    # More than the clock says (jobs are counted when they are submitted).
    now[0], _ = 105.0, file.write_text("9000010\n")
    assert counter.busy_pct() == 100
    file.unlink()
    assert counter.busy_pct() is None


def test_the_number_of_an_accelerator_is_not_stable(tmp_path: Path) -> None:
    """amdxdna lives in the same class; the driver decides, not accel0."""
    write(tmp_path, "class/accel/accel0/device/uevent", "DRIVER=amdxdna\n")
    write(tmp_path, "class/accel/accel0/device/npu_busy_time_us", "5\n")
    assert find(tmp_path) is None
    write(tmp_path, "class/accel/accel1/device/uevent", "DRIVER=intel_vpu\n")
    wanted = write(tmp_path, "class/accel/accel1/device/npu_busy_time_us", "5\n")
    assert found(tmp_path).path == wanted


def test_older_kernels_tell_the_powered_time(tmp_path: Path) -> None:
    write(tmp_path, "class/accel/accel0/device/uevent", "DRIVER=intel_vpu\n")
    write(tmp_path, "class/accel/accel0/device/power/runtime_active_time", "5\n")
    assert found(tmp_path).kind.name == "runtime_active_time"
    write(tmp_path, "class/accel/accel0/device/npu_busy_time_us", "5\n")
    assert found(tmp_path).kind.name == "npu_busy_time_us"


@pytest.mark.parametrize("text", ["", "\0\0\0", "NPU load: unknown\n", "Core: x%"])
def test_text_that_is_no_load_is_no_counter(text: str, tmp_path: Path) -> None:
    write(tmp_path, "kernel/debug/rknpu/load", text)
    assert find(tmp_path) is None


def test_none_here(tmp_path: Path) -> None:
    assert find(tmp_path) is None
