"""A session's own limits of a frame, in a real daemon: they move that session and nobody else.

The NPU has no sensor, so that slow frames alone decide and nothing is shed for heat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from npu_rig import Rig, wait_for_device
from random_frame import frame
from small_network import small_network

from switchgear.client import Client, Model, Session, connect

pytestmark = pytest.mark.engine

# In time wherever it runs: what sends a frame elsewhere is a limit, not its lateness.
DEADLINE_MS = 10_000.0
# The pace is over a session's own limit and below that of a pair that has learnt nothing (200).
SLOW_MS = 100.0
PACE_US = 110_000
PATIENT_MS = 190.0
# Whatever takes longer was held up by the machine: it is slow for every session, and counts
# once more for each time that it is over its limit.
HELD_UP_MS = 180.0
MOST_TRIES = 4
TRIP_FRAMES = 3
WHERE = ("npu", "cpu")
# So much for a frame on the CPU that only a limit brings one there.
THRIFTY = 'policy = "max_efficiency"\nbusy_w = { cpu = 1e6 }'


@contextmanager
def slow_npu(folder: Path) -> Iterator[tuple[Client, Model, Rig]]:
    rig = Rig(folder)
    # No part's: the NPU has no sensor then.
    zone = folder / "sys" / "class" / "thermal" / "thermal_zone0"
    (zone / "type").write_text("battery\n")
    config = rig.config.replace('policy = "prefer_npu"', THRIFTY)
    environment = {"SWITCHGEAR_PREPARE__ENABLED": "true"}
    with (
        DaemonProcess(config=config, environment=environment) as process,
        connect(process.socket) as client,
    ):
        client.load_model(small_network(), "net")
        model = client.prepare_model("net")
        assert wait_for_device(client, "npu")["reading"] == "none"
        yield client, model, rig


class HeldUp(Exception):
    """The NPU's frames were slower than their pace: what becomes of them says nothing."""


def in_peace(play: Callable[[Path], None], folder: Path) -> None:
    """Plays it in a new daemon until the machine lets all of its frames be in time."""
    for number in range(MOST_TRIES):
        try:
            play(folder / str(number))
        except HeldUp:
            continue

        return

    pytest.fail("the machine is too busy: frames took much longer than their pace")


def backend_of(session: Session, inputs: dict[str, Any], held_up_ms: float = HELD_UP_MS) -> str:
    """:raises HeldUp: it took longer than that on the NPU."""
    begun_s = time.monotonic()
    backend = session.run(inputs, deadline_ms=DEADLINE_MS).backend
    if backend == "npu" and (time.monotonic() - begun_s) * 1000 > held_up_ms:
        raise HeldUp

    return backend


def first_frame_there(session: Session, inputs: dict[str, Any]) -> None:
    """Its worker loads the model meanwhile. A pair's first frame in a worker never counts."""
    while backend_of(session, inputs, SLOW_MS) != "npu":
        pass


def leaves(session: Session, inputs: dict[str, Any]) -> None:
    """It stays for as many slow frames as it takes, and not for one more."""
    found = [backend_of(session, inputs) for _ in range(TRIP_FRAMES + 2)]
    assert found == ["npu"] * TRIP_FRAMES + ["cpu"] * 2


@pytest.mark.timeout(120)
def test_slow_frames_move_the_session_that_calls_them_slow(tmp_path: Path) -> None:
    in_peace(slow_frames_move_one_session, tmp_path)


def slow_frames_move_one_session(folder: Path) -> None:
    with slow_npu(folder) as (client, model, rig):
        inputs = frame(model)
        with (
            client.open_session(model, backends=WHERE) as usual,
            client.open_session(model, backends=WHERE, slow_ms=SLOW_MS) as strict,
            client.open_session(model, backends=WHERE, slow_ms=PATIENT_MS) as patient,
        ):
            for session in (usual, strict, patient):
                first_frame_there(session, inputs)

            rig.pace(PACE_US)
            leaves(strict, inputs)
            for session in (usual, patient):
                assert {backend_of(session, inputs) for _ in range(5)} == {"npu"}

            assert backend_of(strict, inputs) == "cpu"
            assert wait_for_device(client, "npu")["state"] == "normal"


@pytest.mark.slow
def test_a_session_comes_back_by_its_own_recover_limit(tmp_path: Path) -> None:
    """After the hold of two minutes, good frames and good probes; one whose frames are never
    good enough does not."""
    in_peace(a_session_comes_back, tmp_path)


def a_session_comes_back(folder: Path) -> None:
    with slow_npu(folder) as (client, model, rig):
        inputs = frame(model)
        with (
            client.open_session(
                model, backends=WHERE, slow_ms=SLOW_MS, recover_ms=100.0
            ) as back,
            client.open_session(
                model, backends=WHERE, slow_ms=SLOW_MS, recover_ms=1e-6
            ) as never,
        ):
            for session in (back, never):
                first_frame_there(session, inputs)

            rig.pace(PACE_US)
            for session in (back, never):
                leaves(session, inputs)

            rig.pace(0)
            while backend_of(back, inputs) != "npu":
                assert backend_of(never, inputs) == "cpu"
                # A second's wait for whatever happens.
                client.watch_events(lambda _: None, 1.0)

            assert backend_of(never, inputs) == "cpu"
