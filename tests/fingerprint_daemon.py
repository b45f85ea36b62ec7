"""A daemon that measures: its configuration, a stored profile for it, and its runs."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, Final

from daemon_process import DaemonProcess
from profile_helpers import reports
from raw_client import Control, message

from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.key import current_key, with_effort
from switchgear.fingerprints.measurement import TESTS
from switchgear.fingerprints.store import ProfileStore

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from switchgear.fingerprints.profile import Profile

IN_THE_BACKGROUND: Final = {"SWITCHGEAR_FINGERPRINT__ENABLED": "true"}
MEASURED_AT: Final = 1_760_000_000
# How the phases begin in which a test is due.
MEASURING: Final = tuple(f"{test}: " for test in TESTS)
# Longer than any step of a run takes, and than what runs only when idle needs to die.
_END_LIMIT_MS: Final = 45_000


def measuring_daemon(
    *,
    environment: Mapping[str, str] | None = None,
    background: bool = False,
    sysfs: os.PathLike[str] | str = "/nonexistent",
    fingerprint: str = "",
    workers: str = "",
    quick: bool = True,
) -> DaemonProcess:
    """A daemon that takes this machine for cool and quiet, whatever else runs on it.

    `fingerprint` and `workers` are further lines of those sections. `sysfs` holds the sensors.
    A run that is not `quick` lasts far longer than anybody stands still.
    """
    config = f"""
[cpu]
threads = 1
[thermal]
sysfs_root = "{sysfs}"
[workers]
{workers}
[fingerprint]
busy_share = 1
quick = {str(quick).lower()}
{fingerprint}
"""
    added = {**(IN_THE_BACKGROUND if background else {}), **(environment or {})}
    # Its test processes would get nothing beside other tests.
    return DaemonProcess(config=config, environment=added, own_session=True)


def store_profile(daemon: DaemonProcess) -> Profile:
    """Stores a profile that is up to date for this daemon, before its start; returns it."""
    key = with_effort(current_key(environment=daemon.environment), quick=True)
    profile = assemble(reports(), key=key, measured_at=MEASURED_AT)
    assert ProfileStore(daemon.state_dir).save(profile) is None
    return profile


def stored(daemon: DaemonProcess) -> Profile | None:
    return ProfileStore(daemon.state_dir).load().profile


def profile_file(daemon: DaemonProcess) -> Path:
    return ProfileStore(daemon.state_dir).path


def background_job(control: Control) -> int:
    """The run that the start began, when the stored profile was read."""
    control.call("GetFingerprint")
    (job,) = (j for j in control.call("GetStatus")["jobs"] if j["kind"] == "fingerprint")
    number: int = job["job"]
    return number


def watch(control: Control, job: int) -> Iterator[dict[str, Any]]:
    """What the job tells, to its end. The connection is of no other use before that."""
    control.send(message("WatchJob", {"job": job}, more=True))
    yield from _states(control)


def first_run(control: Control, **parameters: Any) -> Iterator[dict[str, Any]]:
    """Begins the first job of a daemon, a run, and watches it: in one write, so that nothing
    that it tells is missed. As `watch` otherwise."""
    begin = message("RunFingerprint", parameters)
    control.send(begin + message("WatchJob", {"job": 1}, more=True))
    reply, _ = control.receive()
    assert reply["parameters"] == {"job": 1}, reply
    yield from _states(control)


def _states(control: Control) -> Iterator[dict[str, Any]]:
    # What runs only when nobody else wants the CPU says nothing for long on a busy machine; the
    # test's own limit bounds it.
    control.sock.settimeout(None)
    while True:
        reply, _ = control.receive()
        assert "error" not in reply, reply
        yield reply["parameters"]
        if not reply.get("continues"):
            return


def until_phase(said: Iterator[dict[str, Any]], begin: str | tuple[str, ...]) -> dict[str, Any]:
    """The first state whose phase begins so; fails when the job ends before."""
    seen = []
    for state in said:
        seen.append(f"{state['state']}: {state['phase']}")
        if state["phase"].startswith(begin) and state["state"] == "running":
            return state

    raise AssertionError(f"no phase {begin!r}, but {seen}")


def result_of(said: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Waits for the job's end; its result."""
    last = list(said)[-1]
    assert last["state"] == "done", last
    result: dict[str, Any] = last["result"]
    return result


def measuring_processes(daemon: DaemonProcess) -> set[int]:
    """The test processes that run now."""
    return {pid for pid, line in daemon.children().items() if "fingerprints.measure" in line}


def await_end(pidfd: int) -> None:
    """Waits for the end of a process that need not be a child of this one."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(_END_LIMIT_MS), "the process goes on"
