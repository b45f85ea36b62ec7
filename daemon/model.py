"""A loaded model, and which input shapes it takes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from switchgear.ipc import worker
from switchgear.ipc.errors import BadShape
from switchgear.ipc.slot import check_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from switchgear.daemon.instances import Instance
    from switchgear.daemon.model_store import Stored
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.validation import Shapes
    from switchgear.ipc.slot import TensorSpec

# Names that one user may give one model; the oldest is forgotten.
NAMES_PER_USER: Final = 16


@dataclass(eq=False, slots=True)
class Model:
    """A model's bytes and what is known of it.

    `users` has each user that loaded it, with the names that the user gave it, the newest last.
    `resident_name` is its name for everybody, where the configuration keeps it loaded.
    `sessions` counts each user's. `holds` counts the jobs that work with it. The lanes' are
    `slowest_run_ns`, and by isolation group `deaths` and `quarantined`: what one user's inputs
    do to a model is nothing to the others.
    """

    stored: Stored
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    names: str
    state: bool
    operators: dict[str, int]
    instance_bytes: int
    run_us: int
    users: dict[int, list[str]] = field(default_factory=dict)
    resident_name: str = ""
    status: str = "loading"
    backends: dict[str, str] = field(default_factory=dict)
    timeline: list[tuple[str, int, int]] = field(default_factory=list)
    sessions: Counter[int] = field(default_factory=Counter)
    holds: int = 0
    slowest_run_ns: int = 0
    deaths: Counter[str] = field(default_factory=Counter)
    quarantined: set[str] = field(default_factory=set)
    instance: Instance | None = None
    # By backend and what was asked for; and the folder of what was prepared.
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)
    cache: str = ""

    @property
    def digest(self) -> str:
        return self.stored.digest

    @property
    def fd(self) -> int:
        return self.stored.fd

    @property
    def label(self) -> str:
        """How logs and errors name it: not by a name that only one of its users knows."""
        if self.resident_name:
            return self.resident_name

        names = next(iter(self.users.values())) if len(self.users) == 1 else []
        return names[0] if names else self.digest[:12]

    @property
    def resident(self) -> bool:
        return bool(self.resident_name)

    def add_name(self, name: str | None, uid: int) -> None:
        names = self.users.setdefault(uid, [])
        if name:
            if name in names:
                names.remove(name)

            names.append(name)
            del names[:-NAMES_PER_USER]

    def visible_to(self, uid: int) -> bool:
        return uid == 0 or self.resident or uid in self.users

    def sessions_of(self, uid: int) -> int:
        """How many sessions this user has; of all users for root."""
        return self.sessions.total() if uid == 0 else self.sessions[uid]

    def forgive(self, group: str) -> None:
        """Ends a group's quarantine, on the CPU and on every device."""
        self._forgive(lambda words: words[0] == group)

    def forgive_on(self, backend: str) -> None:
        """Ends the quarantines on one device's backend: it has another driver now."""
        self._forgive(lambda words: words[1:] == [backend])

    def _forgive(self, meant: Callable[[list[str]], bool]) -> None:
        for key in [key for key in self.quarantined if meant(key.split())]:
            self.quarantined.discard(key)

        for key in [key for key in self.deaths if meant(key.split())]:
            del self.deaths[key]

    def identity_of(self, backend: str, precision: int) -> Mapping[str, str] | None:
        """The device and driver with which a pair was prepared and checked; None where there is
        no such pair."""
        for pair in self.pairs.values():
            if (pair.backend, pair.number) == (backend, precision) and pair.ready:
                return pair.identity

        return None

    def _status_for(self, uid: int) -> str:
        bad = self.quarantined if uid == 0 else self.quarantined & {str(uid), "shared"}
        return "quarantined" if bad else self.status

    def backend_states(self) -> dict[str, str]:
        """One word for each backend: ready where one of its pairs is."""
        states = dict(self.backends)
        for pair in self.pairs.values():
            if states.get(pair.backend) != "ready":
                states[pair.backend] = pair.state

        return states

    def to_json(self, uid: int) -> dict[str, Any]:
        return {
            "model": self.digest,
            "name": names[-1] if (names := self.users.get(uid)) else self.label,
            "size_bytes": self.stored.size_bytes,
            "storage": self.stored.storage,
            "owner_uid": uid if uid in self.users else min(self.users, default=os.geteuid()),
            "resident": self.resident,
            "status": self._status_for(uid),
            "inputs": [worker.spec_to_json(spec) for spec in self.inputs],
            "outputs": [worker.spec_to_json(spec) for spec in self.outputs],
            "names": self.names,
            "state": self.state,
            "operators": self.operators,
            "backends": self.backend_states(),
            "pairs": [pair.to_json() for pair in self.pairs.values()],
            "run_us": self.run_us,
            "sessions": self.sessions_of(uid),
            "timeline": [
                {"name": name, "start_us": start, "duration_us": duration}
                for name, start, duration in self.timeline
            ],
        }


def check_shapes(model: Model, shapes: Shapes) -> None:
    """Only dimensions that are -1 in the signature may be chosen.

    :raises BadShape: a name is unknown, or a fixed dimension would change.
    """
    specs = {spec.name: spec for spec in model.inputs}
    for name, shape in shapes.items():
        spec = specs.get(name)
        if spec is None:
            raise BadShape(f"model {model.label} has no input {name[:140]!r}")

        check_shape(name, shape, spec.signature)
