"""The `switchgear` command itself: help, exit status, where messages go."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
from cli_command import PREFIX, environment, switchgear

import switchgear as package
from switchgear.daemon.cli import COMMANDS, main
from switchgear.daemon.cli.command import finite
from switchgear.daemon.cli.progress import ProgressLine, bar
from switchgear.daemon.cli.tables import amount, bytes_text, cut, duration_text, table, wrap


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command and every verb, by what is typed."""
    found: dict[str, argparse.ArgumentParser] = {}

    def walk(
        prefix: str, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> None:
        for name, parser in subparsers.choices.items():
            typed = f"{prefix} {name}".strip()
            found[typed] = parser
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    walk(typed, action)

    subparsers = argparse.ArgumentParser(prog="switchgear").add_subparsers()
    for name in COMMANDS:
        module = name.replace("-", "_")
        importlib.import_module(f"switchgear.daemon.cli.{module}").add_parser(subparsers)

    walk("", subparsers)
    return found


def test_every_command_has_help_with_an_example_and_json() -> None:
    found = parsers()
    assert {"status", "model load", "infer", "bench", "doctor", "fingerprint run"} <= set(found)
    for typed, parser in found.items():
        has_verbs = any(isinstance(a, argparse._SubParsersAction) for a in parser._actions)
        # A command with verbs has them in its help; each verb has its own example.
        if not has_verbs:
            assert f"switchgear {typed}" in (parser.epilog or ""), typed

        # `serve` runs until it is stopped, and prints no result.
        if not has_verbs and typed != "serve":
            assert "--json" in parser.format_help(), typed


# The help of `fingerprint` is its own test's.
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "fingerprint"])
def test_help(command: str) -> None:
    done = switchgear(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: switchgear {command}")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_a_command_it_lists_them() -> None:
    done = switchgear()
    assert (done.returncode, done.stdout) == (2, "")
    for name, text in COMMANDS.items():
        assert name in done.stderr
        assert text.split(",")[0][:30] in done.stderr


def test_an_unknown_command_is_wrong_usage() -> None:
    done = switchgear("statsu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "invalid choice: 'statsu'" in done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"switchgear {package.__version__}\n"


def test_errors_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--socket", "/nowhere.sock"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["error"], told["code"]) == ("NotRunning", 502)
    assert told["details"] == {"path": "/nowhere.sock"}
    assert err.startswith("switchgear: NotRunning: no daemon answers on /nowhere.sock")


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*PREFIX, "--version"],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "PYTHONUNBUFFERED": ""},
        )
    finally:
        os.close(write)

    # Not even the interpreter's own flush at its end complains.
    assert (done.returncode, done.stderr) == (1, "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_moves_in_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = _Terminal()
    with ProgressLine("loading face", stream) as line:
        line.update("copy", 1, 4)
        line.update("copy", 1, 4)
        line.update("validate")

    first, second = stream.getvalue().removeprefix("\r").split("\r")
    assert first == "[######------------------]  25% loading face: copy"
    # The rest of the longer line is wiped.
    assert second == "loading face: validate".ljust(len(first)) + "\n"


def test_progress_is_a_line_for_each_phase_elsewhere() -> None:
    stream = io.StringIO()
    with ProgressLine("loading face", stream) as line:
        line.update("copy", 1, 4)
        line.update("copy", 2, 4)
        line.update("validate")

    assert stream.getvalue() == "loading face: copy\nloading face: validate\n"
    assert bar(2.0, 4) == "[####]"
    assert bar(-1.0, 4) == "[----]"


def test_tables() -> None:
    assert table(("NAME", "MS"), [("a", 1.0), ("long", 12.5)]) == (
        "  NAME     MS\n  a      1.00\n  long  12.50"
    )
    assert table(("NAME", "MS"), []) == "  NAME  MS"
    assert cut("x" * 81) == "x" * 77 + "..."
    assert cut("x" * 80) == "x" * 80
    lines = wrap([f"counter {n}" for n in range(20)]).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert ", ".join(line.strip().rstrip(",") for line in lines).count("counter") == 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 s"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (3599, "59 min 59 s"),
        (7380, "2 h 3 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_sizes_and_counts() -> None:
    sizes = [bytes_text(size) for size in (17, 1536, 16 << 20, 3 << 30)]
    assert sizes == ["17 B", "1.5 KiB", "16.0 MiB", "3.0 GiB"]
    assert [amount(1, "model"), amount(2, "model")] == ["1 model", "2 models"]


def test_what_json_lacks_becomes_text() -> None:
    value = {"a": [float("inf"), (1.5, float("nan"))], "b": None}
    assert json.dumps(finite(value)) == '{"a": ["inf", [1.5, "nan"]], "b": null}'


def test_the_reference_has_every_command() -> None:
    text = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"\n## {name}\n" in text, name
