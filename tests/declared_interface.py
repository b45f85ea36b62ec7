"""What an application declares of `io.switchgear` for asyncvarlink.

The library reads the annotations as they are: no `from __future__ import annotations` here.
"""

from collections.abc import Iterator
from typing import Any, TypedDict

from asyncvarlink import FileDescriptor, VarlinkInterface, varlinkmethod


class Info(TypedDict):
    version: str
    pid: int
    ready: bool
    state: str
    record_version: int
    uptime_s: float


class JobState(TypedDict, total=False):
    state: str
    phase: str
    done: int
    total: int
    result: dict[str, Any] | None
    error: str | None
    parameters: dict[str, Any] | None


class Opened(TypedDict):
    session: int
    epoch: int
    slots: int
    output_slots: int
    socket: FileDescriptor
    arena: FileDescriptor
    layout: dict[str, Any]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    state: bool


class Switchgear(VarlinkInterface, name="io.switchgear"):
    """Methods are declared for their types; asyncvarlink never calls them here."""

    @varlinkmethod
    def GetInfo(self) -> Info:
        raise NotImplementedError

    @varlinkmethod(return_parameter="job")
    def LoadModel(self, *, descriptor: FileDescriptor, name: str | None = None) -> int:
        raise NotImplementedError

    @varlinkmethod(allow_foreign=True)
    def WatchJob(self, *, job: int) -> Iterator[JobState]:
        raise NotImplementedError

    @varlinkmethod(allow_foreign=True)
    def OpenSession(self, *, model: str) -> Opened:
        raise NotImplementedError
