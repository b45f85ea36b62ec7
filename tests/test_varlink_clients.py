"""Clients that no one here wrote: PyPI's `varlink` and asyncvarlink, against a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from asyncvarlink import (
    FileDescriptor,
    VarlinkClientProtocol,
    VarlinkErrorReply,
    VarlinkInterfaceProxy,
    connect_unix_varlink,
)
from daemon_health import leaves_nothing
from daemon_process import DaemonProcess
from declared_interface import Switchgear
from raw_client import Control, RawSession, error_name, memfd

from switchgear.backends import generate
from switchgear.daemon.interface import description

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        with Control(process.socket) as control:
            control.load(generate.two_inputs(), name="two")

        yield process


def varlink_command(daemon: DaemonProcess, *arguments: str) -> str:
    """What `varlink` prints, to both ends: it exits with 0 on an error reply too."""
    result = subprocess.run(
        [sys.executable, "-m", "varlink.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    return result.stdout + result.stderr


def address(daemon: DaemonProcess, name: str = "") -> str:
    return f"unix:{daemon.socket}" + (f"/{name}" if name else "")


def test_varlink_info(daemon: DaemonProcess) -> None:
    text = varlink_command(daemon, "info", address(daemon))
    assert "Vendor: Switchgear" in text
    assert "Product: switchgear" in text
    assert "org.varlink.service" in text
    assert "io.switchgear" in text


def test_varlink_help_prints_the_interface(daemon: DaemonProcess) -> None:
    text = varlink_command(daemon, "help", address(daemon, "io.switchgear"))
    assert text.strip() == description().strip()
    text = varlink_command(daemon, "help", address(daemon, "org.varlink.service"))
    assert "method GetInterfaceDescription(interface: string)" in text


def test_varlink_call(daemon: DaemonProcess) -> None:
    text = varlink_command(daemon, "call", address(daemon, "io.switchgear.GetInfo"))
    assert json.loads(text)["pid"] == daemon.pid
    text = varlink_command(
        daemon, "call", address(daemon, "io.switchgear.DescribeModel"), '{"model": "two"}'
    )
    assert json.loads(text)["model"]["name"] == "two"


def test_varlink_call_shows_an_error(daemon: DaemonProcess) -> None:
    text = varlink_command(
        daemon, "call", address(daemon, "io.switchgear.DescribeModel"), '{"model": "none"}'
    )
    assert "io.switchgear.UnknownModel" in text
    assert "no model 'none' is loaded" in text


def test_varlink_infers(daemon: DaemonProcess) -> None:
    """What a script can do with tensors in the message."""
    model = daemon.call("DescribeModel", model="two")["parameters"]["model"]
    inputs = {
        spec["name"]: {
            "dtype": spec["dtype"],
            "shape": spec["shape"],
            "data": "AAAAAA==" if spec["capacity_bytes"] == 4 else zeros(spec),
        }
        for spec in model["inputs"]
    }
    text = varlink_command(
        daemon,
        *("call", address(daemon, "io.switchgear.Infer")),
        json.dumps({"model": "two", "inputs": inputs}),
    )
    reply = json.loads(text)
    assert reply["backend"] == "cpu"
    assert set(reply["outputs"]) == {spec["name"] for spec in model["outputs"]}


def zeros(spec: dict[str, Any]) -> str:
    import base64

    return base64.b64encode(bytes(spec["capacity_bytes"])).decode()


def test_asyncvarlink_calls_and_passes_descriptors_both_ways(daemon: DaemonProcess) -> None:
    async def use() -> None:
        transport, protocol = await connect_unix_varlink(
            VarlinkClientProtocol, str(daemon.socket)
        )
        try:
            proxy: Any = VarlinkInterfaceProxy(protocol, Switchgear)
            assert (await proxy.GetInfo())["pid"] == daemon.pid
            await load(proxy)
            with await proxy.OpenSession(model="given") as opened:
                fds = [os.dup(opened["socket"].fileno()), os.dup(opened["arena"].fileno())]
                infer({**opened, "socket": 0, "arena": 1}, fds)
        finally:
            transport.close()
            await asyncio.sleep(0)

    # The first time it loads a model, which stays.
    asyncio.run(use())
    with leaves_nothing(daemon):
        asyncio.run(use())


async def load(proxy: Any) -> None:
    fd = memfd(generate.identity((3,)))
    try:
        job = (await proxy.LoadModel(descriptor=FileDescriptor(fd), name="given"))["job"]
    finally:
        os.close(fd)

    states = [state async for state in proxy.WatchJob(job=job)]
    assert states[-1]["state"] == "done"
    assert states[-1]["result"]["name"] == "given"


def infer(opened: dict[str, Any], fds: list[int]) -> None:
    with RawSession(opened, fds) as session:
        session.write(0, [1.5, 2.5, -3.0])
        session.infer(1)
        reply = session.receive()
        assert error_name(reply) == ""
        assert session.read(reply.output_slot, 3) == [1.5, 2.5, -3.0]


def test_asyncvarlink_gets_errors(daemon: DaemonProcess) -> None:
    async def use() -> None:
        transport, protocol = await connect_unix_varlink(
            VarlinkClientProtocol, str(daemon.socket)
        )
        try:
            proxy: Any = VarlinkInterfaceProxy(protocol, Switchgear)
            with pytest.raises(VarlinkErrorReply) as caught:
                await proxy.OpenSession(model="none")

            assert caught.value.name == "io.switchgear.UnknownModel"
        finally:
            transport.close()
            await asyncio.sleep(0)

    asyncio.run(use())


def test_python_varlink_as_a_library(daemon: DaemonProcess) -> None:
    """Its client parses the interface that the daemon sends and calls by its names."""
    import varlink

    with varlink.Client.new_with_address(address(daemon)) as client:  # noqa: SIM117
        with client.open("io.switchgear", namespaced=True) as connection:
            info = connection.GetInfo()
            assert info.pid == daemon.pid
            models = connection.ListModels().models
            assert "two" in [model.name for model in models]
            with pytest.raises(varlink.VarlinkError, match="UnknownModel"):
                connection.DescribeModel("nothing")


def test_a_shell_can_speak_it(daemon: DaemonProcess) -> None:
    """No library at all: bytes and a NUL."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket))
        sock.sendall(b'{"method":"org.varlink.service.GetInfo"}\0')
        reply = b""
        while not reply.endswith(b"\0"):
            reply += sock.recv(4096)

    assert json.loads(reply[:-1])["parameters"]["interfaces"] == [
        "org.varlink.service",
        "io.switchgear",
    ]
