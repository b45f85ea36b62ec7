"""The service on a real systemd: installed, started by its first client, hung, killed, removed.

One boot for all of it: the steps need each other, and a boot costs a second.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from booted_systemd import Guest
from devices import require_opencl, require_systemd_container, require_vulkan

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Iterator

# Nothing in it depends on the Python.
pytestmark = pytest.mark.engine

ROOT: Final = Path(__file__).resolve().parent.parent
PREFIX: Final = "/opt/switchgear"
PYTHON: Final = f"{PREFIX}/bin/python"
SWITCHGEAR: Final = (PYTHON, "-W", "error", "-m", "switchgear")
SOCKET: Final = "/run/switchgear/switchgear.sock"
SERVICE: Final = "switchgear.service"
# The machine is not measured beside the test; a watchdog that can be waited for.
DROP_IN: Final = """[Service]
WatchdogSec=2s
RestartSec=100ms
Environment=SWITCHGEAR_FINGERPRINT__ENABLED=false
Environment=SWITCHGEAR_PREPARE__ENABLED=false
"""
# An app: sends before anybody listens, says what came back, and stays until stdin closes.
ASK: Final = """
import json, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect("/run/switchgear/switchgear.sock")
sock.sendall(b'{"method": "io.switchgear.GetInfo", "parameters": {}}\\0')
print(json.loads(sock.recv(65536)[:-1])["parameters"]["pid"], flush=True)
sys.stdin.read()
"""
# A convolutional network of 4 million weights, through a session and in this process.
INFER: Final = """
import json
import numpy
from switchgear.backends import generate
from switchgear.client import connect
from ai_edge_litert.interpreter import Interpreter
data = generate.mobilenet_v1()
with connect() as client:
    model = client.load_model(data, name="mobilenet")
    (spec,) = model.inputs
    image = numpy.linspace(-1, 1, numpy.prod(spec.shape), dtype="f4").reshape(spec.shape)
    with client.open_session(model) as session:
        result = session.run({spec.name: image})
        values = numpy.array(next(iter(result.values())))
        here = Interpreter(model_content=data)
        here.allocate_tensors()
        here.set_tensor(here.get_input_details()[0]["index"], image)
        here.invoke()
        wanted = here.get_tensor(here.get_output_details()[0]["index"])
        print(json.dumps({
            "backend": result.backend,
            "shape": values.shape,
            "differs": float(numpy.abs(values - wanted).max() / numpy.abs(wanted).max()),
        }))
"""


@pytest.fixture
def guest() -> Iterator[Guest]:
    require_systemd_container()
    base = Path(sys.base_prefix)
    binds = {
        "/opt/tree": ROOT,
        "/opt/packages": Path(sysconfig.get_path("purelib")),
    }
    if base != Path("/usr"):
        # A Python of some user's: where every user may read it.
        binds["/opt/python"] = base

    with Guest(binds) as booted:
        interpreter = "/opt/python/bin/python3" if base != Path("/usr") else "/usr/bin/python3"
        booted.run(interpreter, "-m", "venv", "--without-pip", PREFIX)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        paths = f"{PREFIX}/lib/{version}/site-packages/paths.pth"
        booted.write(paths, "/opt/tree/src\n/opt/packages\n")
        yield booted


def listing(guest: Guest) -> set[str]:
    """What an installation may touch."""
    places = ("/etc", "/run", "/var/lib", "/var/cache")
    return set(guest.run("find", *places, "-xdev").split("\n"))


def accounts(guest: Guest) -> str:
    return guest.run("cat", "/etc/passwd", "/etc/group")


@pytest.mark.timeout(120)
def test_a_service_from_its_installation_to_its_removal(guest: Guest) -> None:
    # Its own limit is the one above; the dump of hung tests comes sooner.
    faulthandler.cancel_dump_traceback_later()
    before, users = listing(guest), accounts(guest)

    install(guest)
    first_pid = activate(guest)
    serve(guest)
    who_may_connect(guest)
    reload(guest, first_pid)
    hang(guest, first_pid)
    kill(guest)
    stop(guest)
    compile_kernels(guest)
    uninstall(guest)

    noise = ("/run/systemd/", "/run/log/", "/run/udev/", "/var/lib/systemd/", "/etc/.pwd.lock")
    left = {path for path in listing(guest) - before if not path.startswith(noise)}
    # Copies that the account tools keep of what was before.
    assert {path for path in left if not path.endswith("-")} == set()
    assert accounts(guest) == users
    of_a_user(guest)


def install(guest: Guest) -> None:
    guest.write(f"/run/systemd/system/{SERVICE}.d/test.conf", DROP_IN)
    said = json.loads(guest.run(*SWITCHGEAR, "install-service", "--json"))
    assert "/etc/systemd/system/switchgear.service" in said["files"]
    assert guest.property_of(SERVICE, "UnitFileState") == "enabled"
    assert guest.property_of("switchgear.socket", "UnitFileState") == "enabled"
    # As it was written for this machine, with the program that is there.
    units = [f"/etc/systemd/system/switchgear.{kind}" for kind in ("service", "socket")]
    assert guest.run("systemd-analyze", "verify", "--recursive-errors=no", *units) == ""
    assert guest.property_of(SERVICE, "ActiveState") == "inactive"


def activate(guest: Guest) -> int:
    """The first client's call waits in the socket until the daemon has started."""
    guest.run("systemctl", "start", "switchgear.socket")
    assert guest.property_of(SERVICE, "ActiveState") == "inactive"
    pid = int(guest.run(PYTHON, "-c", ASK))
    # Waits for READY=1 where the start is still going on.
    guest.run("systemctl", "start", SERVICE)
    assert guest.property_of(SERVICE, "MainPID") == str(pid)
    assert guest.property_of(SERVICE, "StatusText").startswith("serving; 0 models")
    assert guest.property_of(SERVICE, "NRestarts") == "0"
    owner = guest.run("stat", "--format=%U", f"/proc/{pid}")
    assert owner == "switchgear"
    return pid


def serve(guest: Guest) -> None:
    answer = json.loads(guest.run(PYTHON, "-c", INFER))
    assert answer["backend"] == "cpu"
    assert answer["shape"] == [1, 1000]
    # From the same engine in the app's process; the number of threads changes the last bits.
    assert answer["differs"] < 1e-5


def who_may_connect(guest: Guest) -> None:
    as_nobody = ("setpriv", "--reuid=nobody", "--regid=nogroup")
    assert "PermissionError" in guest.fails(*as_nobody, "--clear-groups", PYTHON, "-c", ASK)
    assert guest.run(*as_nobody, "--groups=switchgear", PYTHON, "-c", ASK).isdigit()


def reload(guest: Guest, pid: int) -> None:
    """A model of the configuration appears, without a restart."""
    data = base64.b64encode(generate.identity((4,))).decode()
    guest.run("sh", "-c", "base64 -d >/var/lib/kept.tflite", stdin=data)
    guest.run("chmod", "644", "/var/lib/kept.tflite")
    text = '[limits]\nqueue = 99\n[[models]]\npath = "/var/lib/kept.tflite"\n'
    guest.write("/etc/switchgear/switchgear.toml", text)
    guest.run("systemctl", "reload", SERVICE)
    guest.await_property(
        SERVICE,
        "StatusText",
        "serves, but: changed in the configuration, needs a restart: limits.queue; "
        "2 models, 0 sessions; reloaded: models applied",
    )
    assert guest.property_of(SERVICE, "ActiveState") == "active"
    assert guest.property_of(SERVICE, "MainPID") == str(pid)
    models = json.loads(guest.run(*SWITCHGEAR, "model", "list", "--json"))
    assert [model["name"] for model in models if model["resident"]] == ["kept"]
    guest.run("rm", "/var/lib/kept.tflite", "/etc/switchgear/switchgear.toml")


def hang(guest: Guest, pid: int) -> None:
    """The loop stops, so the watchdog is no longer fed."""
    guest.run("kill", "-STOP", str(pid))
    guest.await_property(SERVICE, "NRestarts", "1")
    guest.await_property(SERVICE, "ActiveState", "active")
    log = guest.journal(SERVICE)
    assert "Watchdog timeout" in log
    # SIGABRT wakes it, and it says where it was.
    assert "Fatal Python error: Aborted" in log
    assert "serving_loop.py" in log


def kill(guest: Guest) -> None:
    pid = int(guest.property_of(SERVICE, "MainPID"))
    guest.run("kill", "-KILL", str(pid))
    guest.await_property(SERVICE, "NRestarts", "2")
    # The socket was never away: this client waits for the new daemon.
    assert int(guest.run(PYTHON, "-c", ASK)) != pid
    guest.await_property(SERVICE, "ActiveState", "active")


def stop(guest: Guest) -> None:
    """An idle client does not hold it up; the socket stays, and starts it again."""
    idle = guest.start(PYTHON, "-c", ASK)
    assert idle.stdin is not None
    assert idle.stdout is not None
    pid = idle.stdout.readline().strip()
    assert pid == guest.property_of(SERVICE, "MainPID")
    guest.run("systemctl", "stop", SERVICE)
    assert guest.property_of(SERVICE, "ActiveState") == "inactive"
    # Not "timeout": it ended by itself, and nothing was left to be killed.
    assert guest.property_of(SERVICE, "Result") == "success"
    log = guest.journal(SERVICE)
    assert "Failed with result 'timeout'" not in log
    assert "Killing process" not in log.rpartition("Stopping ")[2]
    idle.communicate()
    assert guest.property_of("switchgear.socket", "ActiveState") == "active"
    assert guest.run(PYTHON, "-c", ASK) != pid


def compile_kernels(guest: Guest) -> None:
    """What the unit denies, the drivers' compilers do not need."""
    require_vulkan()
    require_opencl()
    text = guest.run("cat", f"/etc/systemd/system/{SERVICE}")
    (start,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    text = text.replace("\nType=notify\n", "\nType=oneshot\n")
    text = text.replace("\nRestart=on-failure\n", "\nRestart=no\n")
    for backend in ("vulkan", "opencl"):
        unit = f"probe-{backend}.service"
        program = f"ExecStart={PYTHON} -m switchgear.daemon.cli.doctor_probe {backend}"
        guest.write(f"/run/systemd/system/{unit}", text.replace(start, program))

    guest.run("systemctl", "start", "probe-vulkan.service", "probe-opencl.service")
    for backend in ("vulkan", "opencl"):
        assert '"ok": true' in guest.journal(f"probe-{backend}.service")


def uninstall(guest: Guest) -> None:
    """While it is running."""
    guest.run("rm", "-r", f"/run/systemd/system/{SERVICE}.d")
    guest.run(*SWITCHGEAR, "install-service", "--uninstall")
    assert guest.property_of(SERVICE, "LoadState") == "not-found"
    assert guest.property_of("switchgear.socket", "LoadState") == "not-found"
    assert "No such file" in guest.fails("ls", SOCKET)
    # Once more is no error.
    guest.run(*SWITCHGEAR, "install-service", "--uninstall")


def of_a_user(guest: Guest) -> None:
    """The units of a user, in the manager of that user."""
    guest.run("useradd", "--create-home", "alice")
    uid = guest.run("id", "-u", "alice")
    guest.run("systemctl", "start", f"user@{uid}.service")
    alice = (
        *("setpriv", "--reuid=alice", "--regid=alice", "--init-groups", "env"),
        *(f"XDG_RUNTIME_DIR=/run/user/{uid}", "HOME=/home/alice"),
    )
    said = json.loads(
        guest.run(*alice, *SWITCHGEAR, "install-service", "--user", "--now", "--json")
    )
    assert "/home/alice/.config/systemd/user/switchgear.service" in said["files"]
    status = json.loads(guest.run(*alice, *SWITCHGEAR, "status", "--json"))
    assert status["ready"] is True
    assert guest.run("stat", "--format=%U", f"/proc/{status['pid']}") == "alice"
    guest.run(*alice, *SWITCHGEAR, "install-service", "--user", "--uninstall")
    assert guest.run("find", "/home/alice", f"/run/user/{uid}", "-name", "switchgear*") == ""
