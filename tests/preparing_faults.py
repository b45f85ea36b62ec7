"""Daemons whose NPU is the test delegate, for tests of what goes wrong behind a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import native_build
from daemon_process import DaemonProcess

from switchgear.client import Client, connect
from switchgear.client.models import BackendStatus

ENABLED = {"SWITCHGEAR_PREPARE__ENABLED": "true"}


@contextmanager
def npu_daemon(
    more: str = "", *, delegate: Path | None = None, **options: str
) -> Iterator[tuple[DaemonProcess, Client]]:
    """`more` is added to the configuration; `options` are the delegate's."""
    rows = "\n".join(f'{name} = "{value}"' for name, value in options.items())
    config = f"""
[prepare]
backends = ["npu"]
[routing]
policy = "prefer_npu"
[npu]
delegate = "{delegate or native_build.delegate()}"
[npu.delegate_options]
{rows}
{more}
"""
    with (
        DaemonProcess(config=config, environment=ENABLED) as process,
        connect(process.socket) as client,
    ):
        yield process, client


@contextmanager
def device_daemon(
    folder: Path, backend: str = "opencl", **variables: str
) -> Iterator[tuple[DaemonProcess, Client]]:
    """On a real driver; `folder` is its sysfs. `variables` are added to its environment."""
    config = f'[prepare]\nbackends = ["{backend}"]\n[thermal]\nsysfs_root = "{folder}"\n'
    with (
        DaemonProcess(config=config, environment={**ENABLED, **variables}) as process,
        connect(process.socket) as client,
    ):
        yield process, client


def backend_row(client: Client, name: str = "npu") -> BackendStatus:
    return next(row for row in client.status()["backends"] if row["name"] == name)


def pair_state(client: Client) -> str:
    """Of the one pair of the model `net`."""
    (pair,) = client.describe("net").pairs
    return pair.state


def until(condition: Callable[[], Any]) -> Any:
    """Waits for what the daemon tells of no other way; the test's own limit bounds it."""
    while not (found := condition()):
        time.sleep(0.02)

    return found


def workers(client: Client, backend: str = "npu") -> list[dict[str, Any]]:
    rows = client.status()["workers"]
    return [dict(row) for row in rows if row["backend"] == backend and row["pid"]]
