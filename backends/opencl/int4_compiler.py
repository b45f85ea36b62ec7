"""A model with weights of four bits in the layers that bear it and that gain by it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from switchgear.backends.known_answer.check import compare
from switchgear.backends.known_answer.reference import Reference, compute_reference
from switchgear.backends.known_answer.tolerance import INT4_SNR_DB
from switchgear.backends.opencl import float_product, int4
from switchgear.backends.opencl.artefact import Artefact
from switchgear.backends.opencl.compiler import assemble
from switchgear.backends.opencl.int4_search import Choice, choose_layers
from switchgear.backends.opencl.kernel_time import KernelClock, KernelRun
from switchgear.backends.opencl.model import Subject
from switchgear.backends.opencl.products import FloatProducts, Layer, Weights, from_notes
from switchgear.backends.opencl.replay import Replay
from switchgear.backends.opencl.runner import Runner, bytes_of, dispatched
from switchgear.backends.opencl.tinygrad_jit import KernelSource
from switchgear.ipc.errors import UnsupportedModel

# A layer gets four bits where its kernel takes at most this share of the float one's time.
LAYER_FASTER: Final = 0.9
# Layers take microseconds: the least of many runs, on a machine that does other work too.
LAYER_ROUNDS: Final = 40
# A smaller layer is not looked at: it lies in the nearest cache either way, and its part of the
# model's time is noise.
LEAST_WEIGHTS: Final = 1 << 15


@dataclass
class _Mixed:
    """A hook: these operators in four bits, the others in float."""

    operators: Collection[int]
    shared: bool
    others: FloatProducts

    def __call__(self, operator: int, x: Any, weights: Weights) -> Any:
        if operator not in self.operators:
            return self.others(operator, x, weights)

        return int4.product(x, int4.quantise(np.asarray(weights)), shared=self.shared)


class Int4Compiler:
    """Finds out which layers of a model may have four bits, and compiles it so."""

    def __init__(self, subject: Subject, wanted_db: float = INT4_SNR_DB) -> None:
        self._subject = subject
        self._device = subject.device
        self._wanted_db = wanted_db
        self._processor = subject.device.host_memory
        self._layers = subject.layers()
        self._clock = KernelClock(subject.device)

    def gaining(self) -> list[int]:
        """The layers whose kernel of four bits is faster than the float one, measured.

        :raises UnsupportedModel: there is none.
        """
        if not self._layers:
            raise UnsupportedModel("int4: the model has no layer of float weights")

        if not self._processor:
            # The float ones are tinygrad's, fused with what follows: the whole is compared.
            return sorted(self._layers)

        large = {
            operator: layer
            for operator, layer in sorted(self._layers.items())
            if layer.weights.size >= LEAST_WEIGHTS
        }
        if not large:
            most = max(layer.weights.size for layer in self._layers.values())
            raise UnsupportedModel(
                f"int4: none of {len(self._layers)} layers has {LEAST_WEIGHTS} weights;"
                f" the largest has {most}"
            )

        shares: dict[tuple[int, int, int], float] = {}
        gaining = []
        for operator, layer in large.items():
            size = (layer.rows, *layer.weights.shape)
            if size not in shares:
                shares[size] = self._time_share(layer)

            if shares[size] <= LAYER_FASTER:
                gaining.append(operator)

        if not gaining:
            raise UnsupportedModel(
                f"int4: none of {len(large)} large layers is faster than in float here;"
                f" the best takes {min(shares.values()):.2f} of its time"
            )

        return gaining

    def compile(
        self, gaining: Sequence[int], fp32: Artefact, key: Mapping[str, str]
    ) -> Artefact:
        """The artefact; blocks for minutes.

        `fp32` is the model's artefact in float: its weights are rounded to try a choice.

        :raises UnsupportedModel: too few layers bear four bits, with the figure.
        """
        reference = compute_reference(self._subject.request.path, self._subject.request.shapes)
        choice = self._choose(gaining, fp32, reference)
        if not choice.layers:
            raise UnsupportedModel(
                f"int4: with all {len(gaining)} layers that gain by it"
                f" {choice.plain_snr_db:.1f} dB, and no choice of them has"
                f" {self._wanted_db:g}"
            )

        artefact = self._compiled(choice, key)
        with contextlib.closing(Replay(self._device, artefact)) as replay:
            ratio = _snr_db(Runner(replay, artefact), reference)

        if ratio < self._wanted_db:
            raise UnsupportedModel(f"int4: {ratio:.1f} dB, not {self._wanted_db:g}")

        return replace(artefact, notes={**artefact.notes, "int4_snr_db": f"{ratio:.1f}"})

    def _compiled(self, choice: Choice, key: Mapping[str, str]) -> Artefact:
        hook = _Mixed(set(choice.layers), not self._processor, FloatProducts(self._processor))
        notes = {
            "int4_layers": str(len(choice.layers)),
            "int4_layers_of": str(len(self._layers)),
            "int4_plain_snr_db": f"{choice.plain_snr_db:.1f}",
        }
        captured = self._subject.trace(hook)
        return dispatched(
            self._device, assemble(captured, self._subject.info, "int4", key, notes)
        )

    def _time_share(self, layer: Layer) -> float:
        """The time of the kernel of four bits as a share of the float one's."""
        n, k = layer.weights.shape
        groups = -(-k // int4.GROUP)
        x = 4 * layer.rows * groups * int4.GROUP
        y = 4 * layer.rows * n
        packed = 4 * layer.rows * int4.row_words(groups)
        rounding = int4.activation_kernel(layer.rows, k)
        four = int4.product_kernel(layer.rows, n, k, shared=False)
        weights = (n * groups * int4.GROUP // 2, 4 * n * groups, n * groups)
        plain = float_product.product_kernel(layer.rows, n, k)
        columns = float_product.padded_columns(n)
        four_ns = self._time_ns(rounding, (packed, x))
        four_ns += self._time_ns(four, (y, packed, *weights))
        return four_ns / self._time_ns(plain, (y, x, 4 * columns * k))

    def _time_ns(self, kernel: KernelSource, sizes_bytes: Sequence[int]) -> int:
        return self._clock.time_ns(_run_of(kernel), sizes_bytes, rounds=LAYER_ROUNDS)

    def _choose(self, layers: Sequence[int], fp32: Artefact, reference: Reference) -> Choice:
        """Measures with the float kernels: only their weights are rounded."""
        places = from_notes(fp32.notes)
        products = FloatProducts(self._processor)
        with contextlib.closing(Replay(self._device, fp32)) as replay:
            runner = Runner(replay, fp32)
            now: set[int] = set()

            def snr_db(some: Collection[int]) -> float:
                for layer in now ^ set(some):
                    weights = np.asarray(self._layers[layer].weights)
                    if layer in some:
                        weights = int4.dequantise(int4.quantise(weights), weights.shape[1])

                    laid_out = np.ascontiguousarray(products.laid_out(weights))
                    replay.write_constant(places[layer], bytes_of(laid_out))

                now.clear()
                now.update(some)
                return _snr_db(runner, reference)

            outer = self._subject.outer_layers()
            return choose_layers(layers, outer, snr_db, self._wanted_db)


def _snr_db(runner: Runner, reference: Reference) -> float:
    """The least signal-to-noise ratio of an output over the check's inputs."""
    results = [runner.run(values) for values in reference.inputs]
    report = compare(reference, results, "int4")
    return min(output.snr_db for output in report.outputs)


def _run_of(kernel: KernelSource) -> KernelRun:
    x, y, z = (g * w for g, w in zip(kernel.groups, kernel.local_size, strict=True))
    return KernelRun(kernel.source, kernel.name, (x, y, z), kernel.local_size)
