"""`switchgear simulate` as it is typed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from switchgear.daemon.cli import simulate
from switchgear.daemon.cli.command import CommandError, UsageError
from switchgear.ipc.errors import BadConfiguration, BadRequest


def typed(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    options = parser.parse_args(["simulate", *arguments])
    status: int = options.run(options)
    return status


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert typed(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_has_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("fanless", "--minutes", "0.2") == 0

    first, headings, *lines = capsys.readouterr().out.splitlines()
    assert first == "fanless: 0.2 minutes, 30 frames a second, seed 1"
    assert headings.split()[:3] == ["policy", "fps", "swing"]
    names = [line.split()[0] for line in lines]
    assert names == ["always-gpu", "always-cpu", "threshold", "latency", "report", "ours"]
    assert all(len(line) <= 80 for line in (first, headings, *lines))


def test_json_has_every_figure_of_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(
        capsys, "phone", "--minutes", "0.2", "--seeds", "2", "--seed", "5", "--policy", "ours"
    )

    assert [run["seed"] for run in found["runs"]] == [5, 6]
    assert {run["policy"] for run in found["runs"]} == {"ours"}
    assert found["runs"][0]["answered"] > 300
    assert found["runs"][0]["lost"] == 0


def test_as_fast_as_it_goes_has_no_period(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "phone", "--minutes", "0.1", "--fps", "0", "--policy", "always-npu")

    assert found["fps"] == 0.0
    assert found["runs"][0]["in_time"] is None


def test_random_devices_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "random", "--count", "2", "--minutes", "0.2")

    assert set(found["devices"]) == {"random-000", "random-001"}
    (ours,) = [line for line in found["policies"] if line["policy"] == "ours"]
    assert (ours["devices"], ours["lost"]) == (2, 0)
    assert typed("random", "--count", "1", "--minutes", "0.1") == 0
    assert "good %" in capsys.readouterr().out


def test_the_picture_is_drawn_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "phone.svg"

    assert typed("phone", "--minutes", "0.1", "--policy", "ours", "--svg", str(path)) == 0

    assert ET.parse(path).getroot().tag.endswith("svg")
    assert str(path) in capsys.readouterr().err
    with pytest.raises(CommandError, match="No such file"):
        typed(
            "phone", "--minutes", "0.1", "--policy", "ours", "--svg", str(tmp_path / "x" / "y")
        )


def test_processes_give_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("phone", "--minutes", "0.1", "--policy", "ours", "--policy", "latency")
    assert printed(capsys, *arguments, "--jobs", "2") == printed(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("moon",), BadConfiguration),
        (("phone", "--policy", "magic"), BadRequest),
        (("phone", "--seeds", "0"), UsageError),
        (("phone", "--jobs", "0"), UsageError),
        (("phone", "--minutes", "0"), UsageError),
        (("phone", "--fps", "-1"), UsageError),
        (("phone", "--count", "2"), UsageError),
        (("random", "--svg", "x.svg"), UsageError),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: tuple[str, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        typed(*arguments)
