"""Workers that die with a request in them, however slowly the test itself runs."""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Any

from held_worker import held
from raw_client import error_name

if TYPE_CHECKING:
    import signal

    from raw_client import Control, RawSession

    from switchgear.ipc.record import Record


def interactive(control: Control) -> dict[str, Any]:
    """The status of the one interactive worker on the CPU that this user sees."""
    (row,) = (w for w in control.call("GetStatus")["workers"] if w["lane"] == "interactive")
    return dict(row)


def ready_pid(control: Control) -> int:
    """The pid of the worker that serves, as soon as there is one that is ready."""
    while (row := interactive(control))["state"] != "ready":
        pass

    pid: int = row["pid"]
    return pid


def until_gone(control: Control, pid: int) -> None:
    """Waits until the daemon has noticed the end of a worker."""
    while interactive(control)["pid"] == pid:
        pass


def killed_in_a_run(control: Control, session: RawSession, number: signal.Signals) -> bool:
    """Sends a signal that ends it to the worker that runs what the session waits for. False
    where an answer came first: nobody is killed then.

    The worker is stopped before the last look: a test that stands still between its look and
    its signal would kill a worker that has answered meanwhile.
    """
    while not (row := interactive(control))["running"]:
        if session.has_answer:
            return False

    pid = row["pid"]
    with held(pid):
        # The daemon has passed on what the worker had answered once it answers a call that came
        # later; the first of these it may read in the same turn.
        for _ in range(2):
            interactive(control)

        in_time = not session.has_answer
        if in_time:
            # Before it goes on: it does not get back to its run.
            os.kill(pid, number)

    if in_time:
        until_gone(control, pid)

    return in_time


def lost_twice(control: Control, session: RawSession, number: signal.Signals) -> Record:
    """The answer to a request whose two workers were killed; what is answered before is sent
    again. It uses the slots 0."""
    for request_id in count(1):
        session.infer(request_id, 0, 0)
        if all(killed_in_a_run(control, session, number) for _ in range(2)):
            break

        assert error_name(session.receive()) == ""

    return session.receive()


def lost_four_times(
    control: Control, session: RawSession, number: signal.Signals
) -> tuple[str, str]:
    """The errors of two requests in a row that lost two workers each. An answer between them
    would end the memory of deaths: then it begins again."""
    while True:
        first = lost_twice(control, session, number)
        session.infer(1, 0, 0)
        if all(killed_in_a_run(control, session, number) for _ in range(2)):
            return error_name(first), error_name(session.receive())

        assert error_name(session.receive()) == ""
