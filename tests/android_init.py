"""Lints an Android init file against its grammar, as the language's description has it.

The only real validator, init's own host_init_verifier, is not packaged anywhere. The table
has what such a service may use, with the number of arguments; what is not in it is an error, so
that a new line makes somebody look it up.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Final

# Least and most arguments; None for any number.
SERVICE_OPTIONS: Final[dict[str, tuple[int, int | None]]] = {
    "capabilities": (0, None),
    "class": (1, None),
    "critical": (0, 2),
    "disabled": (0, 0),
    "enter_namespace": (2, 2),
    "gentle_kill": (0, 0),
    "group": (1, 12),
    "interface": (2, 2),
    "ioprio": (2, 2),
    "oneshot": (0, 0),
    "onrestart": (1, None),
    "oom_score_adjust": (1, 1),
    "override": (0, 0),
    "priority": (1, 1),
    "reboot_on_failure": (1, 1),
    "restart_period": (1, 1),
    "rlimit": (3, 3),
    "seclabel": (1, 1),
    "setenv": (2, 2),
    "shared_kallsyms": (0, 0),
    "shutdown": (1, 1),
    "sigstop": (0, 0),
    "socket": (3, 6),
    "stdio_to_kmsg": (0, 0),
    "task_profiles": (1, None),
    "timeout_period": (1, 1),
    "updatable": (0, 0),
    "user": (1, 1),
    "writepid": (1, None),
}
COMMANDS: Final[dict[str, tuple[int, int | None]]] = {
    "chmod": (2, 2),
    "chown": (2, 3),
    "class_start": (1, 1),
    "enable": (1, 1),
    "mkdir": (1, 6),
    "restart": (1, 2),
    "restorecon": (1, None),
    "restorecon_recursive": (1, None),
    "rm": (1, 1),
    "setprop": (2, 2),
    "start": (1, 1),
    "stop": (1, 1),
    "write": (2, 2),
}
RLIMITS: Final = frozenset(
    (
        *("as", "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice"),
        *("nofile", "nproc", "rss", "rtprio", "rttime", "sigpending", "stack"),
    )
)
EVENTS: Final = frozenset(
    (
        *("early-init", "init", "late-init", "early-fs", "fs", "post-fs", "post-fs-data"),
        *("boot", "charger"),
    )
)
_OF_A_SERVICE: Final = ("start", "stop", "enable", "restart")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,}")
_PROPERTY: Final = re.compile(r"property:[A-Za-z0-9_.@:-]+=(\*|[^\s=]+)")
_SOCKET_TYPE: Final = re.compile(r"(dgram|stream|seqpacket)(\+passcred|\+listen)*")
_MODE: Final = re.compile(r"0?[0-7]{3}")


@dataclass
class Service:
    name: str
    command: list[str]
    options: list[list[str]] = field(default_factory=list)

    def option(self, name: str) -> list[str] | None:
        """The arguments of an option; None where it is not there."""
        return next((words[1:] for words in self.options if words[0] == name), None)


@dataclass
class InitFile:
    """What an init file holds, and what is wrong with it: lines with their number."""

    services: dict[str, Service] = field(default_factory=dict)
    actions: dict[str, list[list[str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse(text: str) -> InitFile:
    found = InitFile()
    section: Service | list[list[str]] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            found.problems.append(f"{number}: {error}")
            continue

        if not words:
            continue

        begins = words[0] in ("service", "on", "import")
        if begins:
            section, problem = _begin(found, words)
        elif section is None:
            problem = f"{words[0]} stands in no section"
        elif isinstance(section, Service):
            section.options.append(words)
            problem = _option_problem(words)
        else:
            section.append(words)
            problem = _count_problem(words, COMMANDS, "command")

        if begins == line[0].isspace():
            problem = problem or "a section begins at the margin, and what is in it does not"

        if problem:
            found.problems.append(f"{number}: {problem}")

    for service in found.services.values():
        found.problems += [f"{service.name}: {text}" for text in _service_problems(service)]

    for commands in found.actions.values():
        for words in commands:
            if words[0] in _OF_A_SERVICE and words[-1] not in found.services:
                found.problems.append(f"{words[0]} {words[-1]}: no such service")

    return found


def _begin(found: InitFile, words: list[str]) -> tuple[Service | list[list[str]] | None, str]:
    if words[0] == "service":
        if len(words) < 3 or not _NAME.fullmatch(words[1]) or not words[2].startswith("/"):
            return None, "a service has a name and the path of a program"

        if words[1] in found.services:
            return None, f"service {words[1]} stands there twice"

        service = found.services[words[1]] = Service(words[1], words[2:])
        return service, ""

    if words[0] == "import":
        return None, "" if len(words) == 2 else "import takes one path"

    triggers = " ".join(words[1:]).split(" && ")
    commands: list[list[str]] = found.actions.setdefault(" && ".join(triggers), [])
    for trigger in triggers:
        if trigger not in EVENTS and not _PROPERTY.fullmatch(trigger):
            return commands, f"{trigger!r} is no trigger"

    if sum(trigger in EVENTS for trigger in triggers) > 1:
        return commands, "an action has one event at most"

    return commands, ""


def _count_problem(
    words: list[str], table: dict[str, tuple[int, int | None]], kind: str
) -> str:
    if words[0] not in table:
        return f"unknown {kind} {words[0]}"

    least, most = table[words[0]]
    count = len(words) - 1
    if count < least or (most is not None and count > most):
        return f"{words[0]} takes {least} to {most} arguments, not {count}"

    return ""


def _option_problem(words: list[str]) -> str:
    problem = _count_problem(words, SERVICE_OPTIONS, "option")
    if problem:
        return problem

    name, *values = words
    if name == "socket":
        if not _SOCKET_TYPE.fullmatch(values[1]):
            return f"{values[1]} is no type of socket"

        if not _MODE.fullmatch(values[2]):
            return f"{values[2]} is no mode"

    if name == "rlimit":
        if values[0].lower().removeprefix("rlim_").removeprefix("rlimit_") not in RLIMITS:
            return f"there is no limit {values[0]}"

        if not all(value.isdecimal() or value in ("-1", "unlimited") for value in values[1:]):
            return "a limit is a number"

    if name == "oom_score_adjust" and not -1000 <= _number(values[0]) <= 1000:
        return "oom_score_adjust goes from -1000 to 1000"

    if name in ("restart_period", "timeout_period") and _number(values[0]) < 1:
        return f"{name} is a number of seconds"

    return ""


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return -(1 << 31)


def _service_problems(service: Service) -> list[str]:
    names = [words[0] for words in service.options]
    repeatable = ("socket", "setenv", "rlimit", "onrestart", "interface", "writepid")
    found = [
        f"{name} stands there twice"
        for name in sorted(set(names))
        if names.count(name) > 1 and name not in repeatable
    ]
    if "user" not in names:
        found.append("no user: Android 16 refuses it")

    return found
