"""What holds for every test: no descriptor and no child process outlives it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# tinygrad reads it when it is imported, by whichever test is first: no pool of processes that
# outlives a test. The backend sets it too, before its own import.
os.environ["PARALLEL"] = "0"

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that:
# tests that interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where Hypothesis is in use: a machine that stands still for a moment makes no example wrong.
if "_hypothesis_pytestplugin" in sys.modules:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any speed")

SLOW_LIMIT_S = 600
# A killed child is a zombie until it is reaped, and an event loop closes its own descriptors a
# moment after the test, on a busy machine some seconds: what goes away within this time is no
# leak.
SETTLE_LIMIT_S = 10.0
SETTLE_STEP_S = 0.02


# What the first Python tests for the later ones too: engines, drivers, models, examples, and
# the long rounds. The core is left: ipc, client, control plane, sessions, processes, files.
NOT_CORE = (
    *("cli", "cpu", "example", "face", "fingerprint", "generate", "measure", "models"),
    *("hostile_models", "packaging", "rounds", "runner", "store_crash", "validation"),
    *("worker_death", "dev", "devices", "zones", "profile", "yielding", "gate", "heat"),
    *("vulkan", "opencl", "npu", "known_answer", "preparer", "canary", "device", "golden"),
    *("simulat", "systemd", "android", "c_client", "switchboard_daemon", "overload", "prewarm"),
    *("top", "trace", "thermal", "driver_caches", "driver_files", "metrics"),
    *("layering", "conftest", "takeover", "absent", "preparing", "session_events_daemon"),
    *("session_limits", "resident", "energy", "reload", "isolation", "hostile_control"),
    *("busy_sessions", "hedging", "case", "model_store"),
    # Numbers in, numbers out: no Python differs there.
    *("protocol_", "routing_", "store_content", "cache_store"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_").startswith(NOT_CORE):
            item.add_marker(pytest.mark.engine)

        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Fails the test when descriptors or child processes are more after it than before."""
    descriptors = _descriptors()
    children = _children()
    yield
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while True:
        left = [
            f"descriptor {number}: {target}"
            for number, target in _descriptors().items()
            if number not in descriptors
        ]
        # One opened and another closed is no leak: only a greater count is.
        grown = len(left) > sum(not _is_open(number) for number in descriptors)
        orphans = [
            f"child {pid}: {name}" for pid, name in _children().items() if pid not in children
        ]
        if not grown and not orphans:
            return

        if time.monotonic() > deadline:
            break

        # A descriptor that a thread closes tells nobody.
        time.sleep(SETTLE_STEP_S)

    pytest.fail("left behind by the test: " + "; ".join([*left, *orphans]), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def no_process_left_by_the_module() -> Iterator[None]:
    """The same for what the fixtures of a whole module start."""
    children = _children()
    yield
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while orphans := {pid: name for pid, name in _children().items() if pid not in children}:
        if time.monotonic() > deadline:
            pytest.fail(f"left behind by the module: {orphans}", pytrace=False)

        time.sleep(SETTLE_STEP_S)


def _descriptors() -> dict[int, str]:
    """Open descriptors of this process, and what each leads to."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the one that listed the folder
            continue

    return found


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False

    return True


def _children() -> dict[int, str]:
    """Child processes of this one, zombies included, and their names.

    From every process's own line where the kernel keeps no list of them.
    """
    try:
        lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended
        lists = []

    if lists and not any(lists):
        return {}

    own = str(os.getpid())
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue

        try:
            stat = (folder / "stat").read_text()
        except OSError:  # it ended
            continue

        # The name may hold blanks and brackets: the fields begin after the last bracket.
        head, _, fields = stat.rpartition(")")
        if fields.split()[1] == own:
            found[int(folder.name)] = head.partition("(")[2]

    return found
