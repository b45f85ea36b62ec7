"""The endpoint's bounds: what a hostile or a broken client gets, and that others are served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from http_helpers import Answer, ask, get, open_socket, parse_answer, read_all

from switchgear.daemon import config
from switchgear.daemon.telemetry import endpoint as endpoint_module
from switchgear.daemon.telemetry.address import Address, parse_address
from switchgear.daemon.telemetry.endpoint import MAX_CONNECTIONS, MAX_HEAD_BYTES, Endpoint
from switchgear.ipc.errors import BadConfiguration, SwitchgearError

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = "a_metric 1\n"


class Served:
    """An endpoint on a loop in a thread of its own; `text` may be replaced by a test."""

    def __init__(self, address: Address) -> None:
        self.text = BODY
        self._wanted = address
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self.endpoint: Endpoint | None = None
        self.at: tuple[str, int] | Path = Path()

    async def _answer(self) -> str:
        if self.text == "fault":
            raise ValueError("no text today")

        return self.text

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()

    async def _open(self) -> None:
        self.endpoint = Endpoint(self._wanted, self._answer)
        address = await self.endpoint.open()
        self.at = address.path or (address.host, address.port)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.endpoint is not None
        self._loop.call_soon_threadsafe(self.endpoint.close)
        # Transports that were closed say so in the next turns.
        for _turn in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(10)

        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(parse_address("127.0.0.1:0")) as running:
        yield running


def test_a_scrape(served: Served) -> None:
    answer = get(served.at)
    assert (answer.status, answer.body) == (200, BODY)
    assert answer.fields["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.fields["content-length"] == str(len(BODY))
    assert answer.fields["connection"] == "close"
    head = ask(served.at, "HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (head.status, head.body) == (200, "")
    assert head.fields["content-length"] == str(len(BODY))
    assert get(served.at, "/metrics?collect=all").status == 200
    assert ask(served.at, "GET /metrics HTTP/1.0\r\n\r\n").status == 200


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody", 405),
        ("GET /metrics HTTP/1.1\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        ("GET /metrics HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        ("GET  /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("\x16\x03\x01\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nno colon here\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        ("GET /metrics HTTP/1.1\r\nHost: evil.example:9464\r\n\r\n", 403),
        ("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\n\r\n", 200),
        ("GET /metrics HTTP/1.1\r\nHost: [::1]:9464\r\n\r\n", 200),
        ("GET /metrics HTTP/1.1\r\nX: " + "x" * MAX_HEAD_BYTES + "\r\n\r\n", 431),
        ("x" * (MAX_HEAD_BYTES + 1), 431),
    ],
)
def test_each_request_has_its_answer(served: Served, request_text: str, status: int) -> None:
    assert ask(served.at, request_text).status == status
    assert get(served.at).status == 200


def test_bytes_that_are_no_text(served: Served) -> None:
    assert ask(served.at, b"\xff\xfe /metrics HTTP/1.1\r\n\r\n").status == 400


def test_a_request_in_small_pieces(served: Served) -> None:
    with open_socket(served.at) as sock:
        for byte in b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n":
            sock.sendall(bytes([byte]))

        assert parse_answer(read_all(sock)).status == 200


def test_a_second_request_of_a_connection_is_not_read(served: Served) -> None:
    one = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = ask(served.at, one * 3)
    assert (answer.status, answer.body) == (200, BODY)


def test_a_fault_is_no_silence(served: Served) -> None:
    served.text = "fault"
    assert get(served.at).status == 500
    served.text = BODY
    assert get(served.at).status == 200


def refused(address: tuple[str, int] | Path) -> bool:
    """Whether there is no room; its end may come before the request was read."""
    try:
        with open_socket(address) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            data = read_all(sock)
    except ConnectionError:
        return True

    # Without a byte of an answer it was over its time.
    return not data or parse_answer(data).status == 503


def test_connections_are_few(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    # None of those that say nothing is dropped for it.
    monkeypatch.setattr(endpoint_module, "EXCHANGE_LIMIT_S", 600.0)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(open_socket(served.at))

        # They say nothing, and are taken in their order: the next one is beyond the bound.
        with open_socket(served.at) as one_more:
            assert parse_answer(read_all(one_more)).status == 503

    # All that was open is closed: the first one that is free serves.
    while refused(served.at):
        pass


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "EXCHANGE_LIMIT_S", 0.1)
    with Served(parse_address("127.0.0.1:0")) as served, open_socket(served.at) as silent:
        assert silent.recv(1) == b""


def test_who_reads_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "EXCHANGE_LIMIT_S", 1.0)
    monkeypatch.setattr(endpoint_module, "MAX_CONNECTIONS", 2)
    with Served(parse_address("127.0.0.1:0")) as served:
        while True:
            with contextlib.ExitStack() as stack:
                # More than the kernel takes for somebody who does not read.
                served.text = "x" * (16 << 20)
                for _ in range(2):
                    deaf = stack.enter_context(open_socket(served.at))
                    deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")

                with open_socket(served.at) as third:
                    said = read_all(third)

                if said:
                    assert parse_answer(said).status == 503
                    served.text = BODY
                    while refused(served.at):
                        pass

                    break

            # The two were over their time before the third one came: once more.


def test_on_a_unix_socket(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Served(Address(path=folder / "metrics.sock")) as served:
        assert get(served.at, host="any").status == 200
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "metrics.sock").stat().st_mode & 0o777 == 0o660

    assert not (folder / "metrics.sock").exists()


def test_a_taken_port_and_a_taken_path_are_errors(tmp_path: Path) -> None:
    async def open_again(address: Address) -> None:
        endpoint = Endpoint(address, asyncio.Queue[str]().get)
        try:
            await endpoint.open()
        finally:
            endpoint.close()

    with Served(parse_address("127.0.0.1:0")) as served:
        assert isinstance(served.at, tuple)
        with pytest.raises(OSError, match="in use"):
            asyncio.run(open_again(Address(host=served.at[0], port=served.at[1])))

    with Served(Address(path=tmp_path / "run" / "m.sock")) as served:
        with pytest.raises(SwitchgearError):
            asyncio.run(open_again(Address(path=tmp_path / "run" / "m.sock")))

        assert get(served.at).status == 200


@pytest.mark.parametrize(
    "text", ["127.0.0.1:9464", "[::1]:9464", "localhost:0", "unix:/run/switchgear/m.sock"]
)
def test_addresses_that_are_good(text: str) -> None:
    configuration = config.load(None, {"SWITCHGEAR_METRICS__LISTEN": f'"{text}"'})
    assert configuration.metrics.listen == text
    address = parse_address(text)
    assert address.path is None or address.path.is_absolute()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.0.0.0:9464", "other machines"),
        ("[::]:9464", "other machines"),
        ("192.0.2.1:9464", "other machines"),
        ("host.example:9464", "no address"),
        ("127.0.0.1", "neither"),
        ("127.0.0.1:65536", "neither"),
        ("127.0.0.1:²", "neither"),
        ("unix:metrics.sock", "absolute"),
        ("unix:/" + "x" * 200, "107 bytes"),
    ],
)
def test_addresses_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(BadConfiguration, match=f"metrics.listen: .*{reason}"):
        config.load(None, {"SWITCHGEAR_METRICS__LISTEN": f'"{text}"'})


def test_the_answer_is_complete_for_a_slow_reader(served: Served) -> None:
    served.text = "y" * (1 << 20)
    answer: Answer = get(served.at)
    assert len(answer.body) == 1 << 20
