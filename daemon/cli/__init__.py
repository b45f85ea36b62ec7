"""The `switchgear` command."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Final

from switchgear.daemon.cli.command import CommandError, UsageError
from switchgear.ipc.errors import BadConfiguration, BadRequest, SwitchgearError

# Each is a module here with `add_parser`; only the one that is asked for is imported.
COMMANDS: Final = {
    "serve": "run the daemon (systemd, Android init or a terminal)",
    "status": "whether the daemon is fine, and what it is doing",
    "model": "load, list, check or unload models",
    "prewarm": "compile and check models on every backend now, and fill the caches",
    "infer": "run a model once on an image or on .npy files",
    "explain": "why a request ran where it ran",
    "bench": "latency through the daemon beside in-process",
    "fingerprint": "measure this device; show, dump or compare what was measured",
    "top": "live screen of backends, queues, latencies and events",
    "metrics": "what the daemon counts: requests, latencies, breakers, temperatures",
    "trace": "record what happens to requests; ui.perfetto.dev opens the file",
    "simulate": "policies against a heating device, in virtual time",
    "install-service": "systemd units for this machine",
    "doctor": "what is missing on this machine, and the command that fixes it",
}
INTERRUPTED: Final = 130


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (0 done, 1 failed, 2 wrong usage)."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="switchgear",
        description="Runs apps' inference on the best backend of this device.",
        epilog="examples:\n  switchgear serve\n"
        "  switchgear infer model.tflite --image photo.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        if wanted == name:
            module = name.replace("-", "_")
            importlib.import_module(f"switchgear.daemon.cli.{module}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text, add_help=False)

    options = parser.parse_args(arguments)
    if options.version:
        options.run = _print_version

    if not hasattr(options, "run"):
        parser.print_help(sys.stderr)
        return 2

    return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except (BadRequest, BadConfiguration, UsageError) as error:
        _tell(options, error)
        return 2
    except (SwitchgearError, CommandError) as error:
        _tell(options, error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough; the interpreter's own flush at its end must not fail too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 1

    return status


def _print_version(options: argparse.Namespace) -> int:
    import switchgear

    print(f"switchgear {switchgear.__version__}")
    return 0


def _tell(options: argparse.Namespace, error: Exception) -> None:
    """The error for people on stderr; with `--json` for programs on stdout too."""
    fields: dict[str, object] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, SwitchgearError):
        print(f"switchgear: {error.name}: {error.text}", file=sys.stderr)
        fields |= {"message": error.text, "code": error.code, "details": error.details}
    else:
        print(f"switchgear: {error}", file=sys.stderr)

    if getattr(options, "json", False):
        print(json.dumps(fields, default=str))
