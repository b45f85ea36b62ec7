"""A backend in a process of its own, driven step by step: some drivers kill or keep what they
touch.

Steps are lists: ["identity"], ["probe"], ["load", path, precision, shapes], ["run", seed],
["time", seed, runs], ["reset"], ["close"]. The answer to each is a JSON value, or
{"error": [domain, code, name, text]} of the one that failed; later steps still run.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from switchgear.backends.contract import LoadRequest
from switchgear.backends.cpu import CpuBackend
from switchgear.ipc.errors import DriverError, SwitchgearError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from switchgear.backends.contract import Instance, ModelInfo

Array = np.ndarray[Any, Any]
Steps = list[list[Any]]
BACKENDS = {
    "vulkan": "switchgear.backends.vulkan.backend:VulkanBackend",
    "npu": "switchgear.backends.npu.backend:NpuBackend",
}
LIMIT_S = 300.0
# Dropped before the child starts: a test says what its driver is to do.
_OURS = ("SWITCHGEAR_TEST_FAULT", "SWITCHGEAR_TEST_NNAPI")


@dataclass(frozen=True)
class Result:
    """How the process ended: a negative status is the signal. `answers` has what came."""

    answers: list[Any]
    status: int
    stderr: str


def isolated(
    backend: str,
    steps: Steps,
    *,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Result:
    """Runs the steps in a new process, which is killed after `limit_s` (TimeoutExpired)."""
    own = {name: value for name, value in os.environ.items() if name not in _OURS}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([backend, dict(options or {}), steps])],
        env={**own, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    lines = done.stdout.splitlines()
    answers = [json.loads(line[1:]) for line in lines if line.startswith(">")]
    return Result(answers, done.returncode, done.stderr)


def hangs_after(
    count: int,
    backend: str,
    steps: Steps,
    *,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Whether it still runs a second after its answer number `count`; it is then killed."""
    own = {name: value for name, value in os.environ.items() if name not in _OURS}
    with subprocess.Popen(
        [sys.executable, __file__, json.dumps([backend, dict(options or {}), steps])],
        env={**own, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        answers = 0
        for line in child.stdout:
            answers += line.startswith(">")
            if answers == count:
                break

        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
            return answers == count

        return False


def inputs_of(info: ModelInfo, seed: int) -> dict[str, Array]:
    """Noise in the range of an image's pixels, or of the integer type; the same for a seed."""
    random = np.random.RandomState(seed)
    values: dict[str, Array] = {}
    for spec in info.inputs:
        if np.dtype(spec.dtype).kind == "f":
            values[spec.name] = random.rand(*spec.shape).astype(spec.dtype)
        else:
            bounds = np.iinfo(spec.dtype)
            raw = random.randint(bounds.min, bounds.max, spec.shape, np.int64)
            values[spec.name] = raw.astype(spec.dtype)

    return values


def outputs_of(instance: Instance, values: Mapping[str, Array]) -> dict[str, Array]:
    """One run in memory of its own."""
    info = instance.info
    source = [memoryview(bytearray(values[spec.name].tobytes())) for spec in info.inputs]
    target = [memoryview(bytearray(spec.capacity_bytes)) for spec in info.outputs]
    entries = instance.run(instance.attach_input(source), instance.attach_output(target))
    return {
        spec.name: np.frombuffer(memory[: entry.length], entry.dtype).reshape(entry.shape)
        for spec, memory, entry in zip(info.outputs, target, entries, strict=True)
    }


def error_shares(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> dict[str, float]:
    """The largest difference of each output, as a share of the reference's largest value."""
    assert found.keys() == wanted.keys()
    shares = {}
    for name, reference in wanted.items():
        exact = reference.astype(np.float64)
        difference = np.abs(found[name].astype(np.float64) - exact).max()
        shares[name] = float(difference / (np.abs(exact).max() or 1.0))

    return shares


class _Subject:
    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        module, _, attribute = BACKENDS[name].partition(":")
        self._backend: Any = getattr(importlib.import_module(module), attribute)(options)
        self._instance: Any = None
        self._reference: Any = None

    def identity(self) -> dict[str, str]:
        return dict(self._backend.identity())

    def probe(self) -> str:
        return str(self._backend.probe())

    def load(self, path: str, precision: str, shapes: Mapping[str, list[int]]) -> Any:
        chosen = {name: tuple(shape) for name, shape in shapes.items()}
        request = LoadRequest(path, precision, chosen)
        begin = time.monotonic()
        self._instance = self._backend.load(request)
        load_s = time.monotonic() - begin
        self._reference = CpuBackend({}).load(LoadRequest(path, "auto", chosen))
        coverage = self._instance.coverage
        return {
            "precision": self._instance.precision,
            "coverage": [coverage.nodes, coverage.nodes_total, coverage.arithmetic],
            "same_info": self._instance.info == self._reference.info,
            "load_s": load_s,
            "engine": self._backend.engine,
        }

    def run(self, seed: int) -> dict[str, float]:
        values = inputs_of(self._instance.info, seed)
        found = outputs_of(self._instance, values)
        return error_shares(found, outputs_of(self._reference, values))

    def time(self, seed: int, runs: int) -> list[float]:
        """Latencies in milliseconds."""
        values = inputs_of(self._instance.info, seed)
        taken = []
        for _ in range(runs):
            begin = time.monotonic()
            outputs_of(self._instance, values)
            taken.append((time.monotonic() - begin) * 1e3)

        return taken

    def reset(self) -> None:
        self._instance.reset()

    def close(self) -> None:
        self._instance.close()
        self._backend.close()


def _answer(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except DriverError as error:
        return {"error": [error.domain, error.code, error.name, error.text]}
    except SwitchgearError as error:
        return {"error": ["switchgear", error.code, error.name, error.text]}


def main() -> None:
    backend, options, steps = json.loads(sys.argv[1])
    subject = _answer(_Subject, backend, options)
    for name, *arguments in steps:
        if isinstance(subject, dict):
            print(">" + json.dumps(subject), flush=True)
        else:
            print(">" + json.dumps(_answer(getattr(subject, name), *arguments)), flush=True)

    # Without the destructors of drivers that were lost.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
