"""Two users and one daemon: neither sees, ends or slows what is the other's.

A connection's user is the one that its process had at connect; only root can take on another.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from daemon_process import DaemonProcess
from raw_client import CallFailed, Control, error_name
from worker_deaths import lost_four_times

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as other users"),
]

ANNE: Final = 65533
BERT: Final = 65534
MODEL: Final = generate.identity((4,))
VALUES: Final = [1.0, 2.0, 3.0, 4.0]


@contextmanager
def connected_as(uid: int, path: Path) -> Iterator[Control]:
    os.seteuid(uid)
    try:
        control = Control(path)
    finally:
        os.seteuid(0)

    with control:
        yield control


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "everybody.tflite"
    path.write_bytes(generate.identity((2,)))
    return path


@pytest.fixture(scope="module")
def path(resident: Path) -> Iterator[Path]:
    """The socket of a daemon that every user reaches, as over one from systemd."""
    config = f'[cpu]\nthreads = 1\n[[models]]\npath = "{resident}"\n'
    with DaemonProcess(config=config) as daemon:
        for folder in (daemon.folder, daemon.socket.parent):
            folder.chmod(0o755)

        daemon.socket.chmod(0o666)
        yield daemon.socket


@pytest.fixture
def anne(path: Path) -> Iterator[Control]:
    with connected_as(ANNE, path) as control:
        yield control


@pytest.fixture
def bert(path: Path) -> Iterator[Control]:
    with connected_as(BERT, path) as control:
        yield control


def refusal(control: Control, method: str, **parameters: Any) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        control.call(method, **parameters)

    return caught.value


def test_what_a_user_loads_is_unknown_to_another(anne: Control, bert: Control) -> None:
    model = bert.load(MODEL, name="berts")
    for method in ("DescribeModel", "OpenSession", "UnloadModel", "CheckModel"):
        for text in ("berts", model["model"], model["model"][:8]):
            assert refusal(anne, method, model=text).name == "UnknownModel"

    with bert.open_session("berts"):
        seen = anne.call("GetStatus")
        assert [entry["name"] for entry in seen["models"]] == ["everybody"]
        assert not seen["sessions"]
        assert all(worker["group"] == str(ANNE) for worker in seen["workers"])

    bert.call("UnloadModel", model="berts")


def test_a_job_is_its_users(anne: Control, bert: Control) -> None:
    bert.load(MODEL, name="berts")
    job = bert.call("CheckModel", model="berts")["job"]
    assert refusal(anne, "WatchJob", job=job).name == "UnknownJob"
    assert refusal(anne, "CancelJob", job=job).name == "UnknownJob"
    assert bert.watch(job)["state"] == "done"
    bert.call("UnloadModel", model="berts")


def test_the_same_bytes_of_two_users(anne: Control, bert: Control) -> None:
    digest = bert.load(MODEL, name="berts")["model"]
    anne.load(MODEL)
    with bert.open_session("berts") as session:
        seen = anne.call("DescribeModel", model=digest)["model"]
        assert (seen["name"], seen["owner_uid"], seen["sessions"]) == (digest[:12], ANNE, 0)
        # Not held back by the other's session, and no end of it.
        anne.call("UnloadModel", model=digest)
        anne.load(MODEL)
        anne.call("UnloadModel", model=digest, force=True)
        assert refusal(anne, "DescribeModel", model=digest).name == "UnknownModel"
        session.write(0, VALUES)
        session.infer(1)
        assert error_name(session.receive()) == ""
        assert session.read(0, 4) == VALUES

    bert.call("UnloadModel", model="berts")


def test_a_resident_model_is_everybodys_and_stays(anne: Control, bert: Control) -> None:
    with bert.open_session("everybody") as session, anne.open_session("everybody") as own:
        assert refusal(anne, "UnloadModel", model="everybody", force=True).name == "ModelInUse"
        for each in (session, own):
            each.infer(1)
            assert error_name(each.receive()) == ""


def test_a_users_own_name_goes_before_a_resident_models(anne: Control, bert: Control) -> None:
    mine = anne.load(MODEL, name="everybody")
    assert anne.call("DescribeModel", model="everybody")["model"] == mine
    assert bert.call("DescribeModel", model="everybody")["model"]["resident"]
    anne.call("UnloadModel", model="everybody")
    assert anne.call("DescribeModel", model="everybody")["model"]["resident"]


# Five starts of a worker.
@pytest.mark.timeout(60)
def test_a_quarantine_is_one_users(anne: Control, bert: Control) -> None:
    slow = generate.slow(300)
    for user in (anne, bert):
        user.load(slow, name="slow")

    with anne.open_session("slow") as session:
        answered = lost_four_times(anne, session, signal.SIGSEGV)
        assert answered == ("WorkerDied", "ModelQuarantined")

    assert anne.call("DescribeModel", model="slow")["model"]["status"] == "quarantined"
    assert bert.call("DescribeModel", model="slow")["model"]["status"] == "ready"
    with bert.open_session("slow") as session:
        session.infer(1)
        assert error_name(session.receive()) == ""
