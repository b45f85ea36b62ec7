"""What a preparer does: compiles a model, runs it with its real shapes, keeps the artefact."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from switchgear.backends.opencl.artefact import Artefact
from switchgear.backends.opencl.compiler import assemble
from switchgear.backends.opencl.int4_compiler import Int4Compiler
from switchgear.backends.opencl.model import Subject, read_subject
from switchgear.backends.opencl.products import FloatProducts, as_notes
from switchgear.backends.opencl.runner import compared_ms, dispatched, same_answers
from switchgear.backends.opencl.store import artefact_key, artefact_path, read_stored, save
from switchgear.backends.opencl.tune import KernelSearch
from switchgear.ipc.errors import NotPrepared, UnsupportedModel

if TYPE_CHECKING:
    from switchgear.backends.contract import LoadRequest
    from switchgear.backends.opencl.device import Device
    from switchgear.backends.opencl.tinygrad_jit import Captured

# Four bits are offered where they take at most this share of the time in float.
FASTER: Final = 0.95
# Of a search's time; the rest is for what comes before and after it.
SEARCH_SHARE: Final = 0.9


class Preparation:
    """The artefacts of one model, in its folder of prepared files."""

    def __init__(self, device: Device, request: LoadRequest, engine_version: str) -> None:
        self._device = device
        self._request = request
        self._engine_version = engine_version
        self._subject: Subject | None = None

    def artefact(self, precision: str) -> Artefact:
        """The stored artefact, else a new one, stored; blocks for seconds to minutes.

        :raises UnsupportedModel: the model is refused, with the operator or the figure.
        :raises DriverError: the driver refuses it, or the file cannot be written.
        """
        request = self._request
        key = artefact_key(request, precision, self._device.identity(), self._engine_version)
        path = artefact_path(request, precision)
        stored = None
        with contextlib.suppress(NotPrepared):
            stored = read_stored(path, key)
            # Without a binary it would be built from source at each start.
            if stored.binary and (precision != "fp32" or self._is_tuned(stored)):
                return stored

        made = self._int4(key) if precision == "int4" else self._fp32(key, stored)
        save(path, made)
        return made

    def _read(self) -> Subject:
        if self._subject is None:
            self._subject = read_subject(self._device, self._request)

        return self._subject

    def _is_tuned(self, stored: Artefact) -> bool:
        """Whether the search has had as much time as it may have now."""
        return float(stored.notes.get("tune_s", "0")) >= self._request.tune_s

    def _fp32(self, key: dict[str, str], stored: Artefact | None) -> Artefact:
        """`stored` is what an earlier, shorter search found: it stays unless it is beaten."""
        subject = self._read()
        products = FloatProducts(self._device.host_memory)
        begin = time.monotonic()
        captured = subject.trace(products, products.constants)
        notes = as_notes(captured.named)

        def finished(traced: Captured) -> Artefact:
            return dispatched(self._device, assemble(traced, subject.info, "fp32", key, notes))

        untuned = finished(captured)
        tune_s = self._request.tune_s
        if not tune_s:
            return untuned

        # The budget is for all of it: what was found is compiled and compared, too.
        found = KernelSearch(self._device, captured, begin + SEARCH_SHARE * tune_s).run()
        tuned = finished(found.captured) if found.changed else untuned
        before = stored if stored is not None and stored.binary else untuned
        untuned_ms, before_ms, tuned_ms = compared_ms(self._device, [untuned, before, tuned])
        better = tuned_ms < min(untuned_ms, before_ms) and same_answers(
            self._device, untuned, tuned
        )
        kept = tuned if better else before if before_ms <= untuned_ms else untuned
        figures = {
            "tune_s": f"{tune_s:g}",
            "tune_tried": str(found.tried),
            "tune_changed": str(found.changed if better else 0),
            "untuned_ms": f"{untuned_ms:.3f}",
            "before_ms": f"{before_ms:.3f}",
            "tuned_ms": f"{tuned_ms:.3f}",
        }
        return replace(kept, notes={**kept.notes, **figures})

    def _int4(self, key: dict[str, str]) -> Artefact:
        # First what is told without compiling anything.
        compiler = Int4Compiler(self._read())
        gaining = compiler.gaining()
        fp32 = self.artefact("fp32")
        int4 = compiler.compile(gaining, fp32, key)
        int4_ms, fp32_ms = compared_ms(self._device, [int4, fp32])
        if int4_ms > FASTER * fp32_ms:
            raise UnsupportedModel(
                f"int4 is not faster here: {int4_ms:.2f} ms, fp32 {fp32_ms:.2f} ms"
                f" ({int4.notes['int4_snr_db']} dB,"
                f" {int4.notes['int4_layers']} of {int4.notes['int4_layers_of']} layers)"
            )

        figures = {"int4_ms": f"{int4_ms:.3f}", "fp32_ms": f"{fp32_ms:.3f}"}
        return replace(int4, notes={**int4.notes, **figures})
