"""Runs `switchgear` as a person types it: in a process of its own, with warnings as errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PREFIX = (sys.executable, "-W", "error", "-m", "switchgear")
# For tests that have more time than others; the rest end at their own limit of 20 s.
_LIMIT_S = 75.0


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment less what would change the command, and what is added."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SWITCHGEAR_")}
    return {**kept, "COLUMNS": "80", "PYTHONUNBUFFERED": "1", **(added or {})}


def switchgear(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; a traceback fails the test whatever the exit status."""
    done = subprocess.run(
        [*PREFIX, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(env),
        cwd=cwd,
        timeout=_LIMIT_S,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def switchgear_json(
    *arguments: str | Path, status: int = 0, env: Mapping[str, str] | None = None
) -> Any:
    """What it prints with `--json`; the exit status has to be `status`."""
    done = switchgear(*arguments, "--json", env=env)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
