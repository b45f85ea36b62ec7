"""The daemon's metrics: what counts them, where they come from, and their text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from switchgear.daemon.telemetry import exposition, service_families
from switchgear.daemon.telemetry.address import parse_address
from switchgear.daemon.telemetry.endpoint import Endpoint
from switchgear.daemon.telemetry.families import Family, Source
from switchgear.daemon.telemetry.requests import RequestCounts
from switchgear.daemon.telemetry.switchboard_source import SwitchboardSource
from switchgear.daemon.telemetry.tracing import Tracing
from switchgear.ipc.errors import SwitchgearError

if TYPE_CHECKING:
    from switchgear.daemon.service import Service

# A scrape gives the loop its turn back after this long: a frame waits no longer for it.
TURN_NS: Final = 200_000

log = logging.getLogger(__name__)


class Metrics:
    """`requests` is told of each reply, `tracing` streams them to who asks. `sources` may be
    added to by whoever has more to tell (`device_families`); each is asked at every scrape, on
    the loop, and must not block. `problems` says in a sentence why the configured endpoint is
    not there."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.requests = RequestCounts()
        self.tracing = Tracing(service, self.requests.recorder)
        self.switchboard = SwitchboardSource(service, self.requests.recorder)
        self.tracing.counters.append(self.switchboard.counters)
        self.problems: list[str] = []
        self._endpoint: Endpoint | None = None
        self.sources: list[Source] = [
            lambda viewer: service_families.collect(service, viewer),
            self.switchboard.families,
        ]

    def families(self, viewer: int | None) -> Iterator[Family]:
        """All families for a user; None: for whoever can reach the configured endpoint.

        Ordinary users see the names of models that they may use; all others' count under
        `other`. Operators (root and the daemon's own user) see all.
        """
        service = self._service
        cut = 0
        if viewer is None or service.is_operator(viewer):
            requests = self.requests.families(None)
        else:
            names = {model.digest: model.label for model in service.models.all_for(viewer)}
            requests = self.requests.families(names.get)

        for family in requests:
            cut += family.cut
            yield family

        for source in self.sources:
            for family in source(viewer):
                cut += family.cut
                yield family

        total = Family(
            "switchgear_metrics_cut",
            "gauge",
            "Samples of this answer that had no room in it.",
        )
        total.set(cut)
        yield total

    async def text(self, viewer: int | None) -> str:
        """The Prometheus text; takes turns with the loop's other work."""
        parts = []
        until_ns = monotonic_ns() + TURN_NS
        for part in exposition.render(self.families(viewer)):
            parts.append(part)
            if monotonic_ns() > until_ns:
                await asyncio.sleep(0)
                until_ns = monotonic_ns() + TURN_NS

        return "".join(parts)

    async def open(self, listen: str) -> None:
        """Opens the endpoint that the configuration names, if any. Where that fails the daemon
        serves all the same, and says so."""
        if not listen:
            return

        endpoint = Endpoint(parse_address(listen), self._text_for_all)
        try:
            address = await endpoint.open()
        except (OSError, SwitchgearError) as error:
            endpoint.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.problems.append(f"metrics.listen: {listen}: {reason}")
            log.error("no metrics on %s: %s", listen, reason)
            return

        self._endpoint = endpoint
        log.info("metrics on %s", address.text)

    async def _text_for_all(self) -> str:
        return await self.text(None)

    def close(self) -> None:
        """Closes the endpoint; does not wait."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
