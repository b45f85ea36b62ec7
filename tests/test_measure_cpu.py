"""The CPU test: clusters, affinity, and real values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from measure_helpers import measure, number, plan

from switchgear.fingerprints.measure.cpu import cluster_note, clusters, processor_name, ranges
from switchgear.fingerprints.measurement import CPU, report_from_json

if TYPE_CHECKING:
    from pathlib import Path


# Some seconds of work for all processors.
PATIENT = pytest.mark.timeout(60)


def with_capacities(root: Path, capacities: list[int]) -> Path:
    for cpu, capacity in enumerate(capacities):
        folder = root / f"devices/system/cpu/cpu{cpu}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")

    return root


@PATIENT
def test_values_of_this_machine() -> None:
    (report, *_) = measure(plan(CPU))
    assert report.subject is not None
    assert report.subject.api == report.subject.device_type == "cpu"
    assert report.subject.name
    assert report.subject.driver_name in ("ai-edge-litert", "tflite-runtime")
    assert report.subject.driver_version
    for kind in ("float", "int8"):
        value = number(report, f"{kind}_1_thread_ms")
        assert value.samples >= 11
        # 569 M multiply-adds: no core does them in 100 us, and none takes a minute.
        assert 0.1 < value.median < 60_000
        assert "1 threads" in value.method

    if len(os.sched_getaffinity(0)) > 1:
        number(report, "float_all_threads_ms")

    assert 10 < number(report, "memory_copy_mb_s").median < 1e6
    assert "cluster" in report.notes[0]


@PATIENT
def test_a_report_per_cluster(tmp_path: Path) -> None:
    """On a tree that says that this machine's CPUs differ; each cluster runs on its own."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one CPU cannot be two clusters")

    capacities = [1024 if cpu == usable[0] else 384 for cpu in range(max(usable) + 1)]
    reports = measure(plan(CPU, sysfs=str(with_capacities(tmp_path, capacities))))
    whole, big, *small = reports
    assert len(small) == 1
    assert whole.notes == ("2 clusters of equal cpu_capacity",)
    assert big.subject is not None
    assert big.subject.device_type == "cluster"
    assert big.subject.name == f"CPUs {usable[0]}, capacity 1024"
    number(big, "float_1_thread_ms")
    # One CPU has no second thread, and memory is measured once.
    assert big.value("float_all_threads_ms") is None
    assert big.value("memory_copy_mb_s") is None


def test_skipped_devices_are_left_out() -> None:
    """What the runner asks for after a death."""
    arguments = json.dumps({"quick": True, "yield_cpu": False, "budget_s": 0.1, "skip": [0]})
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "switchgear.fingerprints.measure",
            CPU,
            "--json-args",
            arguments,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    reports = [report_from_json(line["report"]) for line in lines if "report" in line]
    assert all(report.subject and report.subject.index != 0 for report in reports)
    assert lines[-1] == {"end": True}


def test_clusters_by_capacity(tmp_path: Path) -> None:
    """A phone: four small cores, three middle ones, one large."""
    root = with_capacities(tmp_path, [250, 250, 250, 250, 620, 620, 620, 1024])
    assert clusters(root, range(8)) == [(1024, [7]), (620, [4, 5, 6]), (250, [0, 1, 2, 3])]
    # Only what this process may use.
    assert clusters(root, [0, 1, 7]) == [(1024, [7]), (250, [0, 1])]


def test_clusters_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    assert clusters(tmp_path, [0, 1]) == [(0, [0, 1])]
    broken = with_capacities(tmp_path, [0])
    (broken / "devices/system/cpu/cpu0/cpu_capacity").write_text("\0\0")
    assert clusters(broken, [0]) == [(0, [0])]


@pytest.mark.parametrize(
    ("groups", "note"),
    [
        ([(0, [0, 1])], "one cluster, CPUs 0-1: the kernel tells no cpu_capacity"),
        ([(1024, [0])], "one cluster, CPUs 0, all of capacity 1024"),
        ([(1024, [1]), (300, [0])], "2 clusters of equal cpu_capacity"),
    ],
)
def test_cluster_note(groups: list[tuple[int, list[int]]], note: str) -> None:
    assert cluster_note(groups) == note


@pytest.mark.parametrize(
    ("cpus", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0,2-3,7")]
)
def test_ranges(cpus: list[int], text: str) -> None:
    assert ranges(cpus) == text


def test_processor_name(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU 3000\n")
    assert processor_name(tmp_path) == "Some CPU 3000"
    # Arm's has no name: the board's stands in the device tree, ended by a NUL.
    cpuinfo.write_text("processor\t: 0\nCPU part\t: 0xd05\n")
    board = tmp_path / "sys/firmware/devicetree/base"
    board.mkdir(parents=True)
    (board / "model").write_text("Radxa ROCK 5B\0")
    assert processor_name(tmp_path) == "Radxa ROCK 5B"
    (board / "model").unlink()
    assert processor_name(tmp_path) == os.uname().machine
