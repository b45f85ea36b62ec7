"""The client for asyncio: the same names as `switchgear.client`; what may wait is a coroutine.

Without I/O, and so plain: `Session.reset`, `Slot.close` and all properties.
"""

from switchgear.client.aio.client import Client, connect
from switchgear.client.aio.session import Request, Session, Slot
from switchgear.client.events import SessionEvent
from switchgear.client.result import Result

__all__ = ["Client", "Request", "Result", "Session", "SessionEvent", "Slot", "connect"]
