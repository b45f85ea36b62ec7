"""`switchgear serve`: runs the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import functools
import logging
import sys
from pathlib import Path

from switchgear.daemon import config, listen, paths
from switchgear.daemon.log_limit import LogLimit
from switchgear.daemon.service import serve
from switchgear.daemon.serving_loop import ServingLoop

EXAMPLE = """example:
  switchgear serve --config ./switchgear.toml --socket /tmp/mine/switchgear.sock
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the daemon (systemd, Android init or a terminal)",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    parser.add_argument("--socket", type=Path, help="where to listen")
    parser.add_argument("--state-dir", type=Path, help="folder of what survives a restart")
    parser.add_argument("--cache-dir", type=Path, help="folder of what can be made again")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="what to log"
    )
    parser.set_defaults(run=run)


def _load(path: Path | None) -> config.Configuration:
    if path is None:
        # The usual place may be empty; a file that was named must be there.
        usual = paths.config_path()
        path = usual if usual.exists() else None

    return config.load(path)


def _read(arguments: argparse.Namespace) -> config.Configuration:
    """The configuration, with what the command line overrules."""
    configuration = _load(arguments.config)
    if arguments.log_level is None:
        return configuration

    section = configuration.daemon.model_copy(update={"log_level": arguments.log_level})
    return configuration.model_copy(update={"daemon": section})


def run(arguments: argparse.Namespace) -> int:
    configuration = _read(arguments)
    logging.basicConfig(
        level=configuration.daemon.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # A crash, and the SIGABRT of systemd's watchdog, say in the log where it was.
    faulthandler.enable()
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())

    socket_path = arguments.socket or paths.socket_path()
    state_dir = arguments.state_dir or paths.state_dir()
    cache_dir = arguments.cache_dir or paths.cache_dir()
    opener = functools.partial(listen.open_listener, socket_path.absolute())
    read_again = functools.partial(_read, arguments)
    with asyncio.Runner(loop_factory=ServingLoop) as runner:
        runner.run(serve(configuration, opener, state_dir, cache_dir, read_again=read_again))

    return 0
