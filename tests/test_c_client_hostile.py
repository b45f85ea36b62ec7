"""The C client against a server that breaks every rule; each run under AddressSanitizer."""

from __future__ import annotations

import array
import copy
import json
import mmap
import os
import random
import socket
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from c_client_program import Driver, DriverError, sanitized

from switchgear.ipc import arena
from switchgear.ipc.record import NO_SLOT, RECORD_BYTES, Kind, Record
from switchgear.ipc.slot import HEADER, SlotEntry, TensorSpec, pack_error, pack_header
from switchgear.ipc.worker import layout_to_json, spec_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# Nothing in it depends on the Python.
pytestmark = pytest.mark.engine

Json = dict[str, Any]
SPEC: Final = TensorSpec("x", "float32", (4,), (4,), 16)
SLOTS: Final = 2
OUTPUT_SLOTS: Final = 4
# Wrong bytes tried in one run of the program; the seed makes a failure happen again.
MUTATIONS: Final = 300
SEED: Final = 20


class Server:
    """Answers each call with what `reply` holds: bytes, and descriptors that it closes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reply: Callable[[], tuple[bytes, list[int]]] = lambda: (b"", [])
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(4)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return

            with sock:
                self._talk(sock)

    def _talk(self, sock: socket.socket) -> None:
        pending = b""
        while data := sock.recv(65536):
            pending += data
            *calls, pending = pending.split(b"\0")
            for _ in calls:
                answer, fds = self.reply()
                try:
                    _send(sock, answer, fds)
                except OSError:
                    return
                finally:
                    for fd in fds:
                        os.close(fd)

                if not answer.endswith(b"\0"):
                    return


def _send(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    if data:
        sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        sock.sendall(data[sent:])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "s")
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def driver(server: Server) -> Iterator[Driver]:
    with Driver(sanitized()) as program:
        program.do("connect", server.path)
        yield program


def says(value: object) -> bytes:
    return json.dumps(value).encode() + b"\0"


def connect_again(driver: Driver, server: Server) -> None:
    driver.do("connect", server.path)


# The control plane.

NOT_MESSAGES: Final = [
    b"\0",
    b"null\0",
    b"[]\0",
    b'"text"\0',
    b"{}\0",
    b"{\0",
    b'{"parameters":{}\0',
    b'{"parameters"\0',
    b'{"parameters":}\0',
    b'{"parameters":{},}\0',
    b'{"parameters":{}} x\0',
    b'{"parameters":[]}\0',
    b'{"parameters":null}\0',
    b"{parameters:{}}\0",
    b'{"parameters":{"job":1}\0',
    b'{"a":"\\\0',
    b'{"a":"\\u12\0',
    b'{"a":"\\u12xx"}\0',
    b'{"a":"\\x"}\0',
    b'{"a":"\n"}\0',
    b'{"a":tru}\0',
    b'{"a":-}\0',
    b'{"a":nul\0',
    b"[" * 100_000 + b"\0",
    b'{"a":' * 40 + b"1" + b"}" * 40 + b"\0",
    b'{"a":[' + b"1," * 100_000 + b"1]}\0",
    b"x" * (3 << 20) + b"\0",
    b"half of it",
    b"",
]


def test_what_is_no_answer(server: Server, driver: Driver) -> None:
    for data in NOT_MESSAGES:
        server.reply = lambda data=data: (data, [])  # type: ignore[misc]
        error = driver.fails("call", "GetInfo")
        whole = data.endswith(b"\0") and len(data) < 1 << 20
        wanted = ("ProtocolError",) if whole else ("ConnectionLost", "ProtocolError")
        assert error.name in wanted, data[:40]
        # It is out of step, and says so instead of taking the next bytes for an answer.
        assert driver.fails("call", "GetInfo").name == "ConnectionLost"
        connect_again(driver, server)


def test_a_server_that_says_nothing(server: Server, driver: Driver) -> None:
    waits = threading.Event()

    def never() -> tuple[bytes, list[int]]:
        waits.wait()
        return b"", []

    server.reply = never
    assert driver.fails("call", "GetInfo", 50).name == "TimedOut"
    waits.set()


@pytest.mark.parametrize(
    ("reply", "name", "code"),
    [
        ({"error": "io.switchgear.Busy"}, "Busy", 300),
        ({"error": "io.switchgear.Busy", "parameters": {"code": "x"}}, "Busy", 300),
        ({"error": "io.switchgear.New", "parameters": {"code": 777}}, "New", 777),
        ({"error": "io.switchgear.New"}, "New", 599),
        ({"error": "org.varlink.service.MethodNotFound"}, "MethodNotFound", 100),
        ({"error": "." * 500, "parameters": {"message": "x" * 5000}}, "", 100),
        ({"error": "x" * 5000, "parameters": {"details": []}}, "x" * 31, 100),
        ({"error": 5, "parameters": {"message": {}}}, "", 100),
        ({"error": "a.Busy", "parameters": {"details": {"retry_after_ms": -1}}}, "Busy", 100),
    ],
)  # fmt: skip
def test_errors_of_any_form(
    server: Server, driver: Driver, reply: Json, name: str, code: int
) -> None:
    server.reply = lambda: (says(reply), [])
    error = driver.fails("call", "GetInfo")
    assert (error.name, error.code, error.retry_after_ms) == (name, code, 0)


def test_the_text_of_an_error_is_decoded_and_cut(server: Server, driver: Driver) -> None:
    text = 'q"b\\s/ \u00e9 \u20ac \U0001f600 \ud800 ' + "\u20ac" * 200
    server.reply = lambda: (says({"error": "x.Y", "parameters": {"message": text}}), [])
    said = driver.fails("call", "GetInfo").text
    assert said.startswith('q"b\\s/ \u00e9 \u20ac \U0001f600 ? \u20ac\u20ac')
    assert len(said.encode()) <= 255
    assert "\ufffd" not in said


@pytest.mark.parametrize(
    "parameters",
    [{}, {"job": "1"}, {"job": -1}, {"job": 1.0}, {"job": 10**30}, {"job": True}, {"job": [1]}],
)
def test_a_load_without_a_job(
    server: Server, driver: Driver, tmp_path: Path, parameters: Json
) -> None:
    (tmp_path / "m").write_bytes(b"x")
    server.reply = lambda: (says({"parameters": parameters}), [])
    assert driver.fails("load", tmp_path / "m", "-").name == "ProtocolError"


@pytest.mark.parametrize(
    "end",
    [{}, {"state": "failed"}, {"state": 5}, {"state": "failed", "error": {}}],
)
def test_the_end_of_a_job_that_says_nothing(
    server: Server, driver: Driver, tmp_path: Path, end: Json
) -> None:
    (tmp_path / "m").write_bytes(b"x")
    answers = iter([{"job": 1}, end])
    server.reply = lambda: (says({"parameters": next(answers)}), [])
    assert driver.fails("load", tmp_path / "m", "-").code in (100, 501)


def test_descriptors_that_nobody_asked_for(server: Server, driver: Driver) -> None:
    folder = f"/proc/{driver.pid}/fd"
    before = len(os.listdir(folder))

    def reply() -> tuple[bytes, list[int]]:
        return says({"parameters": {}}), [os.open("/dev/null", os.O_RDONLY) for _ in range(16)]

    server.reply = reply
    for _ in range(5):
        driver.do("call", "GetInfo")

    server.reply = lambda: (says({"parameters": {}}), [])
    driver.do("call", "GetInfo")
    assert len(os.listdir(folder)) == before

    def too_many() -> tuple[bytes, list[int]]:
        return says({"parameters": {}}), [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]

    server.reply = too_many
    assert driver.fails("call", "GetInfo").name == "ProtocolError"
    connect_again(driver, server)
    assert len(os.listdir(folder)) == before


# OpenSession.


class Opening:
    """A sound answer of OpenSession, to be made unsound; and the session's other end."""

    def __init__(self) -> None:
        self.layout = arena.plan((SPEC,), (SPEC,), SLOTS, OUTPUT_SLOTS)
        self.fd = arena.create("test-arena", self.layout.size_bytes)
        self.sock, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self.parameters: Json = {
            "session": 1,
            "epoch": 1,
            "slots": SLOTS,
            "output_slots": OUTPUT_SLOTS,
            "socket": 0,
            "arena": 1,
            "layout": layout_to_json(self.layout),
            "inputs": [spec_to_json(SPEC)],
            "outputs": [spec_to_json(SPEC)],
            "state": False,
        }

    def reply(self) -> tuple[bytes, list[int]]:
        fds = [os.dup(self.other.fileno()), os.dup(self.fd)]
        return says({"parameters": self.parameters}), fds

    def close(self) -> None:
        self.sock.close()
        self.other.close()
        os.close(self.fd)


@contextmanager
def opening() -> Iterator[Opening]:
    one = Opening()
    try:
        yield one
    finally:
        one.close()


def test_the_sound_answer_is_taken(server: Server, driver: Driver) -> None:
    with opening() as sound:
        server.reply = sound.reply
        assert driver.do("open", "m") == "slots 2 epoch 1 stateful 0 | x float32 4"


WRONG_VALUES: Final[list[object]] = [
    *(None, -1, 0, 1, 3, 17, 255, 65535, 2**31, 2**32, 2**62, 2**63),
    *("4", [], {}, 1.5, True),
]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON value is."""
    if path:
        yield path

    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)

    for key, item in items:
        yield from _paths(item, (*path, key))


def _with(value: Json, path: tuple[Any, ...], wrong: object) -> Json:
    changed = copy.deepcopy(value)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]

    at[path[-1]] = wrong
    return changed


def opens(driver: Driver, server: Server) -> bool:
    """Whether a session is opened. It must only not break."""
    try:
        driver.do("open", "m")
    except DriverError as error:
        wanted = error.name in ("ProtocolError", "ConnectionLost")
        connect_again(driver, server)
        if not wanted:
            raise

        return False

    return True


def test_every_field_of_an_opening_with_every_wrong_value(
    server: Server, driver: Driver
) -> None:
    taken = 0
    with opening() as sound:
        good = sound.parameters
        server.reply = sound.reply
        for path in _paths(good):
            for wrong in WRONG_VALUES:
                sound.parameters = _with(good, path, wrong)
                taken += opens(driver, server)

    # Most of them say something else than the layout; some are another sound answer.
    assert taken


def test_random_bytes_in_an_opening(server: Server, driver: Driver) -> None:
    chance = random.Random(SEED)
    with opening() as sound:
        data, fds = sound.reply()
        for fd in fds:
            os.close(fd)

        for _ in range(MUTATIONS):
            wrong = bytearray(data[:-1])
            for _ in range(chance.randint(1, 4)):
                wrong[chance.randrange(len(wrong))] = chance.choice(
                    b'0123456789[]{}",:-\\eu\xff'
                )

            made = bytes(wrong) + b"\0"
            server.reply = lambda made=made: (made, sound.reply()[1])  # type: ignore[misc]
            try:
                driver.do("open", "m")
            except DriverError:
                connect_again(driver, server)


@pytest.mark.parametrize(
    "kind",
    ["none", "swapped", "the same", "a pipe", "a stream", "unsealed", "small", "closed arena"],
)
def test_descriptors_of_an_opening(server: Server, driver: Driver, kind: str) -> None:
    with opening() as sound:
        parameters = sound.parameters

        def reply() -> tuple[bytes, list[int]]:
            data, (sock, memory) = sound.reply()
            fds = [sock, memory]
            if kind == "none":
                os.close(sock)
                os.close(memory)
                return data, []

            if kind == "swapped":
                fds = [memory, sock]
            elif kind == "the same":
                parameters["arena"] = 0
                data = says({"parameters": parameters})
            elif kind in ("a pipe", "a stream"):
                os.close(sock)
                if kind == "a pipe":
                    fds[0], end = os.pipe()
                    os.close(end)
                else:
                    ours, theirs = socket.socketpair()
                    ours.close()
                    fds[0] = theirs.detach()
            elif kind == "unsealed":
                os.close(memory)
                fds[1] = os.memfd_create("unsealed", os.MFD_CLOEXEC)
                os.ftruncate(fds[1], sound.layout.size_bytes)
            elif kind == "small":
                os.close(memory)
                fds[1] = arena.create("small", 4096)
            else:
                os.close(memory)
                fds.pop()

            return data, fds

        server.reply = reply
        assert driver.fails("open", "m").name == "ProtocolError"
        folder = f"/proc/{driver.pid}/fd"
        left = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
        assert not [name for name in left if "memfd" in name]


# The data plane.


@pytest.fixture
def session(server: Server, driver: Driver) -> Iterator[Opening]:
    with opening() as sound:
        server.reply = sound.reply
        driver.do("open", "m")
        yield sound


def reply_to(request: Record, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "kind": Kind.REPLY,
        "request_id": request.request_id,
        "epoch": 1,
        "output_slot": request.output_slot,
        "backend": 1,
        "precision": 1,
        **fields,
    }
    return Record(**values)


def write_header(session: Opening, output: int, data: bytes) -> None:
    with mmap.mmap(session.fd, session.layout.size_bytes) as memory:
        at = session.layout.headers[output].offset
        memory[at : at + len(data)] = data


def good_header(request_id: int) -> bytes:
    return pack_header(request_id, [SlotEntry("float32", (4,), 16)])


def receive(session: Opening) -> Record:
    return Record.unpack(session.sock.recv(RECORD_BYTES))


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        bytes(RECORD_BYTES - 1),
        bytes(RECORD_BYTES),
        bytes(RECORD_BYTES + 1),
        bytes(4096),
        b"\x02\x02" + bytes(RECORD_BYTES - 2),
        b"\x05\x01" + bytes(RECORD_BYTES - 2),
        b"\xff\x01" + bytes(RECORD_BYTES - 2),
        Record(Kind.REPLY, 77, output_slot=0).pack(),
        Record(Kind.REPLY, 0, status_domain=1, status_code=101).pack(),
    ],
)
def test_packets_that_are_no_reply(session: Opening, driver: Driver, packet: bytes) -> None:
    driver.do("submit", 0)
    receive(session)
    session.sock.send(packet)
    assert driver.fails("wait", 0, 10000).name in ("ProtocolError", "ConnectionLost")
    assert driver.fails("submit", 1).name in ("ProtocolError", "ConnectionLost")


def test_records_before_the_answer_that_mean_nothing(session: Opening, driver: Driver) -> None:
    driver.do("submit", 0)
    request = receive(session)
    for _ in range(20):
        session.sock.send(Record(Kind.EVENT, 5).pack())

    write_header(session, 0, good_header(request.request_id))
    session.sock.send(reply_to(request, backend=200, precision=200, reason=65535).pack())
    assert " unknown unknown reason 65535 " in driver.do("wait", 0, 10000)


@pytest.mark.parametrize("output", [1, OUTPUT_SLOTS, 255, 256, 65534, NO_SLOT])
def test_output_slots_that_are_not_the_request_s(
    session: Opening, driver: Driver, output: int
) -> None:
    driver.do("submit", 0)
    request = receive(session)
    session.sock.send(reply_to(request, output_slot=output).pack())
    assert driver.fails("wait", 0, 10000).name == "ProtocolError"


def test_two_answers_to_one_request(session: Opening, driver: Driver) -> None:
    driver.do("submit", 0)
    driver.do("submit", 1)
    request = receive(session)
    write_header(session, 0, good_header(request.request_id))
    for _ in range(2):
        session.sock.send(reply_to(request).pack())

    driver.do("wait", 0, 10000)
    assert driver.fails("wait", 1, 10000).name == "ProtocolError"


def _headers() -> list[bytes]:
    good = good_header(1)
    entry = HEADER.size
    changes = [
        (0, b"\0"), (4, b"\2"), (6, b"\0"), (6, b"\xff\xff"), (8, b"\2"),
        (entry, b"\0\0"), (entry, b"\x0e\0"), (entry, b"\xff\xff"), (entry + 2, b"\x09"),
        (entry + 2, b"\xff\xff"), (entry + 8, b"\x20"), (entry + 8, b"\xff" * 8),
        (entry + 16, b"\5"), (entry + 16, b"\xff" * 4),
    ]  # fmt: skip
    found = [good[:at] + new + good[at + len(new) :] for at, new in changes]
    # A product of dimensions that is 16 only when it overflows.
    dims = struct.pack("<8I", 2**31, 2**31, 4, 1, 1, 1, 1, 1)
    found.append(good[: entry + 2] + b"\x08\0" + good[entry + 4 : entry + 16] + dims)
    # Sound in itself, and larger than the tensor's room, or the arena.
    large = [
        pack_header(1, [SlotEntry("float32", (count,), 4 * count)]) for count in (5, 1 << 22)
    ]
    return [*found, *large, bytes(len(good))]


def test_headers_that_do_not_fit(session: Opening, driver: Driver) -> None:
    for number, header in enumerate(_headers(), 1):
        driver.do("submit", 0)
        request = receive(session)
        fixed = header[:8] + struct.pack("<Q", number if header[8] == 1 else 0) + header[16:]
        write_header(session, 0, fixed)
        session.sock.send(reply_to(request).pack())
        assert driver.fails("wait", 0, 10000).name == "ProtocolError", header.hex()

    # The session is as good as before.
    driver.do("submit", 0)
    request = receive(session)
    write_header(session, 0, good_header(request.request_id))
    session.sock.send(reply_to(request).pack())
    driver.do("wait", 0, 10000)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (pack_error("out of memory", 96), "out of memory"),
        (struct.pack("<II", 0x54525245, 2**32 - 1) + b"x" * 88, "x" * 88),
        (struct.pack("<II", 0x54525245, 300) + b"a\0b" + bytes(80), "a"),
        (bytes(96), ""),
    ],
)
def test_the_text_of_a_failed_run(
    session: Opening, driver: Driver, written: bytes, said: str
) -> None:
    driver.do("submit", 0)
    request = receive(session)
    write_header(session, 0, written)
    session.sock.send(reply_to(request, status_domain=5, status_code=-4).pack())
    error = driver.fails("wait", 0, 10000)
    assert (error.name, error.domain, error.driver_code) == ("BackendFailed", "vulkan", -4)
    assert error.text.startswith(f"vulkan:-4 {said}".strip())


def test_random_records(server: Server, driver: Driver) -> None:
    chance = random.Random(SEED)
    for _ in range(MUTATIONS // 2):
        with opening() as session:
            server.reply = session.reply
            driver.do("open", "m")
            driver.do("submit", 0)
            driver.do("submit", 1)
            request = receive(session)
            record = bytearray(reply_to(request).pack())
            header = bytearray(good_header(request.request_id))
            for _ in range(chance.randint(1, 3)):
                record[chance.randrange(len(record))] = chance.choice((0, 1, 2, 255, 128))
                header[chance.randrange(len(header))] = chance.choice((0, 1, 255))

            write_header(session, 0, bytes(header))
            session.sock.send(record)
            session.sock.close()
            session.other.close()
            for slot in (0, 1):
                try:
                    driver.do("wait", slot, 10000)
                except DriverError:
                    pass

            driver.do("close")
