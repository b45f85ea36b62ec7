"""Brings the switchboard up and keeps it going: sensors, ticks, probes, and what is kept."""

from __future__ import annotations

import asyncio
import json
import logging
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from switchgear.backends.atomic_file import read_bounded, write_atomically
from switchgear.daemon.protocol.machine import Protocol
from switchgear.daemon.switchboard.board import Switchboard
from switchgear.daemon.switchboard.case import CASE, Case
from switchgear.daemon.switchboard.energy import EnergyWatch
from switchgear.daemon.switchboard.probing import Prober
from switchgear.daemon.switchboard.topology import Heat, Part, heat_of, parts_of, topology_of
from switchgear.daemon.thermal.watch import ThermalWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from switchgear.daemon.config import Configuration
    from switchgear.daemon.models import Models
    from switchgear.daemon.pool import Pool
    from switchgear.daemon.protocol.answers import Event, Probe
    from switchgear.daemon.protocol.reading import Reading

# The protocol wants to hear of the time at least every 100 ms. With the CPU alone there is
# nothing that could change in between.
TICK_S: Final = 0.1
TICK_ALONE_S: Final = 1.0
FIND_LIMIT_S: Final = 5.0
# What is kept is written this long after the first change.
WRITE_AFTER_S: Final = 2.0
MAX_KEPT_BYTES: Final = 1 << 20
FILE: Final = "protocol.json"

log = logging.getLogger(__name__)


class Operation:
    """Owns the sensors' watch and, once it is up, the board. Use it on a running loop."""

    def __init__(
        self,
        configuration: Configuration,
        state_dir: Path,
        pool: Pool,
        models: Models,
        on_event: Callable[[Event], None],
    ) -> None:
        self._configuration = configuration
        self._path = state_dir / FILE
        self._pool = pool
        self._models = models
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._prober = Prober(pool, models)
        self._tick: asyncio.TimerHandle | None = None
        self._write: asyncio.TimerHandle | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self.board: Switchboard | None = None
        # Hears each reading of a device.
        self.on_reading: Callable[[str, Reading], None] = lambda *_: None
        thermal = configuration.thermal
        self.watch = ThermalWatch(
            thermal.sysfs_root,
            scales=thermal.scales,
            on_reading=self._heard,
            on_resumed=self._resumed,
            on_found=self._found,
        )
        self._identities: dict[str, Mapping[str, str]] = {}
        self._parts: dict[str, Part] = {}
        self._case = Case()
        self.energy = EnergyWatch(thermal.sysfs_root, self._is_preparing)

    async def start(self, identities: Mapping[str, Mapping[str, str]]) -> Switchboard:
        """Starts the sensors and makes the board for these backends (the CPU among them)."""
        configuration = self._configuration
        self.watch.start()
        try:
            async with asyncio.timeout(FIND_LIMIT_S):
                await self.watch.found.wait()
        except TimeoutError:
            log.warning("no list of sensors within %g s: going on without", FIND_LIMIT_S)

        self._identities = dict(identities)
        self._parts = parts_of(identities, configuration.thermal.devices)
        heats = self._heats()
        protocol = Protocol(
            None,
            topology_of(self._parts, heats),
            mode=configuration.protocol.mode,
            dry_run=configuration.protocol.dry_run,
            estimate=lambda key: self.board.estimate_ms(key) if self.board else None,
        )
        kept = await asyncio.to_thread(self._read)
        if kept is not None:
            try:
                protocol.restore(kept, monotonic())
            except ValueError as error:
                log.warning("%s: %s", self._path, error)

        board = Switchboard(
            configuration, protocol, self._parts, heats, self.watch, self._event
        )
        board.on_run = self.energy.ran
        board.energy_source = self.energy.source
        self.energy.start(self._parts)
        self.board = board
        for model in self._models.all_for(0):
            board.add_model(model)

        self._follow(heats)
        self._on_tick()
        return board

    def add_backend(self, backend: str, identity: Mapping[str, str]) -> None:
        """A backend that was absent at the start; does nothing before the board is up, or for
        one that is on it."""
        if self.board is None or backend in self.board.parts:
            return

        self._identities[backend] = identity
        self._parts = parts_of(self._identities, self._configuration.thermal.devices)
        heats = self._heats()
        part = self._parts[backend]
        self.board.add_backend(backend, part, heats[part.name])
        self.energy.add(part)
        self._follow(heats)

    async def stop(self) -> None:
        """Ends probes and the sensors' process, and writes what is kept."""
        for handle in (self._tick, self._write):
            if handle is not None:
                handle.cancel()

        self._prober.stop()
        for probe in list(self._probes):
            probe.cancel()

        self.energy.stop()
        await self.watch.stop()
        if self.board is not None:
            await asyncio.to_thread(self._write_now, self.board.protocol.snapshot(monotonic()))

    # Sensors.

    def _heats(self) -> dict[str, Heat]:
        """By the parts' names: the heat of each part with its APIs together."""
        by_name: dict[str, list[Part]] = {}
        for part in self._parts.values():
            by_name.setdefault(part.name, []).append(part)

        operator_c = self._configuration.fingerprint.thresholds_c
        return {
            name: heat_of(
                same[0],
                tuple(api for part in same for api in part.apis),
                self.watch.zones,
                operator_c,
            )
            for name, same in by_name.items()
        }

    def _follow(self, heats: Mapping[str, Heat]) -> None:
        devices = {name: heat.sensors for name, heat in heats.items()}
        self.watch.follow({**devices, **self._case.sensors(self.watch.zones)})

    def _found(self) -> None:
        if self.board is not None:
            # Zones came, went or changed: limits stay those of the start.
            heats = self._heats()
            self.board.heats.update(heats)
            self._follow(heats)
            self.board.case_headroom_c = self._case.headroom_c(self.watch.reading(CASE))

    def _heard(self, device: str, reading: Reading, now_s: float) -> None:
        if self.board is None:
            return

        if device == CASE:
            self.board.case_headroom_c = self._case.headroom_c(reading)
        else:
            self.board.heard(device, reading, now_s)
            self.on_reading(device, reading)

    def _resumed(self, now_s: float) -> None:
        if self.board is not None:
            log.info("the machine has slept: devices are probed again")
            self.board.resumed(now_s)

    # Time.

    def _on_tick(self) -> None:
        board = self.board
        if board is None:
            return

        alone = len(board.parts) <= 1
        self._tick = self._loop.call_later(TICK_ALONE_S if alone else TICK_S, self._on_tick)
        now_s = monotonic()
        lanes = self._pool.lanes()
        if self.energy.active:
            heads = [lane.head for lane in lanes]
            self.energy.tick(now_s, [head[0].place for head in heads if head is not None])

        busy = board.age(lanes, now_s)
        for probe in board.protocol.tick(now_s, busy):
            task = self._loop.create_task(self._run_probe(board, probe))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

        board.tell()

    def _is_preparing(self) -> bool:
        return bool(self._probes) or any(
            pair.state == "preparing"
            for model in self._models.all_for(0)
            for pair in model.pairs.values()
        )

    async def _run_probe(self, board: Switchboard, probe: Probe) -> None:
        good = await self._prober.run(probe)
        word = "not run" if good is None else "good" if good else "bad"
        log.info("probe of %s: %s", probe.target, word)
        board.protocol.probe_result(probe.target, probe.lease, good, monotonic())
        board.tell()

    def _event(self, event: Event) -> None:
        if self._write is None:
            self._write = self._loop.call_later(WRITE_AFTER_S, self._write_soon)

        self._on_event(event)

    # What outlives the process.

    def _write_soon(self) -> None:
        self._write = None
        if self.board is not None:
            kept = self.board.protocol.snapshot(monotonic())
            self._loop.run_in_executor(None, self._write_now, kept)

    def _write_now(self, kept: dict[str, Any]) -> None:
        try:
            write_atomically(self._path, json.dumps(kept).encode())
        except OSError as error:
            log.warning("cannot keep the protocol's state in %s: %s", self._path, error)

    def _read(self) -> dict[str, Any] | None:
        try:
            data = json.loads(read_bounded(self._path, MAX_KEPT_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is not readable: %s", self._path, error)
            return None

        return data if isinstance(data, dict) else None
