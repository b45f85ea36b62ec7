"""A preparer as the daemon starts it, or its work in this process: its steps and its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fake_backends import FakeBackend
from worker_under_test import memory_file

from switchgear.backends.preparation import Order, Preparation

if TYPE_CHECKING:
    from collections.abc import Mapping

TESTS = str(Path(__file__).parent)
FAKE = "fake_backends:open_fake"
# As the daemon starts it, and without its low priority.
PREPARER = "switchgear.backends.preparer"
EAGER = "eager_preparer"


@dataclass(frozen=True)
class Prepared:
    """`result` is None where the process died before it."""

    steps: list[dict[str, Any]]
    result: dict[str, Any] | None
    returncode: int
    stderr: str

    @property
    def names(self) -> list[str]:
        return [str(step["step"]) for step in self.steps]

    @property
    def said(self) -> dict[str, Any]:
        """The result, which has to be there."""
        assert self.result is not None, self.stderr
        return self.result


def prepare_here(
    folder: Path, model: bytes, precision: str = "auto", *, again: bool = False, **options: Any
) -> Prepared:
    """The same work in this process, for a fake that does not end it."""
    path = folder / "model.tflite"
    path.write_bytes(model)
    order = Order(str(path), precision, again=again)
    steps: list[dict[str, Any]] = []
    result = Preparation(lambda: FakeBackend(options), order, steps.append).run()
    # As it would be sent.
    return Prepared(steps, json.loads(json.dumps(result, allow_nan=False)), 0, "")


def command(fd: int, backend: str, *arguments: str, module: str = EAGER) -> list[str]:
    return [
        sys.executable,
        "-m",
        module,
        f"--fd={fd}",
        f"--parent={os.getpid()}",
        f"--backend={backend}",
        *arguments,
    ]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """With the tests' folder on the path, where the fakes are."""
    return {**os.environ, "PYTHONPATH": TESTS, **(more or {})}


def prepare(
    model: bytes,
    *arguments: str,
    backend: str = "fake",
    factory: str = FAKE,
    more: Mapping[str, str] | None = None,
    **options: Any,
) -> Prepared:
    """Runs a preparer to its end; `options` are the backend's."""
    chosen = [f"--factory={factory}"] if factory else []
    with memory_file(model) as fd:
        done = subprocess.run(
            command(fd, backend, *chosen, f"--options={json.dumps(options)}", *arguments),
            pass_fds=[fd],
            env=environment(more),
            capture_output=True,
            text=True,
        )

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line for line in lines if "step" in line]
    results = [line for line in lines if "step" not in line]
    assert lines == [*steps, *results]
    assert len(results) <= 1
    return Prepared(steps, results[0] if results else None, done.returncode, done.stderr)
