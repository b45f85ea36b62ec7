"""Why a worker could not do something, as it said so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from switchgear.ipc.errors import BackendFailed, SwitchgearError, error_from_code

if TYPE_CHECKING:
    from switchgear.ipc import worker


@dataclass(frozen=True, slots=True)
class Failure:
    """Domain, code, name and text."""

    domain: str
    code: int
    name: str
    text: str

    @classmethod
    def from_packet(cls, packet: worker.Packet) -> Failure:
        return cls(
            str(packet.get("domain")),
            int(packet.get("code", 0)),
            str(packet.get("name")),
            str(packet.get("text")),
        )

    def to_error(self, subject: str) -> SwitchgearError:
        """The error that a client gets for it."""
        if self.domain == "switchgear":
            return error_from_code(self.code, f"{subject}: {self.text}")

        return BackendFailed(
            f"{subject}: {self.text}",
            domain=self.domain,
            driver_code=self.code,
            driver_name=self.name,
        )
