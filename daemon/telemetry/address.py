"""Where the metrics endpoint listens: a loopback port or a Unix socket."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNIX: Final = "unix:"
# sun_path has 108 bytes, the last one a NUL.
MAX_PATH_BYTES: Final = 107


@dataclass(frozen=True, slots=True)
class Address:
    """Either a `path`, or a `host` (an address, not a name) and a `port`; port 0 is a free
    one."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def text(self) -> str:
        if self.path is not None:
            return f"{UNIX}{self.path}"

        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"


def parse_address(text: str) -> Address:
    """`127.0.0.1:9464`, `[::1]:9464`, `localhost:9464` or `unix:/run/switchgear/metrics.sock`.

    :raises ValueError: it is none of these, or reachable from other machines.
    """
    if text.startswith(UNIX):
        path = Path(text.removeprefix(UNIX))
        if not path.is_absolute() or len(bytes(path)) > MAX_PATH_BYTES:
            raise ValueError(
                f"{text!r} needs an absolute path of at most {MAX_PATH_BYTES} bytes"
            )

        return Address(path=path)

    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is neither ADDRESS:PORT nor unix:/PATH")

    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is no address; 127.0.0.1, [::1] or localhost is") from None

    if not address.is_loopback:
        raise ValueError(
            f"{host} can be reached from other machines, and metrics name models: "
            "listen on 127.0.0.1 or unix:/PATH and forward from there"
        )

    return Address(host=host, port=int(port))


def check_address(text: str) -> str:
    """The text itself, when it is empty or an address.

    :raises ValueError: it is neither.
    """
    if text:
        parse_address(text)

    return text
