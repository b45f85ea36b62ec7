"""The interface, the protocol's document and the code say the same."""

from __future__ import annotations

import ast
import inspect
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from raw_client import Control, memfd, message
from varlink.scanner import Interface as Parsed
from varlink.scanner import (
    _Alias,
    _Array,
    _CustomType,
    _Dict,
    _Error,
    _Maybe,
    _Method,
    _Object,
    _Struct,
)

from switchgear.backends import generate
from switchgear.daemon import interface
from switchgear.ipc import record, slot
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import DOMAINS, ERRORS
from switchgear.ipc.varlink import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    MAX_NESTING,
    MAX_VALUES,
    READ_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed() -> Any:
    return Parsed(interface.description())


def members(parsed: Any, kind: type) -> dict[str, Any]:
    return {name: m for name, m in parsed.members.items() if isinstance(m, kind)}


def implemented() -> dict[str, ast.AsyncFunctionDef]:
    """The methods in the dispatcher's table by name, with the code that serves each."""
    tree = ast.parse(inspect.getsource(interface))
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Interface")
    functions = {n.name: n for n in cls.body if isinstance(n, ast.AsyncFunctionDef)}
    found = {}
    for node in ast.walk(cls):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.JoinedStr) and isinstance(value, ast.Attribute):
                    name = ast.unparse(key)
                    if "{INTERFACE}" in name:
                        found[name.strip("f'\"").removeprefix("{INTERFACE}.")] = functions[
                            value.attr
                        ]

    return found


def test_every_method_is_implemented_and_no_other(parsed: Any) -> None:
    assert set(implemented()) == set(members(parsed, _Method))


def test_the_parameters_read_are_those_declared(parsed: Any) -> None:
    readers = {
        "string",
        "optional_string",
        "integer",
        "optional_integer",
        "boolean",
        "optional_boolean",
        "optional_real",
        "choice",
        "strings",
        "shapes",
        "values",
    }
    for name, function in implemented().items():
        nodes = list(ast.walk(function))
        if any(isinstance(n, ast.Attribute) and n.attr == "_backends" for n in nodes):
            nodes += ast.walk(
                ast.parse(inspect.getsource(interface.Interface._backends).strip())
            )

        read = {
            node.args[0].value
            for node in nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in readers
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "parameters"
            and isinstance(node.args[0], ast.Constant)
        }
        assert read == set(parsed.members[name].in_type.fields), name


def test_every_error_is_declared_and_no_other(parsed: Any) -> None:
    declared = members(parsed, _Error)
    assert set(declared) == {error.__name__ for error in ERRORS}
    for error in declared.values():
        assert list(error.type.fields) == ["code", "message", "details"]


def fits(parsed: Any, declared: Any, value: object, where: str) -> None:
    """Holds a value of a real reply against its declared type; no field too many or too few."""
    if isinstance(declared, _Maybe):
        if value is not None:
            fits(parsed, declared.element_type, value, where)
    elif isinstance(declared, _CustomType):
        fits(parsed, parsed.members[declared.name].type, value, where)
    elif isinstance(declared, _Alias):
        fits(parsed, declared.type, value, where)
    elif isinstance(declared, _Array):
        assert isinstance(value, list), where
        for item in value:
            fits(parsed, declared.element_type, item, f"{where}[]")
    elif isinstance(declared, _Dict):
        assert isinstance(value, dict), where
        for item in value.values():
            fits(parsed, declared.element_type, item, f"{where}[string]")
    elif isinstance(declared, _Object):
        assert isinstance(value, dict), where
    elif isinstance(declared, _Struct):
        assert isinstance(value, dict), where
        needed = {n for n, t in declared.fields.items() if not isinstance(t, _Maybe)}
        assert needed <= set(value) <= set(declared.fields), f"{where}: {sorted(value)}"
        for name, item in value.items():
            fits(parsed, declared.fields[name], item, f"{where}.{name}")
    else:
        # The parser gives an example of the basic types.
        allowed = (int, float) if type(declared) is float else (type(declared),)
        assert type(value) in allowed, f"{where}: {value!r}"


class Checked:
    """Calls a daemon and holds each reply against the interface."""

    def __init__(self, parsed: Any, control: Control) -> None:
        self._parsed = parsed
        self._control = control
        self.seen: set[str] = set()

    def call(self, method: str, fds: tuple[int, ...] = (), **parameters: Any) -> dict[str, Any]:
        fits(self._parsed, self._parsed.members[method].in_type, parameters, method)
        reply, received = self._control.call_with_fds(method, fds, **parameters)
        for fd in received:
            os.close(fd)

        self._check(method, reply)
        return reply

    def watch(self, job: int) -> list[dict[str, Any]]:
        return self.stream("WatchJob", job=job)

    def stream(self, method: str, **parameters: Any) -> list[dict[str, Any]]:
        self._control.send(message(method, parameters, more=True))
        replies = []
        while True:
            reply, _ = self._control.receive()
            self._check(method, reply["parameters"])
            replies.append(reply["parameters"])
            if not reply.get("continues"):
                return replies

    def _check(self, method: str, reply: dict[str, Any]) -> None:
        self.seen.add(method)
        fits(self._parsed, self._parsed.members[method].out_type, reply, method)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        yield process


# Methods whose replies their own tests hold: they take longer than all others together.
ELSEWHERE = {"RunFingerprint", "GetFingerprint", "PrepareModel"}


def test_replies_have_the_declared_fields_and_types(parsed: Any, daemon: DaemonProcess) -> None:
    with Control(daemon.socket) as control:
        checked = Checked(parsed, control)
        fd = memfd(generate.dynamic_batch())
        broken = memfd(b"no model at all")
        try:
            job = checked.call("LoadModel", (fd,), descriptor=0, name="model")["job"]
            model = checked.watch(job)[-1]["result"]
            fits(parsed, parsed.members["Model"].type, model, "LoadModel's result")
            job = checked.call("LoadModel", (broken,), descriptor=0)["job"]
            failed = checked.watch(job)[-1]
        finally:
            os.close(fd)
            os.close(broken)

        assert failed["error"] == "io.switchgear.BadModel"
        fits(parsed, parsed.members["BadModel"].type, failed["parameters"], "BadModel")
        checked.call("GetInfo")
        checked.call("GetMetrics")
        checked.stream("WatchTrace", seconds=1)
        checked.call("ListModels")
        checked.call("DescribeModel", model="model")
        checked.watch(checked.call("CheckModel", model="model")["job"])
        (spec,) = model["inputs"]
        shape = [3 if d == -1 else d for d in spec["signature"]]
        shapes = {spec["name"]: shape}
        checked.watch(checked.call("PrepareShapes", model="model", input_shapes=shapes)["job"])
        with control.open_session("model"):
            checked.call("GetStatus")

        checked.call("OpenSession", model="model", input_shapes=shapes)
        job = checked.call("CheckModel", model="model")["job"]
        checked.call("GetStatus")
        checked.call("CancelJob", job=job)
        checked.watch(job)
        value = {
            "dtype": spec["dtype"],
            "shape": spec["shape"],
            "data": "AAAA" * (spec["capacity_bytes"] // 3)
            + {0: "", 1: "AA==", 2: "AAA="}[spec["capacity_bytes"] % 3],
        }
        checked.call("Infer", model="model", inputs={spec["name"]: value})
        while not checked.call("GetStatus")["devices"]:
            pass

        checked.call("WatchEvents")
        checked.call("Operate", level="backend", name="cpu", word="auto")
        checked.call("Infer", model="model", inputs={spec["name"]: value})
        checked.call("Explain", last=2)
        checked.call("UnloadModel", model="model", force=True)

    assert checked.seen == set(members(parsed, _Method)) - ELSEWHERE


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading of the document."""
    _, _, rest = text.partition(heading)
    assert rest, heading
    lines = []
    for line in rest.splitlines():
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split("|")])
        elif lines:
            break

    return [row for row in lines[1:] if not set(row[0]) <= set("- ")]


def test_the_table_of_errors() -> None:
    table = rows(PROTOCOL, "<!-- errors: begin -->")
    expected = [
        [
            str(error.code),
            error.__name__,
            "yes" if error.retryable else "",
            " ".join((error.__doc__ or "").split()),
        ]
        for error in ERRORS
    ]
    assert table == expected


# The document's names for the fields of `record.Record`, in the order of its struct.
FIELDS = (
    "type", "version", "flags", "epoch", "request id", "input slot", "output slot", "priority",
    "capture clock", "reserved", "timeout", "capture time", "trace id", "status domain",
    "backend", "precision", "status code", "reason", "retries", "tried", "temperature age",
    "retry after", "queue time", "run time", "total time", "binding", "reserved", "deadline",
    "reserved",
)  # fmt: skip


def test_the_table_of_the_record() -> None:
    table = rows(PROTOCOL, "## The record")
    assert tuple(row[2] for row in table) == FIELDS
    offset = 0
    for row in table:
        assert int(row[0]) == offset, row
        offset += int(row[1])

    assert offset == record.RECORD_BYTES
    sizes = [
        (int(number or 1) if kind in "xs" else struct.calcsize("<" + kind), kind)
        for token in re.findall(r"\d*[A-Za-z]", record.RECORD.format.removeprefix("<"))
        for number, kind in [(token[:-1], token[-1])]
        for _ in range(1 if kind in "xs" else int(number or 1))
    ]
    assert [size for size, _ in sizes] == [int(row[1]) for row in table]


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("type", record.Kind),
        ("capture clock", record.Clock),
        ("backend", record.Backend),
        ("precision", record.Precision),
    ],
)
def test_the_numbers_in_the_record(field: str, kind: Any) -> None:
    (text,) = (row[4] for row in rows(PROTOCOL, "## The record") if row[2] == field)
    told = {int(number): name for number, name in re.findall(r"(\d+) (\w+)", text)}
    if field == "backend":
        told[int(record.Backend.OTHER)] = "other"

    assert {n: name.lower() for n, name in told.items()} == {
        int(member): member.name.lower() for member in kind
    }


def test_the_status_domains() -> None:
    (text,) = (row[4] for row in rows(PROTOCOL, "## The record") if row[2] == "status domain")
    assert {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", text)} == DOMAINS


def test_the_slot_header() -> None:
    table = rows(PROTOCOL, "An output slot begins with a header")
    head = [row for row in table if "n" not in row[0]]
    assert sum(int(row[1]) for row in head) == slot.HEADER.size
    tensors = [row for row in table if "n" in row[0]]
    assert sum(int(row[1]) for row in tensors) == slot.ENTRY.size
    assert int(tensors[0][0].split()[0]) == slot.HEADER.size
    assert f"0x{slot.SLOT_MAGIC:08X}" in PROTOCOL
    assert f"0x{slot.ERROR_MAGIC:08X}" in PROTOCOL


def test_the_dtypes() -> None:
    lines = re.findall(r"^\| (?:dtype)? *\|(.*)\|$", PROTOCOL, re.MULTILINE)
    numbers, names = ([cell.strip() for cell in line.split("|")] for line in lines)
    told = {name: int(number) for name, number in zip(names, numbers, strict=True)}
    assert told == {dtype.name: dtype.number for dtype in DTYPES.values()}


def test_the_bounds_of_the_stream() -> None:
    table = {row[0]: row[1] for row in rows(PROTOCOL, "## Control plane: bounds")}
    assert table["a message"] == f"{MAX_MESSAGE_BYTES >> 20} MiB"
    assert table["descriptors of one message"].startswith(f"{MAX_DESCRIPTORS};")
    assert table["nesting of brackets"] == str(MAX_NESTING)
    assert table["values in a message; escapes in its strings"] == f"{MAX_VALUES} each"
    assert table["bytes read from one client per wake-up"] == f"{READ_BYTES >> 10} KiB"
