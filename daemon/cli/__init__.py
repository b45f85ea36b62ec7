"""The `switchgear` command."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Final

from switchgear.ipc.errors import BadConfiguration, BadRequest, SwitchgearError

# Each is a module here with `add_parser`; only the one that is asked for is imported.
COMMANDS: Final = {
    "serve": "run the daemon (systemd, Android init or a terminal)",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status (0 done, 1 failed, 2 wrong usage)."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="switchgear",
        description="Runs apps' inference on the best backend of this device.",
        epilog="example:\n  switchgear infer model.tflite --image photo.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        if wanted == name:
            importlib.import_module(f"switchgear.daemon.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text, add_help=False)

    options = parser.parse_args(arguments)
    if options.version:
        import switchgear

        print(f"switchgear {switchgear.__version__}")
        return 0

    if not hasattr(options, "run"):
        parser.print_help(sys.stderr)
        return 2

    return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        status: int = options.run(options)
    except (BadRequest, BadConfiguration) as error:
        _tell(options, error)
        return 2
    except SwitchgearError as error:
        _tell(options, error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has seen enough.
        sys.stderr.close()
        return 1

    return status


def _tell(options: argparse.Namespace, error: SwitchgearError) -> None:
    print(f"switchgear: {error.name}: {error.text}", file=sys.stderr)
    if getattr(options, "json", False):
        fields = {"error": error.name, "code": error.code, "message": error.text}
        print(json.dumps({**fields, "details": error.details}))
