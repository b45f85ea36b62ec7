"""The check after each test: what a test leaves open fails it, and what goes away does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
LIMIT = "SETTLE_LIMIT_S = 10.0"


def run_pytest(folder: Path, source: str, *, settle_limit_s: float | None = None) -> str:
    """The output of a run of its own, over one file with this conftest beside it, with another
    time in which things may go away."""
    text = CONFTEST.read_text()
    assert text.count(LIMIT) == 1
    if settle_limit_s is not None:
        text = text.replace(LIMIT, f"SETTLE_LIMIT_S = {settle_limit_s}")

    (folder / CONFTEST.name).write_text(text)
    (folder / "test_inner.py").write_text(source)
    result = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", str(folder), str(folder),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return result.stdout


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import os\ndef test(): os.open('/', 0)", "descriptor "),
        ("import os\ndef test():\n    global p\n    p = os.pipe()", "pipe:["),
        (
            "import subprocess\ndef test():\n    global p\n"
            "    p = subprocess.Popen(['sleep', '5'])",
            ": sleep",
        ),
        ("import os\ndef test():\n    if os.fork() == 0: os._exit(0)", "child "),
    ],
    ids=["descriptor", "pipe", "child", "zombie"],
)
def test_what_is_left_open_fails_the_test(tmp_path: Path, source: str, names: str) -> None:
    # What stays, stays for any time.
    said = run_pytest(tmp_path, source, settle_limit_s=0.2)

    assert "1 passed, 1 error" in said
    assert "left behind by the test" in said
    assert names in said


def test_what_goes_away_in_a_moment_is_no_leak(tmp_path: Path) -> None:
    source = (
        "import os, subprocess, threading, time\n"
        "def test():\n"
        "    number = os.open('/', 0)\n"
        "    child = subprocess.Popen(['sleep', '0.2'])\n"
        "    def end():\n"
        "        child.wait()\n"
        "        os.close(number)\n"
        "    threading.Thread(target=end).start()\n"
    )

    assert "1 passed in" in run_pytest(tmp_path, source)


def test_what_a_wider_fixture_holds_is_no_leak(tmp_path: Path) -> None:
    source = (
        "import os, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def number():\n"
        "    number = os.open('/', 0)\n"
        "    yield number\n"
        "    os.close(number)\n"
        "def test_one(number): pass\n"
        "def test_two(number): os.close(os.open('/', 0))\n"
    )

    assert "2 passed in" in run_pytest(tmp_path, source)


def test_a_slow_test_has_a_longer_limit_of_its_own(tmp_path: Path) -> None:
    source = (
        "import pytest\n"
        "def limit(request):\n"
        "    marker = request.node.get_closest_marker('timeout')\n"
        "    return marker and marker.args[0]\n"
        "@pytest.mark.slow\n"
        "def test_slow(request): assert limit(request) == 600\n"
        "def test_quick(request): assert limit(request) is None\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.timeout(700)\n"
        "def test_own(request): assert limit(request) == 700\n"
    )
    said = run_pytest(tmp_path, source)

    assert "3 passed" in said, said
