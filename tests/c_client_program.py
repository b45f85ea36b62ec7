"""The C client in a process of its own, driven line by line; see `native/c_client_driver.c`.

It is built with AddressSanitizer and UndefinedBehaviorSanitizer: whatever they find ends the
process, and with it the test.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import native_build
from devices import missing, require_compiler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

SOURCES: Final = Path(__file__).resolve().parent.parent / "client" / "c"
SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
# -Werror: a warning of the client is one in every program that holds it.
WARNINGS: Final = (
    *("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"),
)
_PROBE: Final = "int main(void) { return 0; }\n"
_SANITIZER_OPTIONS: Final = {
    "ASAN_OPTIONS": "abort_on_error=0:exitcode=99:detect_leaks=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class DriverError(Exception):
    """An answer of the driver that says error."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        _, code, self.name, retry, self.domain, driver, self.text = [
            *line.split(" ", 6),
            "",
        ][:7]
        self.code = int(code)
        self.retry_after_ms = int(retry)
        self.driver_code = int(driver)


@functools.cache
def build(name: str, *options: str) -> Path:
    """`client/c` with a main program, which is `example` or the tests' driver."""
    main = {
        "example": SOURCES / "example.c",
        "driver": native_build.NATIVE / "c_client_driver.c",
    }[name]
    target = native_build.folder() / "-".join([name, *(o.strip("-")[:12] for o in options)])
    command = [
        *(require_compiler(), *options, f"-I{SOURCES}", "-o", str(target)),
        *(str(main), str(SOURCES / "switchgear.c")),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target


@functools.cache
def _sanitizers_work() -> bool:
    source = native_build.folder() / "sanitizers.c"
    source.write_text(_PROBE)
    target = source.with_suffix("")
    command = [require_compiler(), *SANITIZERS, "-o", str(target), str(source)]
    if subprocess.run(command, capture_output=True).returncode:
        return False

    return subprocess.run([str(target)], capture_output=True).returncode == 0


def sanitized() -> Path:
    """The driver with the sanitizers; skips where the compiler has none."""
    if not _sanitizers_work():
        missing("no AddressSanitizer; install libasan and libubsan of your gcc")

    return build("driver", "-O1", "-std=c11", *SANITIZERS)


class Driver:
    """The running program; use it with `with`. At the end it has to leave without a finding."""

    def __init__(self, program: Path, environment: dict[str, str] | None = None) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SWITCHGEAR_")}
        self._process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**kept, **_SANITIZER_OPTIONS, **(environment or {})},
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _, said = self._process.communicate()
        if kind is None:
            assert self._process.returncode == 0, said
            assert said == ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line, as it is.

        Raises AssertionError with what the sanitizers said when the program ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            _, said = self._process.communicate()
            raise AssertionError(f"the program ended: {said[-4000:]}")

        return line.rstrip("\n")

    def do(self, *words: object) -> str:
        """One command; its answer without "ok". Raises DriverError for an error."""
        self.send(*words)
        line = self.answer()
        if " error " in f" {line}"[:20]:
            raise DriverError(line[line.index("error ") :])

        assert line.startswith("ok"), line
        return line[2:].strip()

    def fails(self, *words: object) -> DriverError:
        """One command that has to fail; its error."""
        try:
            said = self.do(*words)
        except DriverError as error:
            return error

        raise AssertionError(f"{words} did not fail: {said}")


def floats(answer: str, output: int = 0) -> list[float]:
    """The numbers of an output in the answer to `run`, `wait` or `any`."""
    part = answer.split(" | ")[output + 1]
    return [float(word) for word in part.rpartition(" :")[2].split()]


def filled(driver: Driver, slot: int, values: Sequence[float], tensor: int = 0) -> None:
    driver.do("fill", slot, tensor, *values)
