"""Trials of models in disposable processes: limits, ends, and which verdicts are kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from backend_helpers import custom
from worker_under_test import memory_file

from switchgear.backends import generate
from switchgear.daemon import validation
from switchgear.daemon.child import Child
from switchgear.daemon.config import ValidationSection
from switchgear.daemon.validation import Validation, engine_key, shapes_key
from switchgear.ipc.errors import (
    BadModel,
    BadShape,
    InternalError,
    SwitchgearError,
    TimedOut,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = [pytest.mark.engine]

DIGEST = "0" * 64


def check(
    folder: Path,
    model: bytes,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    **section: Any,
) -> Any:
    """The verdict of a new `Validation` in `folder`, or the error."""

    async def run() -> Any:
        tried = Validation(ValidationSection(**section), folder, 1)
        try:
            with memory_file(model) as fd:
                return await tried.check(DIGEST, fd, shapes or {})
        finally:
            tried.flush()

    return asyncio.run(run())


def must_not_be_tried(*_: object, **__: object) -> None:
    raise AssertionError("it was tried again")


def test_a_verdict_is_kept_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = check(tmp_path, generate.two_inputs())
    assert [tensor["name"] for tensor in verdict["inputs"]] == ["a", "b"]
    assert verdict["names"] == "signature"
    assert not verdict["state"]
    assert verdict["run_us"] < 10**7

    monkeypatch.setattr(validation, "Child", must_not_be_tried)
    assert check(tmp_path, generate.two_inputs()) == verdict

    # Another version of the engine may find otherwise.
    monkeypatch.setattr(validation, "engine_key", lambda: "ai-edge-litert 99.0")
    with pytest.raises(AssertionError, match="tried again"):
        check(tmp_path, generate.two_inputs())


def test_the_key_has_the_engine_of_the_metadata() -> None:
    from switchgear.backends.cpu import installed_engine

    assert engine_key() == " ".join(installed_engine()[:2])


def test_choices_of_shapes_have_verdicts_of_their_own(tmp_path: Path) -> None:
    own = check(tmp_path, generate.dynamic_batch())
    chosen = check(tmp_path, generate.dynamic_batch(), {"x": (3, 4)})

    assert own["inputs"][0]["shape"] == [1, 4]
    assert chosen["outputs"][0]["capacity_bytes"] == 48
    with pytest.raises(BadShape, match="takes"):
        check(tmp_path, generate.dynamic_batch(), {"x": (3, 5)})

    assert shapes_key({"b": (2, 1), "a": (3,)}) == shapes_key({"a": (3,), "b": (2, 1)})
    assert shapes_key({}) == ""


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (b"a text\n" * 100, BadModel, "(?i)model"),
        (generate.two_inputs()[:-300], BadModel, "."),
        (custom("Warp"), UnsupportedModel, "Warp"),
    ],
    ids=["text", "cut", "custom"],
)
def test_a_refusal_is_kept_too(
    model: bytes,
    error: type[SwitchgearError],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(error, match=said) as first:
        check(tmp_path, model)

    monkeypatch.setattr(validation, "Child", must_not_be_tried)
    with pytest.raises(error) as second:
        check(tmp_path, model)

    assert first.value.text == second.value.text
    assert first.value.details == second.value.details


def test_a_model_that_takes_too_long_is_ended_and_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = spawned(monkeypatch)
    with pytest.raises(TimedOut, match=r"in 0\.6 s") as caught:
        check(tmp_path, generate.slow(60_000), time_limit_s=0.6)

    assert caught.value.retryable
    assert not (tmp_path / "verdicts.json").exists()
    assert [child.running for child in children] == [False]


def test_a_model_beyond_the_address_space_says_so(tmp_path: Path) -> None:
    model = generate.identity((700 << 20,), "uint8")
    with pytest.raises(BadModel, match=f"{512 << 20} bytes of memory") as caught:
        check(tmp_path, model, address_space_mib=512)

    assert caught.value.details == {
        "domain": "errno",
        "driver_code": 12,
        "driver_name": "ENOMEM",
    }
    # With more memory it may pass.
    assert not (tmp_path / "verdicts.json").exists()


def test_shapes_beyond_the_address_space_are_bad_shapes(tmp_path: Path) -> None:
    with pytest.raises(BadShape, match=r"memory|refuses"):
        check(tmp_path, generate.dynamic_batch(), {"x": (60_000_000, 4)}, address_space_mib=512)


class Ending:
    """In place of the validator: a process that ends, with what it says."""

    def __init__(self, script: str) -> None:
        self.script = script

    def install(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "ending.py").write_text(self.script)
        monkeypatch.setenv("PYTHONPATH", str(folder))

        def instead(_module: str, *arguments: Any, **keywords: Any) -> Any:
            return Child("ending", *arguments, **keywords)

        monkeypatch.setattr(validation, "Child", instead)


@pytest.mark.parametrize(
    ("script", "said", "kept"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal:11 SIGSEGV", True),
        ("import os; os.abort()", "signal:6 SIGABRT", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal:9 SIGKILL", False),
        ("raise SystemExit('the reason')", "exit status 1: the reason", False),
    ],
    ids=["segfault", "abort", "kill", "exit"],
)
def test_a_model_that_ends_its_process(
    script: str, said: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ending(script).install(tmp_path, monkeypatch)
    state = tmp_path / "state"
    with pytest.raises(BadModel, match=said):
        check(state, b"model")

    # A kill comes when memory is short, a status from Python: neither tells of the model.
    assert (state / "verdicts.json").exists() is kept


@pytest.mark.parametrize(
    "script",
    ["print('nothing')", "print('{}')", "print('x' * (2 << 20))", "print('{\"ok\": true}')"],
    ids=["text", "empty", "flood", "fields"],
)
def test_what_is_no_verdict_is_not_believed(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ending(script).install(tmp_path, monkeypatch)
    with pytest.raises((InternalError, BadModel)):
        check(tmp_path / "state", b"model")

    assert not (tmp_path / "state" / "verdicts.json").exists()


def test_at_most_so_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    script = (
        "import os, pathlib, sys, time\n"
        f"folder = pathlib.Path({str(marks)!r})\n"
        "(folder / str(os.getpid())).touch()\n"
        "count = len(list(folder.iterdir()))\n"
        "time.sleep(0.1)\n"
        "(folder / str(os.getpid())).unlink()\n"
        "sys.exit(f'{count} at once')\n"
    )
    Ending(script).install(tmp_path, monkeypatch)

    async def run() -> list[str]:
        tried = Validation(ValidationSection(at_once=2), tmp_path / "state", 1)
        with memory_file(b"model") as fd:
            checks = [tried.check(str(n), fd, {}) for n in range(6)]
            ended = await asyncio.gather(*checks, return_exceptions=True)

        return [str(error).rpartition(": ")[2] for error in ended]

    said = asyncio.run(run())
    assert set(said) <= {"1 at once", "2 at once"}
    assert "2 at once" in said


def test_a_trial_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = spawned(monkeypatch)

    async def run() -> None:
        tried = Validation(ValidationSection(), tmp_path, 1)
        with memory_file(generate.slow(60_000)) as fd:
            task = asyncio.create_task(tried.check(DIGEST, fd, {}))
            # Its first step spawns the process.
            await asyncio.sleep(0)
            assert [child.running for child in children] == [True]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        assert not children[0].running

    asyncio.run(run())


def spawned(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The processes that are started from now on."""
    children: list[Child] = []

    def noted(*arguments: Any, **keywords: Any) -> Child:
        children.append(Child(*arguments, **keywords))
        return children[-1]

    monkeypatch.setattr(validation, "Child", noted)
    return children
