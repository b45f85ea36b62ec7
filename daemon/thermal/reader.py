"""The sensor reader: a process of its own, so that a read that hangs blocks nobody else.

It needs the standard library alone (and psutil where that is installed). It sends what it reads
over its socket and drops it where nobody takes it: only the newest counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.daemon.thermal import zones
from switchgear.daemon.thermal.poller import Poller, eventfd_wake
from switchgear.daemon.thermal.psutil_source import psutil_source
from switchgear.daemon.thermal.reader_packets import (
    MAX_PACKET_BYTES,
    pack_samples,
    pack_zones,
    unpack_orders,
)
from switchgear.ipc.process import begin_child

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from switchgear.daemon.thermal.reader_packets import Sample
    from switchgear.fingerprints.zones_model import Reading

# The daemon takes silence for a hang.
HEARTBEAT_S: Final = 0.5
_MILLISECONDS: Final = 1000


class Source:
    """Where sensors are found and read: sysfs, then psutil where it has more.

    psutil reads the machine's own sysfs only: another root is left alone.
    """

    def __init__(self, root: Path, scales: Mapping[str, float]) -> None:
        self._root = root
        self._scales = scales
        self._second = psutil_source() if root == zones.SYSFS_ROOT else None

    def find(self) -> zones.Sensors:
        found = zones.find_sensors(self._root, self._scales)
        return found if self._second is None else self._second.add(found)

    def read(self, sensor: zones.Sensor) -> Reading:
        if self._second is not None:
            reading = self._second.read(sensor)
            if reading is not None:
                return reading

        return zones.read_sensor(sensor)


class Reader:
    """Serves one daemon over its socket until that closes."""

    def __init__(self, connection: socket.socket, source: Source) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._wake_fd, wake = eventfd_wake()
        self._poller = Poller(source.find, source.read, wake)
        self._sent_s = float("-inf")
        # A list of sensors that the socket had no room for.
        self._unsent = False

    def run(self) -> None:
        """Until the daemon's end of the socket is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            wait_s = min(self._poller.wait_s(), HEARTBEAT_S)
            # Rounded up: to wake a little early would only mean to wait again.
            ready = poll.poll(int(wait_s * _MILLISECONDS) + 1 if wait_s > 0 else 0)
            for descriptor, _ in ready:
                if descriptor == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                elif not self._take_orders():
                    return

            changed, samples = self._poller.work()
            self._unsent |= changed
            if self._unsent:
                self._unsent = not self._send_zones()

            if samples or time.monotonic() >= self._sent_s + HEARTBEAT_S:
                self._send_samples(samples)

    def _take_orders(self) -> bool:
        """False at the end of the connection."""
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False

        if not packet:
            return False

        limits_mc, find = unpack_orders(packet)
        self._poller.use(limits_mc, find=find)
        # Whoever asks to look anew may have lost the last list.
        self._unsent |= find
        return True

    def _send_zones(self) -> bool:
        found = self._poller.sensors
        if found is None:
            return True

        return self._send(pack_zones(self._poller.generation, found.zones, found.problems))

    def _send_samples(self, samples: Sequence[Sample]) -> None:
        boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        monotonic_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._sent_s = monotonic_ns / 1e9
        self._send(pack_samples(self._poller.generation, monotonic_ns, boottime_ns, samples))

    def _send(self, packet: bytes) -> bool:
        try:
            self._socket.send(packet)
        except OSError:
            # No room, or no peer: the next reading is newer anyway.
            return False

        return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Started by the daemon; `--fd` is its end of a SOCK_SEQPACKET pair."""
    parser = argparse.ArgumentParser(prog="switchgear-sensors", description=__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--root", type=Path, default=zones.SYSFS_ROOT)
    parser.add_argument("--scales", default="{}", help="JSON: factor to millidegrees by type")
    options = parser.parse_args(arguments)
    begin_child(options.parent)
    with socket.socket(fileno=options.fd) as connection:
        Reader(connection, Source(options.root, json.loads(options.scales))).run()

    # Not the interpreter's end: it would wait for a read that hangs.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
