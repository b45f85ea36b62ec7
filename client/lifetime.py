"""What a session does about the end of its connection, without I/O; both clients use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from switchgear.client.core import SessionCore
from switchgear.client.models import Tensor
from switchgear.client.options import SessionOptions
from switchgear.client.tensors import Value, View, write_all
from switchgear.ipc.errors import BadInput, BadRequest, ConnectionLost, SlotBusy, StateLost


class SessionBase:
    """The part of a session that needs no I/O. `_core` changes when it is opened again."""

    def __init__(self, core: SessionCore, options: SessionOptions, reconnect: bool) -> None:
        self._core = core
        self._options = options
        self._reconnect = reconnect
        self._closed = False

    @property
    def id(self) -> int:
        """The daemon's number of the session; another after a reconnect."""
        return self._core.opened.session

    @property
    def model(self) -> str:
        """The model's hash, or the name that the session was opened with."""
        return self._options.model

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self._core.opened.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return self._core.opened.outputs

    @property
    def slots(self) -> int:
        return self._core.opened.slots

    @property
    def state(self) -> bool:
        """Whether the model keeps variables between frames."""
        return self._core.opened.state

    @property
    def epoch(self) -> int:
        """Changes when a stateful session lost its state; adopted when StateLost is raised."""
        return self._core.epoch

    @property
    def in_flight(self) -> int:
        """Requests that are not answered, as far as received."""
        return len(self._core.table.in_flight)

    @property
    def closed(self) -> bool:
        return self._closed

    def _require_events(self) -> None:
        """:raises BadRequest: the session was opened without them."""
        if not self._options.events:
            raise BadRequest("the session was not opened with events=True")

    def reset(self) -> None:
        """The next frame starts from a fresh state. Sends nothing, so it never blocks."""
        self._core.reset_due = True

    def _may_reopen(self) -> bool:
        return self._reconnect and not self._closed and self._core.may_reopen

    def _lost_but_open(self, core: SessionCore) -> bool:
        return core.lost is not None and self._may_reopen()

    def _require_reopening(self) -> None:
        """:raises ConnectionLost: the session stays lost."""
        if self._closed:
            raise ConnectionLost("the session is closed")

        if not self._may_reopen():
            raise self._core.loss()

    def _adopt(self, core: SessionCore, reset: bool) -> None:
        """Goes on with a session that was opened again.

        :raises StateLost: there was a state, and the caller has not heard that it is gone.
        """
        before, self._core = self._core, core
        if before.opened.state and before.used and not (reset or before.reset_due):
            raise StateLost(
                "the daemon went away with the session's state; the next frame starts from a"
                " fresh one",
                epoch=core.epoch,
            )


def merged(
    inputs: Mapping[str, Value] | None, keywords: Mapping[str, Value]
) -> Mapping[str, Value]:
    """Inputs given as a mapping and as keywords.

    :raises BadInput: one is given twice.
    """
    if inputs is None:
        return keywords

    if not keywords:
        return inputs

    twice = inputs.keys() & keywords.keys()
    if twice:
        raise BadInput(f"input {min(twice)!r} is given twice", input=min(twice))

    return {**inputs, **keywords}


class AnyChannel(Protocol):
    """What the two clients' channels have in common."""

    core: SessionCore

    def poll(self) -> None: ...

    def give_back(self, slot: int) -> None: ...


C = TypeVar("C", bound=AnyChannel)


def take_slot(channel: AnyChannel, slot: int | None) -> int:
    """Takes this slot, or any free one; the caller holds it.

    :raises BadSlot: there is no such slot.
    :raises SlotBusy: it is in use, or all are.
    """
    table = channel.core.table
    if slot is None:
        index = table.take()
        if index is not None:
            return index

    # Answers that nobody has received yet may free one.
    channel.poll()
    if slot is not None:
        table.take_slot(slot)
        return slot

    index = table.take()
    if index is not None:
        return index

    raise SlotBusy(
        f"all {table.slots} slots are in use: in flight, held, or with a result not taken",
        slots=table.slots,
    )


class SlotInputs(Mapping[str, View]):
    """Writable views of a slot's input tensors by name; they share the arena's memory."""

    __slots__ = ("_core", "_slot")

    def __init__(self, core: SessionCore, slot: int) -> None:
        self._core = core
        self._slot = slot

    def __getitem__(self, name: str) -> View:
        return self._core.targets(self._slot)[name].view

    def __iter__(self) -> Iterator[str]:
        return iter(self._core.targets(self._slot))

    def __len__(self) -> int:
        return len(self._core.targets(self._slot))


class SlotBase(Generic[C]):
    """The part of a slot in its owner's hands that needs no I/O.

    `inputs`: writable views of its input tensors by name, valid as long as its connection.
    """

    def __init__(self, channel: C, index: int) -> None:
        self._channel = channel
        self._closed = False
        self.index = index
        self.inputs = SlotInputs(channel.core, index)

    def _write(self, inputs: Mapping[str, Value]) -> None:
        """Checks that the slot may be written to, and writes what is given here."""
        core = self._channel.core
        if self._closed:
            raise SlotBusy(f"slot {self.index} was given back")

        # Replies that nobody has received yet may have ended its request.
        self._channel.poll()
        core.require_idle(self.index)
        write_all(core.targets(self.index), inputs)

    def close(self) -> None:
        """Gives the slot back; while its request is in flight, when that has ended."""
        if not self._closed:
            self._closed = True
            self._channel.give_back(self.index)
