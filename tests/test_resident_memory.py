"""A child's memory is known as long as it lives, and whether or not /proc shows it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from switchgear.daemon.resident_memory import ResidentMemory

HOLDS_MIB = 64
# Not dumpable, as a worker is, then some memory that it has written to.
CHILD = f"""
import sys
from switchgear.ipc.process import set_not_dumpable
set_not_dumpable()
print(flush=True)
sys.stdin.readline()
kept = bytearray({HOLDS_MIB} << 20)
kept[::4096] = bytes(len(kept[::4096])).replace(b"\\0", b"x")
print(flush=True)
sys.stdin.readline()
"""


def test_it_follows_a_child_to_its_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        memory = ResidentMemory(child.pid)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = memory.mib()
        assert 1 < before < 1000
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert memory.mib() - before == pytest.approx(HOLDS_MIB, abs=8)
        child.stdin.close()
        assert child.wait() == 0

    assert memory.mib() == 0.0
    memory.close()
    memory.close()
    assert memory.mib() == 0.0


def test_a_process_that_is_not_there_has_none() -> None:
    memory = ResidentMemory(2**22 + 1)
    assert memory.mib() == 0.0
    memory.close()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts /proc anew: needs root")
def test_a_proc_that_hides_it() -> None:
    """In a mount namespace of its own, as a user to whom /proc shows only its own."""
    code = """
import ctypes, os
from switchgear.daemon.resident_memory import ResidentMemory
from switchgear.ipc.process import set_not_dumpable

# Not of root's group either, which sees all of them.
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
# The change of the user has cleared it.
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
(to_child, go), (told, to_parent) = os.pipe(), os.pipe()
child = os.fork()
if not child:
    os.read(to_child, 1)
    set_not_dumpable()
    os.write(to_parent, b"x")
    os.read(to_child, 1)
    os._exit(0)

memory = ResidentMemory(child)
os.write(go, b"x")
os.read(told, 1)
try:
    open(f"/proc/{child}/statm").close()
    print("shown", end=" ")
except OSError:
    print("hidden", end=" ")

print(memory.mib() > 1)
os.write(go, b"x")
os.waitpid(child, 0)
"""
    script = 'mount -t proc -o hidepid=invisible proc /proc && exec "$0" -c "$1"'
    found = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script, sys.executable, code],
        capture_output=True,
        text=True,
    )
    if "mount:" in found.stderr or "unshare:" in found.stderr:
        pytest.skip(f"no /proc of its own here: {found.stderr.strip()}")

    assert found.stdout.split() == ["hidden", "True"], found.stderr
