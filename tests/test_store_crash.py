"""A writer that dies at any moment leaves the old profile or the new one, and nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from profile_helpers import profile

from switchgear.fingerprints.store import FILE_NAME, ProfileStore

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITER = Path(__file__).with_name("store_writer.py")
RANDOM_ROUNDS = 200
LONGEST_S = 0.02


class Nursery:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with subprocess.Popen(
        [sys.executable, str(WRITER), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Nursery(process)


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_killed_before_each_system_call(tmp_path: Path, nursery: Nursery) -> None:
    store = ProfileStore(tmp_path)
    old, new = profile(1.0), profile(2.0)
    seen = []
    for point in range(100):
        assert store.save(old) is None
        assert leftovers(tmp_path) == []
        answer = nursery.ask(f"fault {point}")
        loaded = store.load()
        assert loaded.problem is None
        assert loaded.profile in (old, new)
        seen.append(loaded.profile == new)
        if answer == "done":
            break
    else:
        pytest.fail("the writer never finished")

    # It has many calls to die at, changes once from the old to the new, and ends with the new.
    assert len(seen) > 6
    assert seen == sorted(seen)
    assert seen[0] is False
    assert seen[-1] is True


def test_killed_at_random_moments(tmp_path: Path, nursery: Nursery) -> None:
    store = ProfileStore(tmp_path)
    one, other = profile(1.0), profile(2.0)
    assert store.save(one) is None
    moments = random.Random(3)
    found: set[bool] = set()
    rounds, longest_s = 0, LONGEST_S
    while rounds < RANDOM_ROUNDS or found != {True, False}:
        writer = int(nursery.ask("loop"))
        # The moment of the kill is the input of this test; nothing is waited for.
        time.sleep(moments.uniform(0.0, longest_s))
        os.kill(writer, signal.SIGKILL)
        assert nursery.ask("reap") == "reaped"
        loaded = store.load()
        assert loaded.problem is None
        assert loaded.profile in (one, other)
        found.add(loaded.profile == one)
        rounds += 1
        assert len(leftovers(tmp_path)) <= rounds
        if rounds % RANDOM_ROUNDS == 0:
            # On a slow disk no write of the other profile has ended yet.
            longest_s *= 2

    assert store.save(one) is None
    assert leftovers(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == [FILE_NAME, "fingerprint.lock"]
