"""Tries models in disposable processes, and keeps the verdicts by hash and engine version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from switchgear.daemon.child import Child, describe_end
from switchgear.daemon.config import ValidationSection
from switchgear.daemon.verdicts import Verdict, Verdicts, check_verdict
from switchgear.ipc.errors import BY_CODE, BadModel, InternalError, SwitchgearError, TimedOut

MAX_VERDICT_BYTES: Final = 1 << 20
# Ends that are the model's doing. SIGKILL comes from the system, when its memory is full, or
# from a person; an exit status from Python, where something is not installed as it should be.
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
)

Shapes = Mapping[str, tuple[int, ...]]


def engine_key() -> str:
    """The engine and version that a worker here will use, from package metadata only."""
    for distribution in ("ai-edge-litert", "tflite-runtime"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{distribution} {version(distribution)}"

    return "none"


def shapes_key(shapes: Shapes) -> str:
    """One string for a choice of input shapes; empty for the model's own."""
    if not shapes:
        return ""

    return json.dumps({name: list(shape) for name, shape in sorted(shapes.items())})


class Validation:
    """At most `at_once` disposable processes; verdicts are kept over restarts."""

    def __init__(self, section: ValidationSection, folder: Path, threads: int) -> None:
        self._section = section
        self._threads = threads
        self._gate = asyncio.Semaphore(section.at_once)
        self._engine = engine_key()
        self.verdicts = Verdicts(folder / "verdicts.json", check_verdict)

    def _key(self, digest: str, shapes: Shapes) -> str:
        return f"{digest} {self._engine} {shapes_key(shapes)}"

    def known(self, digest: str, shapes: Shapes) -> Verdict | None:
        """The kept verdict of a sound model; None where there is none or it was refused."""
        verdict = self.verdicts.get(self._key(digest, shapes))
        return verdict if verdict is not None and verdict["ok"] else None

    async def check(
        self, digest: str, fd: int, shapes: Shapes, *, again: bool = False
    ) -> Verdict:
        """The verdict of a sound model, from the kept ones or from a new trial.

        :raises SwitchgearError: BadModel, UnsupportedModel or BadShape, with the reason;
            TimedOut."""
        key = self._key(digest, shapes)
        verdict = None if again else self.verdicts.get(key)
        if verdict is None:
            async with self._gate:
                verdict = await self._try(fd, shapes)

            # Not where the next trial may end otherwise: the machine was busy or full.
            if verdict.pop("lasting", True):
                self.verdicts.keep(key, verdict)

        if not verdict["ok"]:
            raise _refusal(verdict)

        return verdict

    def flush(self) -> None:
        """Waits until all verdicts are on disk; blocks."""
        self.verdicts.flush()

    async def _try(self, fd: int, shapes: Shapes) -> Verdict:
        section = self._section
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_exit(returncode: int) -> None:
            if not ended.done():
                ended.set_result(returncode)

        arguments = [
            f"--fd={fd}",
            f"--shapes={json.dumps({n: list(s) for n, s in shapes.items()})}",
            f"--address-space={section.address_space_mib << 20}",
            f"--cpu-seconds={int(section.time_limit_s * self._threads) + 1}",
            f"--options={json.dumps({'threads': self._threads})}",
        ]
        child = Child(
            "switchgear.backends.validator",
            arguments,
            [fd],
            on_exit,
            capture_limit_bytes=MAX_VERDICT_BYTES,
        )
        try:
            async with asyncio.timeout(section.time_limit_s):
                returncode = await asyncio.shield(ended)
        except TimeoutError:
            text = f"the model did not parse, allocate and run in {section.time_limit_s:g} s"
            return _refused(TimedOut, text, lasting=False)
        finally:
            await child.end()

        if returncode != 0:
            text = f"the model ended the process that tried it: {describe_end(returncode)}"
            last = child.stderr.rpartition("\n")[2][:500]
            if returncode > 0:
                text += f": {last}"

            return _refused(BadModel, text, lasting=-returncode in _CRASHES)

        try:
            verdict: Verdict = json.loads(child.stdout)
            check_verdict(verdict)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InternalError(f"the validator gave no verdict: {error!r}") from None

        return verdict


def _refused(error: type[SwitchgearError], text: str, *, lasting: bool) -> Verdict:
    return {
        "ok": False,
        "domain": "switchgear",
        "code": error.code,
        "name": error.__name__,
        "text": text,
        "lasting": lasting,
    }


def _refusal(verdict: Verdict) -> SwitchgearError:
    text = str(verdict.get("text", ""))
    if verdict.get("domain") == "switchgear":
        return BY_CODE.get(int(verdict["code"]), BadModel)(text)

    return BadModel(
        text,
        domain=str(verdict.get("domain")),
        driver_code=int(verdict.get("code", 0)),
        driver_name=str(verdict.get("name")),
    )
