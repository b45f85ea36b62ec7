"""MobileNet v1 1.0 224 on LiteRT's classic interpreter, timed one inference at a time."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np

from switchgear.backends.generate import mobilenet_v1

KINDS: Final = ("float", "int8")
# A network whose output is one value everywhere was not computed (engines can run a delegate
# that does nothing). The generator's weights spread the 1001 outputs over far more than this.
_DISTINCT_OUTPUTS: Final = 30
_ENGINES: Final = ("ai-edge-litert", "tflite-runtime")


class WrongOutput(Exception):
    """The network's output is not one that the network can have."""


def model(kind: str) -> bytes:
    """The model as a .tflite file; `kind` is one of `KINDS`."""
    return mobilenet_v1(quantised=kind == "int8")


def interpreter_module() -> Any:
    """LiteRT, or `tflite_runtime` where that is installed; raises `ImportError` on neither."""
    try:
        from ai_edge_litert import interpreter
    except ImportError:
        from tflite_runtime import interpreter

    return interpreter


def engine() -> tuple[str, str]:
    """Name and version of the installed engine, empty where there is none."""
    for name in _ENGINES:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue

    return "", ""


class Network:
    """An interpreter with its input set. Its threads run where its maker may run.

    Raises what the interpreter raises: `RuntimeError`, and `ValueError` from a delegate.
    """

    def __init__(
        self, content: bytes, threads: int, delegates: list[Any] | None = None
    ) -> None:
        self._interpreter = interpreter_module().Interpreter(
            model_content=content, num_threads=threads, experimental_delegates=delegates
        )
        # Read before the interpreter adds its own delegate, which it does when it allocates.
        self._nodes: list[dict[str, Any]] = list(self._interpreter._get_ops_details())
        self._interpreter.allocate_tensors()
        (entry,) = self._interpreter.get_input_details()
        (self._exit,) = self._interpreter.get_output_details()
        generator = np.random.default_rng(224)
        if entry["dtype"] == np.float32:
            picture = generator.random(entry["shape"], np.float32) * 2 - 1
        else:
            limits = np.iinfo(entry["dtype"])
            picture = generator.integers(
                limits.min, limits.max, entry["shape"], entry["dtype"], endpoint=True
            )

        self._entry: int = entry["index"]
        self._picture = picture
        self.set_input()

    def set_input(self) -> None:
        """Copies the input in, as an app does for each frame."""
        self._interpreter.set_tensor(self._entry, self._picture)

    def invoke(self) -> None:
        self._interpreter.invoke()

    def invoke_ms(self) -> float:
        """Runs one inference; the wall-clock time of it."""
        begin = time.perf_counter()
        self._interpreter.invoke()
        return (time.perf_counter() - begin) * 1e3

    def output(self) -> np.ndarray[Any, Any]:
        """A copy of the 1001 outputs, dequantised."""
        raw = self._interpreter.get_tensor(self._exit["index"]).astype(np.float32).ravel()
        scale, zero_point = self._exit["quantization"]
        result: np.ndarray[Any, Any] = (raw - zero_point) * scale if scale else raw
        return result

    def check(self) -> None:
        """Raises `WrongOutput` when the last inference's output cannot be the network's."""
        output = self.output()
        distinct = len(np.unique(output))
        if not np.isfinite(output).all():
            raise WrongOutput("the output is not finite")

        if distinct < _DISTINCT_OUTPUTS:
            raise WrongOutput(f"the output has only {distinct} distinct values")

    def nodes(self) -> list[dict[str, Any]]:
        """The model's operators, then a node for each partition of the delegate given.

        Each has at least `op_name`, `inputs` and `outputs` (tensor numbers).
        """
        return self._nodes
