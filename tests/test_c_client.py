"""The C client against the real daemon; every run under AddressSanitizer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from c_client_program import SOURCES, WARNINGS, Driver, build, filled, floats, sanitized
from daemon_process import DaemonProcess
from held_worker import held
from raw_client import Control

from switchgear.backends import generate
from switchgear.ipc import dtypes, errors, record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Nothing in it depends on the Python. It compiles, which takes its time on a busy machine.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(60)]

# Tests hold the worker: that is no hang.
CONFIG = "[cpu]\nthreads = 1\n[workers]\nhang_s = 60.0\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as running:
        yield running


@pytest.fixture
def driver(daemon: DaemonProcess) -> Iterator[Driver]:
    with Driver(sanitized()) as program:
        program.do("connect", daemon.socket)
        yield program


def model_file(folder: Path, data: bytes) -> Path:
    path = folder / "model.tflite"
    path.write_bytes(data)
    return path


def load(driver: Driver, folder: Path, data: bytes, name: str = "m") -> str:
    """Loads a model; its hash."""
    return driver.do("load", model_file(folder, data), name)


def worker_pid(daemon: DaemonProcess) -> int:
    (row,) = daemon.call("GetStatus")["parameters"]["workers"]
    return int(row["pid"])


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    build("example", "-O2", *WARNINGS)
    header = tmp_path / "header.cpp"
    header.write_text('#include "switchgear.h"\nint main() { return SG_MAX_RANK - 8; }\n')
    compiler = [os.environ.get("CXX", "c++"), f"-I{SOURCES}", "-fsyntax-only", str(header)]
    assert subprocess.run(compiler, capture_output=True).returncode in (0, 127)


def test_its_tables_are_those_of_the_protocol() -> None:
    source = (SOURCES / "switchgear.c").read_text()
    header = (SOURCES / "switchgear.h").read_text()
    table = dict(re.findall(r'\{(\d{3}), "(\w+)"\}', source))
    assert table == {str(cls.code): cls.__name__ for cls in errors.ERRORS}
    for name, code in re.findall(r"SG_([A-Z_]+) = (\d{3})", header):
        assert errors.BY_CODE[int(code)].__name__.upper() == name.replace("_", "")

    (domains,) = re.findall(r"domain_names\[\] = \{(.*?)\};", source, re.DOTALL)
    assert re.findall(r'"(\w+)"', domains) == list(errors.DOMAINS)
    (names,) = re.findall(r"\} dtypes\[\] = \{(.*?)\};", source, re.DOTALL)
    assert re.findall(r'"(\w+)", (\d+)', names) == [
        (dtype.name, str(dtype.size_bytes)) for dtype in dtypes.DTYPES.values()
    ]
    for enum, table_name in (
        (record.Backend, "backend_names"),
        (record.Precision, "precision_names"),
    ):
        (found,) = re.findall(table_name + r"\[\] = \{(.*?)\};", source, re.DOTALL)
        wanted = [item.name.lower() for item in enum]
        assert re.findall(r'"(\w*)"', found)[1:] == wanted[1:]


def test_the_example_runs_a_model(daemon: DaemonProcess, tmp_path: Path) -> None:
    program = build("example", "-O2", *WARNINGS)
    path = model_file(tmp_path, generate.two_inputs())
    done = subprocess.run(
        [str(program), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "SWITCHGEAR_SOCKET": str(daemon.socket)},
    )
    assert done.returncode == 0, done.stderr
    assert "ran on cpu (fp32)" in done.stdout
    missing = subprocess.run(
        [str(program), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "SWITCHGEAR_SOCKET": str(tmp_path / "none")},
    )
    assert missing.returncode == 1
    assert "NotRunning (502)" in missing.stderr


def test_a_model_is_loaded_and_run(driver: Driver, tmp_path: Path) -> None:
    digest = load(driver, tmp_path, generate.identity((4,)), "echo")
    assert len(digest) == 64
    opened = driver.do("open", "echo")
    assert opened.startswith("slots 2 epoch 1 stateful 0 | ")
    assert opened.endswith("float32 4")
    for number in range(20):
        values = [float(number), 1.5, -2.0, 1e6]
        filled(driver, number % 2, values)
        answer = driver.do("run", number % 2)
        assert f" id {number + 1} cpu fp32 " in f" {answer}"
        assert floats(answer) == values

    # The session outlives the control connection.
    driver.do("disconnect")
    assert floats(driver.do("run", 0)) == [18.0, 1.5, -2.0, 1e6]
    driver.do("close")


def test_slots_overlap(driver: Driver, tmp_path: Path) -> None:
    load(driver, tmp_path, generate.identity((4,)), "echo")
    driver.do("open", "echo", "slots=4")
    for slot in range(4):
        filled(driver, slot, [slot, slot, slot, slot])
        driver.do("submit", slot)

    assert driver.fails("submit", 2).name == "SlotBusy"
    # Waited for in another order than they were sent.
    assert floats(driver.do("wait", 3, 10000)) == [3.0] * 4
    seen = {floats(driver.do("any", 10000))[0] for _ in range(3)}
    assert seen == {0.0, 1.0, 2.0}
    assert driver.fails("any", 0).name == "BadSlot"
    assert driver.fails("wait", 0, 0).name == "BadSlot"
    assert driver.fails("submit", 4).name == "BadSlot"
    assert driver.fails("cancel", -1).name == "BadSlot"


def test_errors_have_name_code_and_text(driver: Driver, tmp_path: Path) -> None:
    text = tmp_path / "text.tflite"
    text.write_text("no model\n" * 10)
    error = driver.fails("load", text, "text")
    assert (error.code, error.name) == (107, "BadModel")
    assert error.text
    gone = driver.fails("load", tmp_path / "gone", "-")
    assert (gone.code, gone.text) == (100, f"{tmp_path}/gone: No such file or directory")
    bad_name = driver.fails("load", text, '"quo\\ted"')
    assert bad_name.name == "BadRequest"
    unknown = driver.fails("open", "nobody")
    assert (unknown.code, unknown.name) == (106, "UnknownModel")
    assert driver.fails("call", "NoSuchMethod").name == "MethodNotFound"
    assert driver.fails("call", 'Get"Info').name == "BadRequest"
    # The connection is still good.
    assert json.loads(driver.do("call", "GetInfo"))["ready"] is True
    load(driver, tmp_path, generate.identity((4,)), "echo")
    driver.do("unload", "echo")
    assert driver.fails("open", "echo").name == "UnknownModel"


def test_a_slow_run_is_waited_for_cancelled_and_overrun(
    daemon: DaemonProcess, driver: Driver, tmp_path: Path
) -> None:
    load(driver, tmp_path, generate.slow(20.0), "slow")
    driver.do("open", "slow")
    with held(worker_pid(daemon)):
        driver.do("submit", 0)
        assert driver.fails("wait", 0, 1).name == "TimedOut"
        driver.do("cancel", 0)
        assert driver.fails("wait", 0, 10000).name == "Cancelled"
        # Its output slot came back, fresh or not.
        driver.do("submit", 1, 1000)
        assert driver.fails("wait", 1, 10000).name == "DeadlineExceeded"

    driver.do("run", 0)
    driver.do("run", 1)


def test_busy_says_when_to_come_again(
    daemon: DaemonProcess, driver: Driver, tmp_path: Path
) -> None:
    load(driver, tmp_path, generate.slow(20.0), "slow")
    driver.do("open", "slow", "on_busy=reject", "slots=3", "priority=high")
    with held(worker_pid(daemon)):
        for slot in range(3):
            driver.do("submit", slot)

        error = driver.fails("wait", 2, 10000)

    assert (error.code, error.name) == (300, "Busy")
    assert error.retry_after_ms > 0


def test_shapes_are_prepared_and_outputs_have_their_own(driver: Driver, tmp_path: Path) -> None:
    load(driver, tmp_path, generate.dynamic_batch(), "batch")
    described = json.loads(driver.do("call", "ListModels"))["models"]
    (model,) = [m for m in described if m["name"] == "batch"]
    name = model["inputs"][0]["name"]
    assert driver.fails("open", "batch", f"{name}=3x4").name == "NotPrepared"
    driver.do("prepare", "batch", name, 3, 4)
    assert driver.do("open", "batch", f"{name}=3x4").endswith("float32 3x4")
    filled(driver, 0, list(range(12)))
    assert " 3x4 :" in driver.do("run", 0)
    assert driver.fails("open", "batch", f"{name}=3x5").name == "BadShape"

    load(driver, tmp_path, generate.positive_positions(), "where")
    driver.do("open", "where", "capacity=4096")
    filled(driver, 0, [1, -1, 1, -1, -1, -1, -1, 1])
    assert " 3x1 :" in driver.do("run", 0)


def test_a_stateful_model_loses_its_state_with_its_worker(tmp_path: Path) -> None:
    with DaemonProcess(config=CONFIG) as daemon, Driver(sanitized()) as driver:
        driver.do("connect", daemon.socket)
        load(driver, tmp_path, generate.accumulator(), "sum")
        assert "stateful 1" in driver.do("open", "sum")
        filled(driver, 0, [1, 1, 1, 1])
        assert floats(driver.do("run", 0)) == [1.0] * 4
        assert floats(driver.do("run", 0)) == [2.0] * 4
        driver.do("submit", 0, 0, "reset")
        assert floats(driver.do("wait", 0, 10000)) == [1.0] * 4
        with Control(daemon.socket) as control:
            for row in control.call("GetStatus")["workers"]:
                os.kill(row["pid"], signal.SIGKILL)

        assert driver.fails("run", 0).name == "StateLost"
        assert driver.do("epoch") == "2"
        assert floats(driver.do("run", 0)) == [1.0] * 4


def test_a_session_that_the_daemon_ends(tmp_path: Path) -> None:
    with DaemonProcess(config=CONFIG) as daemon, Driver(sanitized()) as driver:
        driver.do("connect", daemon.socket)
        load(driver, tmp_path, generate.identity((4,)), "echo")
        driver.do("open", "echo")
        driver.do("unload", "echo", "force")
        error = driver.fails("run", 0)
        assert error.name == "ConnectionLost"
        assert "UnknownModel" in error.text
        assert driver.fails("submit", 0).name == "ConnectionLost"
        load(driver, tmp_path, generate.identity((4,)), "echo")
        driver.do("open", "echo")
        driver.do("run", 0)
        daemon.stop()
        error = driver.fails("run", 1)
        assert error.name == "ConnectionLost"
        assert "ShuttingDown" in error.text
        assert driver.fails("call", "GetInfo").name == "ConnectionLost"
        # Out of step: only a new connection helps.
        assert driver.fails("call", "GetInfo").name == "ConnectionLost"
        assert driver.fails("connect", daemon.socket).name == "NotRunning"


def test_nothing_is_left_open(daemon: DaemonProcess, tmp_path: Path) -> None:
    with Driver(sanitized()) as driver:
        folder = f"/proc/{driver.pid}/fd"
        driver.do("connect", daemon.socket)
        load(driver, tmp_path, generate.identity((4,)), "echo")
        before = len(os.listdir(folder))
        for _ in range(5):
            driver.do("open", "echo")
            driver.do("run", 0)
            driver.do("close")
            driver.fails("open", "nobody")

        assert len(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("path", "name"),
    [("/nowhere/switchgear.sock", "NotRunning"), ("/" + "x" * 200, "BadRequest")],
)
def test_no_daemon_there(path: str, name: str) -> None:
    with Driver(sanitized()) as driver:
        assert driver.fails("connect", path).name == name


def test_the_default_socket_is_that_of_the_python_client(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """The variable, then the user's own daemon."""
    own = tmp_path / "switchgear" / "switchgear.sock"
    own.parent.mkdir()
    own.symlink_to(daemon.socket)
    for environment in (
        {"SWITCHGEAR_SOCKET": str(daemon.socket)},
        {"XDG_RUNTIME_DIR": str(tmp_path)},
    ):
        with Driver(sanitized(), environment) as driver:
            driver.do("connect")
            pid = json.loads(driver.do("call", "GetInfo"))["pid"]
            assert pid == daemon.pid


def test_the_rust_example_of_the_page(daemon: DaemonProcess, tmp_path: Path) -> None:
    rustc = shutil.which("rustc")
    if rustc is None:
        pytest.skip("no rustc here: the example in docs/other-languages.md is not built")

    page = (SOURCES.parent.parent / "docs" / "other-languages.md").read_text()
    (code,) = re.findall(r"```rust\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.rs").write_text(code)
    library = tmp_path / "libswitchgear.a"
    unit = tmp_path / "switchgear.o"
    for command in (
        ["cc", "-std=c11", "-O1", "-c", str(SOURCES / "switchgear.c"), "-o", str(unit)],
        ["ar", "rcs", str(library), str(unit)],
        [rustc, "-D", "warnings", "-L", ".", "-l", "static=switchgear", "example.rs"],
    ):
        built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        if "no default" in built.stderr or "could not choose a version" in built.stderr:
            pytest.skip("rustc is a shim without a toolchain")

        assert built.returncode == 0, built.stderr

    path = model_file(tmp_path, generate.identity((4,)))
    done = subprocess.run(
        [str(tmp_path / "example"), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "SWITCHGEAR_SOCKET": str(daemon.socket)},
    )
    assert (done.returncode, done.stdout) == (0, "cpu: [0.0, 1.0, 2.0, 3.0]\n"), done.stderr
