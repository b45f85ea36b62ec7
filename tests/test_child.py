"""What the runner reads of a test process while it runs."""

from __future__ import annotations

import os
import subprocess
import sys

from switchgear.fingerprints.child import cpu_time_s, waited_for_cpu_s

SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
if sys.argv[2] == "idle":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("runs", flush=True)
while True:
    pass
"""


def spin(cpu: int, policy: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SPIN, str(cpu), policy], stdout=subprocess.PIPE, text=True
    )


def test_waiting_for_a_cpu_is_told_from_hanging() -> None:
    """Two on one CPU: the one that yields waits while the other uses the time."""
    cpu = min(os.sched_getaffinity(0))
    eager = spin(cpu, "normal")
    patient = spin(cpu, "idle")
    try:
        assert eager.stdout is not None
        assert eager.stdout.readline() == "runs\n"
        assert patient.stdout is not None
        assert patient.stdout.readline() == "runs\n"
        # Counted from here: one of them may have had the CPU for itself before.
        eager_s, patient_s = cpu_time_s(eager.pid), cpu_time_s(patient.pid)
        waited_s = waited_for_cpu_s(patient.pid)
        # Ends by itself: one of the two is always running, and the patient one waits.
        while (
            cpu_time_s(eager.pid) - eager_s < 0.3
            or waited_for_cpu_s(patient.pid) - waited_s < 0.1
        ):
            assert eager.poll() is None
            assert patient.poll() is None

        assert cpu_time_s(patient.pid) - patient_s < cpu_time_s(eager.pid) - eager_s
    finally:
        for process in (eager, patient):
            process.kill()
            process.communicate()


def test_a_process_that_is_gone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert waited_for_cpu_s(gone.pid) == 0
    assert cpu_time_s(gone.pid) == 0


def test_own_cpu_time() -> None:
    assert cpu_time_s(os.getpid()) > 0
