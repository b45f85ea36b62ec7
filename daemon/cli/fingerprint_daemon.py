"""The fingerprint through a daemon that runs: what `switchgear fingerprint` asks it for."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from switchgear.client.control import Control
from switchgear.client.paths import default_socket
from switchgear.client.wire import INTERFACE, error_of
from switchgear.ipc.errors import NotRunning, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from switchgear.fingerprints.profile import Profile

_ANSWER_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Known:
    """What the daemon knows. `profile` is None before a first measurement; `stale` has the
    tests that are out of date, each with why."""

    profile: Profile | None
    stale: dict[str, list[str]]
    measuring: bool
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Measured:
    """How a run ended: the tests that were measured with why, and whether it was stored."""

    measured: dict[str, list[str]]
    saved: bool
    problems: list[str]


class Daemon:
    """A daemon that answers; its connection is the caller's. Methods block.

    They raise `SwitchgearError`: what the daemon answered, or that it went away.
    """

    def __init__(self, path: str, control: Control) -> None:
        self.path = path
        self._control = control

    def known(self) -> Known:
        """Raises `ProtocolError` when the daemon's profile is of another schema."""
        from switchgear.fingerprints.profile import Profile

        said = self._call("GetFingerprint")
        content = said.get("fingerprint")
        try:
            profile = content and Profile.model_validate_json(json.dumps(content))
            return Known(profile, said["stale"], said["measuring"], said["problems"])
        except (ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ProtocolError(f"the daemon's profile cannot be read: {reason}") from None

    def run(
        self,
        *,
        quick: bool,
        force: bool,
        tests: Sequence[str],
        progress: Callable[[str, float], None],
    ) -> Measured:
        """Has the daemon measure and waits for it; `progress` hears what it does and the share
        of the whole that is done.

        Interrupted, it cancels the daemon's run, unless that had begun before.
        """
        before = {job["job"] for job in self._call("GetStatus")["jobs"]}
        parameters: dict[str, object] = {"force": force, "tests": list(tests)}
        if quick:
            parameters["quick"] = True

        job = self._call("RunFingerprint", **parameters)["job"]
        try:
            said = self._follow(job, progress)
        except KeyboardInterrupt:
            if job not in before:
                with closing(Control(self.path, _ANSWER_LIMIT_S)) as other:
                    other.call("CancelJob", {"job": job}, timeout_s=_ANSWER_LIMIT_S)

            raise

        if said["state"] != "done":
            name = said.get("error") or f"{INTERFACE}.InternalError"
            raise error_of(name, said.get("parameters") or {})

        result = said["result"]
        return Measured(result["measured"], result["saved"], result["problems"])

    def _follow(self, job: int, progress: Callable[[str, float], None]) -> dict[str, Any]:
        reply = self._control.call("WatchJob", {"job": job}, more=True)
        while reply.continues:
            said = reply.parameters
            progress(said["phase"], said["done"] / (said["total"] or 1))
            reply = self._control.next()

        return reply.parameters

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        reply = self._control.call(method, parameters, timeout_s=_ANSWER_LIMIT_S)
        return reply.parameters


@contextmanager
def reached(socket: str | None) -> Iterator[Daemon | None]:
    """The daemon on that socket, or on the usual one; None when none answers.

    Raises `PermissionDenied` when this user may not connect.
    """
    path = socket or default_socket()
    try:
        control = Control(path, _ANSWER_LIMIT_S)
    except NotRunning:
        yield None
        return

    with closing(control):
        yield Daemon(path, control)
