"""A preparer as the daemon sees it: a process that tries one pair and says how that went."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from switchgear.daemon.child import Child, describe_end
from switchgear.ipc.errors import TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from switchgear.daemon.model import Model
    from switchgear.daemon.pair import Pair
    from switchgear.daemon.verdicts import Verdict

MODULE: Final = "switchgear.backends.preparer"
MAX_LINE_BYTES: Final = 1 << 20
# Time that it stands still counts, up to this many times the limit in all.
STILL_FACTOR: Final = 10

log = logging.getLogger(__name__)


class Preparer:
    """Spawned at construction, which may raise OSError. `on_step` hears each step's name;
    `cache` is the folder of the model's prepared files.

    `again`: the pair was prepared before; it is loaded as a serving worker loads it.
    """

    def __init__(
        self,
        model: Model,
        pair: Pair,
        options: Mapping[str, Any],
        *,
        cache: Path,
        markers: Path,
        tune_s: float,
        again: bool,
        on_step: Callable[[str], None],
    ) -> None:
        self._label = f"{model.label} on {pair.label}"
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._verdict: Verdict | None = None
        self._paused = False
        self._resting = False
        # Seconds that it stood still, and since when it does.
        self._still_s = 0.0
        self._still_since: float | None = None
        self._child = Child(
            MODULE,
            [
                f"--fd={model.fd}",
                f"--backend={pair.backend}",
                f"--precision={pair.asked}",
                f"--cache={cache}",
                f"--options={json.dumps(dict(options))}",
                f"--tune={tune_s:g}",
                f"--digest={model.digest}",
                f"--markers={markers}",
                *(["--again"] if again else []),
            ],
            [model.fd],
            self._exited,
            capture_limit_bytes=MAX_LINE_BYTES,
            on_stderr_line=self._said,
            on_stdout_line=self._line,
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def _exited(self, returncode: int) -> None:
        if not self._ended.done():
            self._ended.set_result(returncode)

    def _said(self, line: str) -> None:
        if line.strip():
            log.debug("preparer %s: %s", self._label, line)

    def _line(self, line: bytes) -> None:
        try:
            data = json.loads(line)
            if "ok" in data:
                self._verdict = data
            else:
                self._on_step(str(data["step"])[:64])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("preparer %s wrote what is no step: %r", self._label, error)

    async def verdict(self, limit_s: float) -> Verdict:
        """How it ended; after `limit_s` of running it is killed."""
        begin_s = self._loop.time()
        while not self._ended.done():
            ran_s = self._loop.time() - begin_s - self._stood_still_s()
            left_s = min(
                limit_s - ran_s, STILL_FACTOR * limit_s - (self._loop.time() - begin_s)
            )
            if left_s <= 0:
                self._child.kill()
                text = f"it was not prepared within {limit_s:g} s"
                return failed(TimedOut.code, "TimedOut", text)

            await asyncio.wait([self._ended], timeout=left_s)

        returncode = self._ended.result()
        if self._verdict is not None:
            return self._verdict

        text = f"the driver ended its process: {describe_end(returncode)}"
        if returncode >= 0:
            text = f"the preparer gave no verdict: {describe_end(returncode)}"

        if last := self._child.stderr.rpartition("\n")[2]:
            text += f": {last[:300]}"

        domain = "signal" if returncode < 0 else "switchgear"
        return {
            **failed(abs(returncode), "CRASHED", text, domain),
            "died": returncode < 0,
        }

    def _stood_still_s(self) -> float:
        since = self._still_since
        return self._still_s + (self._loop.time() - since if since is not None else 0.0)

    # Standing still: for requests, or because of heat.

    def pause(self) -> None:
        self._paused = True
        self._apply()

    def go_on(self) -> None:
        self._paused = False
        self._apply()

    def rest(self, wanted: bool) -> None:
        """Like `pause` and `go_on`, for another reason: it runs when neither holds."""
        self._resting = wanted
        self._apply()

    def _apply(self) -> None:
        still = self._paused or self._resting
        if still and self._still_since is None:
            self._still_since = self._loop.time()
            self._child.pause()
        elif not still and self._still_since is not None:
            self._still_s = self._stood_still_s()
            self._still_since = None
            self._child.go_on()

    async def close(self) -> None:
        """Ends it, if it runs, and waits until it is reaped."""
        await self._child.end()


def failed(code: int, name: str, text: str, domain: str = "switchgear") -> Verdict:
    """The verdict of a preparer that gave none itself."""
    return {
        "ok": False,
        "verdict": "failed",
        "domain": domain,
        "code": code,
        "name": name,
        "text": text,
    }
