"""The NPU test: how busy an external delegate's device is while MobileNet runs on it."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.mapped import library_named
from switchgear.backends.npu.coverage import nodes_in_partitions
from switchgear.fingerprints.measure import busy_counters
from switchgear.fingerprints.measure.mobilenet import (
    KINDS,
    Network,
    WrongOutput,
    interpreter_module,
    model,
)
from switchgear.fingerprints.measure.sampling import Contention, collect, drifted
from switchgear.fingerprints.measurement import (
    NPU_UTILISATION,
    Failure,
    Measured,
    Report,
    Subject,
    Value,
    own_failure,
    value_of,
)

if TYPE_CHECKING:
    from switchgear.fingerprints.measure.busy_counters import BusyCounter
    from switchgear.fingerprints.measure.channel import Channel
    from switchgear.fingerprints.measure.options import Options

# TfLiteStatus of the C API.
_TFLITE_ERROR: Final = (1, "kTfLiteError")
_DELEGATE_ERROR: Final = (2, "kTfLiteDelegateError")
# A vendor's compiler may take this long for a first load.
_COMPILE_S: Final = 60.0
_WARM_UP: Final = 3


def run(options: Options, channel: Channel) -> None:
    """Reports on the configured external delegate, or why there is none."""
    if not options.delegate:
        failure = own_failure(
            NPU_UTILISATION, "NoBackend", "absent: no external delegate is configured"
        )
        channel.report(Report(NPU_UTILISATION, None, (failure,)))
        return

    if 0 in options.skip:
        return

    started = time.monotonic()
    counter = busy_counters.find(Path(options.sysfs))
    subject = Subject(
        api="npu",
        name=Path(options.delegate).name,
        driver_name=counter.kind.driver if counter else "",
        device_type="npu",
        platform="TFLite external delegate",
        library=options.delegate,
    )
    channel.begin(subject)
    notes = [_counter_note(counter)]
    values: list[Measured] = []
    for position, kind in enumerate(KINDS):
        channel.progress(position / len(KINDS), f"MobileNet v1 ({kind}) on {subject.name}")
        values += _Kind(kind, position, options, channel, counter, notes).measure()

    subject = replace(subject, library=library_named(subject.name) or options.delegate)
    duration_s = time.monotonic() - started
    channel.report(Report(NPU_UTILISATION, subject, tuple(values), tuple(notes), duration_s))


def nodes_taken(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """How many of the nodes `before` run inside the nodes that a delegate added.

    An entry has `inputs` and `outputs` (tensor numbers). A partition is what lies between its
    inputs and its outputs.
    """
    return len(nodes_in_partitions(before, after[len(before) :]))


class _Kind:
    """The part of the test that runs one kind of the model."""

    def __init__(
        self,
        kind: str,
        position: int,
        options: Options,
        channel: Channel,
        counter: BusyCounter | None,
        notes: list[str],
    ) -> None:
        self._kind = kind
        self._position = position
        self._options = options
        self._channel = channel
        self._counter = counter
        self._notes = notes

    def measure(self) -> list[Measured]:
        try:
            content = model(self._kind)
            plain = Network(content, 1).nodes()
            self._channel.expect(_COMPILE_S)
            network = Network(content, 1, [self._load()])
        except _Refused as refused:
            return [refused.failure]
        except ImportError as error:
            text = f"neither ai_edge_litert nor tflite_runtime can be loaded: {error}"
            return [own_failure(self._name("latency_ms"), "NoBackend", text)]
        except (RuntimeError, ValueError) as error:
            return [self._failure(*_DELEGATE_ERROR, f"the delegate refuses the model: {error}")]

        taken = nodes_taken(plain, network.nodes())
        counts: list[Measured] = [
            Value(
                self._name("nodes_on_device"), taken, 0.0, 1, "nodes", "delegate's partitions"
            ),
            Value(
                self._name("nodes_total"), len(plain), 0.0, 1, "nodes", "operators of the model"
            ),
        ]
        if taken == 0:
            text = f"the delegate took none of the {len(plain)} nodes: all ran on the CPU"
            return [
                *counts,
                own_failure(
                    self._name("utilisation_pct"),
                    "UnsupportedModel",
                    text,
                    self._options.delegate,
                ),
            ]

        try:
            return [
                *counts,
                *self._run(network, f"{taken} of {len(plain)} nodes on the device"),
            ]
        except WrongOutput as error:
            return [
                *counts,
                own_failure(
                    self._name("utilisation_pct"),
                    "BackendFailed",
                    str(error),
                    self._options.delegate,
                ),
            ]
        except RuntimeError as error:
            return [*counts, self._failure(*_TFLITE_ERROR, f"the inference failed: {error}")]

    def _load(self) -> Any:
        path, options = self._options.delegate, self._options.delegate_options
        try:
            return interpreter_module().load_delegate(path, options)
        except OSError as error:
            if not Path(path).exists():
                code, name = errno.ENOENT, "ENOENT"
                raise _Refused(
                    Failure(
                        self._name("utilisation_pct"), "errno", code, name, str(error), path
                    )
                ) from None

            text = f"the delegate cannot be opened: {error}"
        except AttributeError as error:
            text = f"the library is no TFLite external delegate: {error}"
        except ValueError as error:
            text = f"the delegate cannot be created: {error}"
            raise _Refused(self._failure(*_DELEGATE_ERROR, text)) from None

        raise _Refused(
            own_failure(self._name("utilisation_pct"), "BackendFailed", text, path)
        ) from None

    def _run(self, network: Network, where: str) -> list[Measured]:
        for _ in range(_WARM_UP):
            network.invoke()

        network.check()
        budget_s = self._options.budget_s / len(KINDS)
        window_s = max(budget_s / 5, self._counter.kind.window_s if self._counter else 0.0)
        windows = max(1, int(budget_s / window_s))
        latencies_ms: list[float] = []
        counted: list[float] = []
        own: list[float] = []
        contention = Contention()
        if self._counter is not None:
            self._counter.busy_pct()

        for window in range(windows):
            done = (self._position + window / windows) / len(KINDS)
            self._channel.progress(done, f"MobileNet v1 ({self._kind}), {where}")
            own.append(self._window(network, window_s, latencies_ms))
            busy_pct = self._counter.busy_pct() if self._counter is not None else None
            if busy_pct is not None:
                counted.append(busy_pct)

        disturbed = contention.disturbed or drifted(latencies_ms)
        if counted and self._counter is not None:
            samples, method = counted, f"busy counter {self._counter.kind.name}"
        else:
            samples = own
            method = (
                "own timestamps from submit to completion, in a loop that sets the input and "
                "copies the output; the nodes left to the CPU count as busy"
            )
            if self._counter is not None:
                self._notes.append(f"{self._kind}: the counter gave no usable reading")

        return [
            value_of(self._name("utilisation_pct"), samples, "%", method, disturbed=disturbed),
            value_of(
                self._name("latency_ms"),
                latencies_ms,
                "ms",
                f"MobileNet v1 1.0 224, {where}",
                disturbed=disturbed,
            ),
        ]

    def _window(self, network: Network, window_s: float, latencies_ms: list[float]) -> float:
        """Runs frames as an app does for a while; percent of it spent in inferences."""

        def frame() -> float:
            network.set_input()
            took_ms = network.invoke_ms()
            network.output()
            return took_ms

        begin = time.monotonic()
        taken = collect(frame, budget_s=window_s, minimum=1, maximum=100_000)
        elapsed_ms = (time.monotonic() - begin) * 1e3
        latencies_ms += taken
        return min(100.0 * sum(taken) / elapsed_ms, 100.0)

    def _name(self, name: str) -> str:
        return f"{self._kind}_{name}"

    def _failure(self, code: int, code_name: str, text: str) -> Failure:
        path = self._options.delegate
        return Failure(self._name("utilisation_pct"), "delegate", code, code_name, text, path)


class _Refused(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def _counter_note(counter: BusyCounter | None) -> str:
    if counter is None:
        return "this machine has no NPU busy counter that we know: own timestamps instead"

    return f"busy counter {counter.path}"
