"""The client's calls about where a model runs, blocking and asyncio, beside the CPU only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemon_process import DaemonProcess

from switchgear.backends import generate
from switchgear.client import Client, aio, connect
from switchgear.ipc.errors import BadRequest, NoBackend, UnknownBackend

X = np.ones(4, np.float32)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process, connect(process.socket) as client:
        client.load_model(generate.two_inputs(), "two")
        while not client.status()["devices"]:
            pass

        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with connect(daemon.socket) as client:
        yield client


def test_without_preparing_there_is_the_cpu_only(client: Client) -> None:
    with pytest.raises(NoBackend, match=r"prepare\.enabled"):
        client.prepare_model("two")

    with client.open_session("two", backends=["vulkan"]) as session:
        result = session.run({"a": X, "b": X})
        assert (result.backend, result.reason) == ("cpu", "only_ready")


def test_a_strict_session_is_an_error_then(client: Client) -> None:
    with pytest.raises(NoBackend):
        client.open_session("two", backends=["vulkan"], strict=True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backends": ["warp"], "strict": True}, UnknownBackend),
        ({"precision": "fp8"}, BadRequest),
        ({"policy": "fastest"}, BadRequest),
        ({"slow_ms": -1.0}, BadRequest),
        ({"recover_ms": 1e12}, BadRequest),
    ],
)
def test_wrong_options(client: Client, options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        client.open_session("two", **options)


def test_explain_and_events(client: Client) -> None:
    with client.open_session("two", policy="min_power", slow_ms=50.0) as session:
        session.run({"a": X, "b": X})

    (newest,) = client.explain(1)
    assert newest["text"].startswith("cpu/auto chosen")
    heard: list[dict[str, Any]] = []
    client.watch_events(heard.append, 0.0)
    assert heard == []


def test_the_same_with_asyncio(daemon: DaemonProcess) -> None:
    async def main() -> None:
        async with await aio.connect(daemon.socket) as client:
            with pytest.raises(NoBackend):
                await client.prepare_model("two")

            async with await client.open_session(
                "two", backends=["vulkan"], policy="prefer_gpu", precision="fp16"
            ) as session:
                result = await session.run({"a": X, "b": X})
                assert result.backend == "cpu"

            (newest,) = await client.explain(1)
            assert "cpu/auto chosen" in newest["text"]
            await client.watch_events(lambda _: None, 0.0)

    asyncio.run(main())
