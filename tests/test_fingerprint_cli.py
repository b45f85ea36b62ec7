"""`switchgear fingerprint` as a person types it, in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from profile_helpers import ZONES, profile
from sysfs_tree import add_zone

from switchgear.daemon.cli.fingerprint import ProgressLines, add_parser
from switchgear.fingerprints.measurement import CPU, Value
from switchgear.fingerprints.profile import Profile
from switchgear.fingerprints.runner import Progress
from switchgear.fingerprints.store import ProfileStore, encode


def call(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="switchgear")
    add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["fingerprint", *map(str, arguments)])
    status: int = parsed.run(parsed)
    return status


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    assert ProfileStore(tmp_path / "state").save(profile()) is None
    return tmp_path / "state"


def test_dump_in_each_format(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("dump", "--store", stored) == 0
    assert Profile.model_validate_json(capsys.readouterr().out) == profile()
    assert call("dump", "--store", stored, "--json") == 0
    assert Profile.model_validate_json(capsys.readouterr().out) == profile()
    assert call("dump", "--store", stored, "--format", "xml") == 0
    assert "<soc>rockchip,rk3588</soc>" in capsys.readouterr().out
    assert call("dump", "--store", stored, "--format", "table") == 0
    assert "Thermal zones" in capsys.readouterr().out


def test_show_has_the_temperatures_now_and_what_is_stale(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_zone(tmp_path / "sys", 0, ZONES[1].type, 51_200)
    add_zone(tmp_path / "sys", 1, "npu-thermal", -273_000)
    assert call("show", "--store", stored, "--sysfs", tmp_path / "sys") == 0
    out, err = capsys.readouterr()
    assert "gpu-thermal                51.2 C" in out
    assert "npu-thermal                none: -273000" in out
    assert "cpu is out of date: soc: rockchip,rk3588 -> " in err
    assert max(len(line) for line in out.splitlines()) <= 80
    assert call("show", "--store", stored, "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 2


def test_diff_of_dumped_and_stored_files(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dumped, other = tmp_path / "dumped.json", tmp_path / "other.json"
    dumped.write_text(profile(1.5).model_dump_json())
    other.write_bytes(encode(profile()))
    assert call("diff", dumped, "--store", stored) == 0
    assert "12 ms (-33.3 %): beyond the spread, better" in capsys.readouterr().out
    assert call("diff", other, "--store", stored, "--json") == 0
    assert json.loads(capsys.readouterr().out)["differs"] is False
    assert call("diff", other, dumped, "--all") == 0
    assert "no delegate is configured" in capsys.readouterr().out


def test_without_a_profile_the_way_to_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("show", "dump"):
        assert call(verb, "--store", tmp_path) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "switchgear fingerprint run" in err


def test_bad_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(bytes(10))
    assert call("diff", bad, bad) == 1
    assert "NUL" in capsys.readouterr().err
    assert call("diff", tmp_path / "missing", bad) == 1
    assert "No such file" in capsys.readouterr().err
    ProfileStore(tmp_path).path.write_text("{}")
    assert call("dump", "--store", tmp_path) == 1
    assert "set aside as" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "show", "dump", "diff"])
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(verb, "--help")

    assert ended.value.code == 0
    assert f"example: switchgear fingerprint {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["melt"], ["dump", "--format", "yaml"], ["diff"]])
def test_wrong_usage_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(*words)

    assert ended.value.code == 2
    assert "usage: switchgear fingerprint" in capsys.readouterr().err


def test_progress_on_a_terminal_is_one_line_that_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressLines(terminal=True)
    bar.update(Progress("cpu", "x", 0.25, "8 of 11 samples"))
    bar.update(Progress("cpu", "x" * 90, 1.0, "long " * 40))
    bar.end()
    err = capsys.readouterr().err
    assert "[######------------------]  25% cpu: 8 of 11 samples" in err
    assert err.count("\n") == 1
    assert all(len(part) <= 79 for part in err.strip("\n").split("\r"))


def test_progress_in_a_log_is_a_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(terminal=False)
    for done in (0.0, 0.1, 0.2):
        lines.update(Progress("cpu", "big cores", done, "measuring"))

    lines.update(Progress("vulkan_matmul", "", 1.0, "done"))
    lines.end()
    assert capsys.readouterr().err == "  0% cpu: measuring\n100% vulkan_matmul: done\n"


# Not under SCHED_IDLE, as a person's is: a busy machine would starve it for minutes.
AS_TYPED = """
import argparse, functools, sys
from switchgear.daemon.cli.fingerprint import add_parser
from switchgear.fingerprints import runner
runner.Plan = functools.partial(runner.Plan, yield_cpu=False)
parser = argparse.ArgumentParser()
add_parser(parser.add_subparsers())
arguments = parser.parse_args(sys.argv[1:])
sys.exit(arguments.run(arguments))
"""


@pytest.mark.timeout(60)
def test_run_measures_for_real_once(tmp_path: Path) -> None:
    """The CPU's test only: the others have tests of their own, and time is short."""
    command = [sys.executable, "-c", AS_TYPED, "fingerprint", "run", "--test", "cpu"]
    command += ["--quick", "--json", "--store", str(tmp_path), "--sysfs", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    measured = Profile.model_validate_json(first.stdout)
    assert ProfileStore(tmp_path).load().profile == measured
    (entry,) = [e for e in measured.of_test(CPU) if e.device_id == "cpu"][:1]
    latency = entry.value("float_1_thread_ms")
    assert isinstance(latency, Value), latency
    assert latency.median > 0
    assert "cpu: never measured" in first.stderr
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0
    assert second.stdout == first.stdout
    assert "nothing has changed" in second.stderr
