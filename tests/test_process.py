"""Hardening of a process: tried with two real processes of one unprivileged user."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from pathlib import Path

import pytest

from switchgear.ipc import process

NOBODY = 65534
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PTRACE_TRACEME = 0


def in_child(work: object) -> int:
    """Runs `work` in a forked child; its exit status, or the negative signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(int(work()))  # type: ignore[operator]
        except BaseException:
            os._exit(99)

    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def opened_by_a_sibling(harden: bool) -> bool:
    """Whether a process of the same user can open another's memfd through /proc."""
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(NOBODY)
        # Changing the user has cleared the flag; an ordinary process has it set.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        fd = os.memfd_create("secret")
        if harden:
            process.set_not_dumpable()

        os.write(ready_write, bytes([fd]))
        os.read(end_read, 1)
        os._exit(0)

    fd = os.read(ready_read, 1)[0]

    def look() -> int:
        os.setuid(NOBODY)
        try:
            os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
        except PermissionError:
            return 1

        return 0

    status = in_child(look)
    os.write(end_write, b"x")
    os.waitpid(pid, 0)
    for pipe in (ready_read, ready_write, end_read, end_write):
        os.close(pipe)

    assert status in (0, 1)
    return status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the user takes root")
def test_a_traced_process_stays_open_to_its_tracer() -> None:
    def traced() -> int:
        libc = ctypes.CDLL(None)
        assert libc.ptrace(PTRACE_TRACEME, 0, None, None) == 0
        process.set_not_dumpable()
        return int(libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))

    assert in_child(traced) == 1


def test_set_not_dumpable_keeps_the_same_user_out() -> None:
    assert opened_by_a_sibling(harden=False)
    assert not opened_by_a_sibling(harden=True)


def test_die_with_parent_ends_the_child() -> None:
    """A grandchild asks for it; its parent is killed; it ends by SIGKILL."""
    read, write = os.pipe()

    def parent() -> int:
        pid = os.fork()
        if pid == 0:
            process.die_with_parent(os.getppid())
            os.write(write, os.getpid().to_bytes(4, "little"))
            signal.pause()

        signal.pause()
        return 0

    pid = os.fork()
    if pid == 0:
        os._exit(parent())

    grandchild = int.from_bytes(os.read(read, 4), "little")
    pidfd = os.pidfd_open(grandchild)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    ready, _, _ = select.select([pidfd], [], [], 10)
    assert ready
    for fd in (read, write, pidfd):
        os.close(fd)


def test_die_with_parent_exits_when_the_parent_is_gone_already() -> None:
    def work() -> int:
        process.die_with_parent(os.getppid() + 1_000_000)
        return 0

    assert in_child(work) == 1


def test_raise_descriptor_limit() -> None:
    def work() -> int:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        process.raise_descriptor_limit()
        return int(resource.getrlimit(resource.RLIMIT_NOFILE) != (hard, hard))

    assert in_child(work) == 0


def test_rss_is_that_of_the_process() -> None:
    before = process.rss_mb()
    assert 5 < before < 2000
    kept = bytearray(b"x") * (96 << 20)
    assert process.rss_mb() - before > 64
    assert kept[-1] == ord("x")


def test_a_process_gives_way_for_memory_and_takes_nothing_back() -> None:
    score = Path("/proc/self/oom_score_adj")

    def work() -> int:
        process.give_way_for_memory(300)
        given = int(score.read_text())
        process.give_way_for_memory(200)
        return int(given < 300 or int(score.read_text()) != given)

    assert in_child(work) == 0
