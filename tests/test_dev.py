"""`./dev`: what it answers, which Python it takes, and when it installs again.

The Python it finds is a stand-in that writes down how it was called, so that nothing is
installed; the script and its search are the real ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Answers the version question, makes an environment that holds itself, logs all else.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) echo 13 ;;
"-V") echo "Python 3.13.0" ;;
"-c "*) ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pytest"*) echo "$*" >>"$LOG" && exit "${PYTEST_STATUS-0}" ;;
*) echo "$*" >>"$LOG" ;;
esac
"""
# What a pyenv shim does when no version with that name is chosen.
FAILING_SHIM = "#!/bin/sh\necho 'pyenv: python3: command not found' >&2\nexit 127\n"


def write_program(path: Path, source: str) -> None:
    path.write_text(source)
    path.chmod(0o755)


class Checkout:
    """A copy of `./dev` in a checkout of its own, with a PATH before the system's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout with blanks"
        self.folder.mkdir()
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.log = folder / "log"
        shutil.copy(ROOT / "dev", self.folder)
        for name in ("pyproject.toml", "constraints.txt"):
            (self.folder / name).write_text("first\n")

    def have_every_system_package(self) -> None:
        for name in ("apt-get", "dpkg-query"):
            write_program(self.programs / name, "#!/bin/sh\nprintf installed\n")

        write_program(self.programs / "dpkg", "#!/bin/sh\nexit 0\n")

    def dev(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "dev"), *arguments],
            capture_output=True,
            text=True,
            cwd="/",
            env={
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "HOME": str(self.programs),
                "PYENV_ROOT": str(self.programs),
                "LOG": str(self.log),
                **environment,
            },
        )

    def calls(self) -> list[str]:
        """What Python was asked to do since the last call of this."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    write_program(made.programs / "python3", FAILING_SHIM)
    write_program(made.programs / "python3.13", PYTHON)
    return made


def test_an_unknown_verb_exits_2_with_the_list(checkout: Checkout) -> None:
    result = checkout.dev("nonsense")

    assert result.returncode == 2
    for verb in ("run", "test", "check", "bench", "shaders"):
        assert f"\n  {verb} " in result.stderr


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]])
def test_help_needs_no_set_up(checkout: Checkout, arguments: list[str]) -> None:
    result = checkout.dev(*arguments)

    assert result.returncode == 0
    assert "usage: ./dev" in result.stdout
    assert checkout.calls() == []


def test_run_sets_up_once_and_again_when_the_constraints_change(checkout: Checkout) -> None:
    face = f"{checkout.folder}/examples/face.py --image a b.png"
    install = "-m pip install -c constraints.txt -e .[images]"

    first = checkout.dev("run", "--image", "a b.png")
    assert (first.returncode, checkout.calls()) == (0, [install, face])
    assert "making .venv with Python 3.13.0" in first.stderr

    checkout.dev("run", "--image", "a b.png")
    assert checkout.calls() == [face]

    (checkout.folder / "constraints.txt").write_text("second\n")
    checkout.dev("run", "--image", "a b.png")
    assert checkout.calls() == [install, face]


def test_a_moved_checkout_is_installed_again(checkout: Checkout) -> None:
    checkout.dev("run")
    checkout.calls()
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    checkout.dev("run")

    assert checkout.calls()[0].startswith("-m pip install")


def test_an_install_that_fails_is_not_taken_for_done(checkout: Checkout) -> None:
    failing = PYTHON.replace('echo "$*" >>"$LOG"', 'echo "$*" >>"$LOG"; exit 1')
    write_program(checkout.programs / "python3.13", failing)
    result = checkout.dev("run")

    assert result.returncode == 1
    assert "pip failed" in result.stderr
    assert [call.split()[1] for call in checkout.calls()] == ["pip"]

    checkout.dev("run")
    assert [call.split()[1] for call in checkout.calls()] == ["pip"]


def test_the_bench_verb_lists_and_refuses_unknown_names(checkout: Checkout) -> None:
    (checkout.folder / "benchmarks").mkdir()
    (checkout.folder / "benchmarks" / "rpc.py").write_text('if __name__ == "__main__": ...\n')
    (checkout.folder / "benchmarks" / "figures.py").write_text("")

    assert checkout.dev("bench").stdout == "benchmarks: rpc\n"
    refused = checkout.dev("bench", "nonsense")
    assert refused.returncode == 2
    assert "no benchmark nonsense" in refused.stderr

    checkout.dev("bench", "rpc", "--quick")
    assert checkout.calls()[-1] == f"{checkout.folder}/benchmarks/rpc.py --quick"


def test_test_hands_arguments_to_pytest_and_all_selects_the_slow(checkout: Checkout) -> None:
    checkout.have_every_system_package()
    partial = checkout.dev("test", "-k", "record or slot")
    install, fetch, run = checkout.calls()
    assert install == "-m pip install -c constraints.txt -e .[all,dev]"
    assert fetch.endswith("/examples/packages.py")
    assert run == "-m pytest -k record or slot"
    assert partial.returncode == 0
    assert "passed: all tests on Python 3.13.0" in partial.stderr
    assert "skipped: the later Python and tflite_runtime" in partial.stderr

    checkout.dev("test", "--all", "-x")
    assert checkout.calls()[1:] == ["-m pytest -m  -x"]


def test_a_failing_run_of_pytest_fails_the_verb(checkout: Checkout) -> None:
    checkout.have_every_system_package()
    result = checkout.dev("test", "-x", PYTEST_STATUS="1")

    assert result.returncode == 1
    assert "FAILED: all tests" in result.stderr
