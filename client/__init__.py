"""What an app imports: `connect()`, sessions and results. Standard library only; tensors are
numpy arrays where numpy can be imported. `switchgear.client.aio` is the same for asyncio."""

from switchgear.client.events import SessionEvent
from switchgear.client.models import Info, LoadStep, Model, Pair, Progress, Status, Tensor
from switchgear.client.paths import default_socket
from switchgear.client.result import Result
from switchgear.client.session import Request, Session, Slot
from switchgear.client.sync import Client, connect
from switchgear.ipc import errors
from switchgear.ipc.errors import SwitchgearError

__all__ = [
    "Client",
    "Info",
    "LoadStep",
    "Model",
    "Pair",
    "Progress",
    "Request",
    "Result",
    "Session",
    "SessionEvent",
    "Slot",
    "Status",
    "SwitchgearError",
    "Tensor",
    "connect",
    "default_socket",
    "errors",
]
