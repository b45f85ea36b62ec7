"""A model with weights of four bits in the layers that bear it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from switchgear.backends.known_answer.check import compare
from switchgear.backends.known_answer.reference import Reference, compute_reference
from switchgear.backends.known_answer.tolerance import INT4_SNR_DB
from switchgear.backends.opencl import int4, tinygrad_jit
from switchgear.backends.opencl.artefact import Artefact
from switchgear.backends.opencl.compiler import assemble
from switchgear.backends.opencl.int4_search import Choice, choose_layers
from switchgear.backends.opencl.model import Subject
from switchgear.backends.opencl.replay import Replay
from switchgear.backends.opencl.runner import Runner, bytes_of, dispatched
from switchgear.ipc.errors import UnsupportedModel

# A layer with fewer weights is not worth unpacking.
LEAST_WEIGHTS: Final = 4096


class Int4Compiler:
    """Finds out which layers of a model bear four bits, and compiles it so."""

    def __init__(self, subject: Subject, wanted_db: float = INT4_SNR_DB) -> None:
        self._subject = subject
        self._wanted_db = wanted_db
        self._weights: dict[int, NDArray[np.float32]] = {}
        self._reference: Reference = compute_reference(
            subject.request.path, subject.request.shapes
        )

    def compile(self, key: Mapping[str, str]) -> Artefact:
        """The artefact; blocks for minutes.

        :raises UnsupportedModel: too few layers bear it, with the ratio that was measured.
        """
        choice = self._choose()
        if not choice.layers:
            raise UnsupportedModel(
                f"int4: with all {len(self._weights)} layers {choice.plain_snr_db:.1f} dB,"
                f" and no choice of them has {self._wanted_db:g}"
            )

        captured = self._subject.trace(self._packed_hook(set(choice.layers)))
        notes = {
            "int4_layers": str(len(choice.layers)),
            "int4_layers_of": str(len(self._weights)),
            "int4_plain_snr_db": f"{choice.plain_snr_db:.1f}",
        }
        artefact = dispatched(
            self._subject.device, assemble(captured, self._subject.info, "int4", key, notes)
        )
        ratio = self._checked(artefact)
        return replace(artefact, notes={**artefact.notes, "int4_snr_db": f"{ratio:.1f}"})

    def _choose(self) -> Choice:
        """Measures with the float kernels: only their weights are rounded."""
        constants: dict[int, Any] = {}

        def hook(operator: int, x: Any, weights: NDArray[np.float32]) -> Any:
            if weights.size < LEAST_WEIGHTS:
                return None

            self._weights[operator] = np.array(weights, np.float32)
            constants[operator] = tinygrad_jit.constant(self._weights[operator])
            return x.dot(constants[operator].T)

        captured = self._subject.trace(hook, constants)
        if not self._weights:
            raise UnsupportedModel("int4: the model has no layer of float weights")

        places = captured.named
        artefact = assemble(captured, self._subject.info, "fp32", {})
        with contextlib.closing(Replay(self._subject.device, artefact)) as replay:
            runner = Runner(replay, artefact)
            now: set[int] = set()

            def snr_db(layers: Collection[int]) -> float:
                for layer in now ^ set(layers):
                    weights = self._weights[layer]
                    if layer in layers:
                        weights = int4.dequantise(int4.quantise(weights), weights.shape[1])

                    replay.write_constant(
                        places[layer], bytes_of(np.ascontiguousarray(weights))
                    )

                now.clear()
                now.update(layers)
                return self._ratio(runner)

            return choose_layers(
                sorted(self._weights), self._subject.outer_layers(), snr_db, self._wanted_db
            )

    def _ratio(self, runner: Runner) -> float:
        results = [runner.run(values) for values in self._reference.inputs]
        report = compare(self._reference, results, "int4")
        return min(output.snr_db for output in report.outputs)

    def _packed_hook(self, layers: set[int]) -> Callable[..., Any]:
        shared = not self._subject.device.host_memory

        def hook(operator: int, x: Any, weights: NDArray[np.float32]) -> Any:
            if operator not in layers:
                return None

            return int4.product(x, int4.quantise(np.asarray(weights)), shared=shared)

        return hook

    def _checked(self, artefact: Artefact) -> float:
        with contextlib.closing(Replay(self._subject.device, artefact)) as replay:
            ratio = self._ratio(Runner(replay, artefact))

        if ratio < self._wanted_db:
            raise UnsupportedModel(f"int4: {ratio:.1f} dB, not {self._wanted_db:g}")

        return ratio
