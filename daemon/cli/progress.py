"""Progress on standard error: a line that changes on a terminal, a line per phase elsewhere."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TextIO

if TYPE_CHECKING:
    from switchgear.client import Progress

_BAR_CELLS: Final = 24


class ProgressLine:
    """Shows how far something is; use it with `with`, so that the line ends with the work.

    `update` is called as often as there is news; it writes only what is new.
    """

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = ""
        self._phase = ""

    def update(self, phase: str, done: float = 0.0, total: float = 0.0) -> None:
        """`done` of `total`, in any unit; a total of 0 is an unknown one."""
        if not self._terminal:
            if phase and phase != self._phase:
                self._phase = phase
                self._write(f"{self._what}: {phase}\n")

            return

        line = f"{self._what}: {phase}"
        if total > 0:
            line = f"{bar(done / total)} {min(done / total, 1.0):4.0%} {line}"

        width = shutil.get_terminal_size().columns - 1
        line = line[:width]
        if line != self._shown:
            self._write(f"\r{line.ljust(min(width, len(self._shown)))}")
            self._shown = line

    def job(self, progress: Progress) -> None:
        """A job's news, as `Client.load_model` and `check_model` report it."""
        if progress.state == "running":
            self.update(progress.phase, progress.done, progress.total)

    def end(self) -> None:
        """Leaves the line; what is written next begins a new one."""
        if self._terminal and self._shown:
            self._write("\n")
            self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """`[####----]` for a share of 0 to 1."""
    full = round(min(max(share, 0.0), 1.0) * cells)
    return "[" + "#" * full + "-" * (cells - full) + "]"
