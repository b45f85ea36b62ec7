"""Writes generated models to files: `python -m switchgear.backends.generate FOLDER [NAME ...]`.

For programs that have no schema to write them with: another engine's environment, an app in
another language, a benchmark tool.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from switchgear.backends import generate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MODELS: Final[Mapping[str, Callable[[], bytes]]] = {
    "accumulator": generate.accumulator,
    "dynamic_batch": generate.dynamic_batch,
    "identity_no_signature": partial(generate.identity, signature=False),
    "leading_values_16_mib": partial(generate.leading_values, 4 << 20),
    "lookup": generate.lookup,
    "mobilenet_v1": generate.mobilenet_v1,
    "mobilenet_v1_int8": partial(generate.mobilenet_v1, quantised=True),
    "positive_positions": generate.positive_positions,
    "ramp": generate.ramp,
    "slow_100_ms": partial(generate.slow, 100),
    "two_inputs": generate.two_inputs,
    **{
        f"identity_{dtype}": partial(generate.identity, dtype=dtype)
        for dtype in generate.IDENTITY_DTYPES
    },
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m switchgear.backends.generate",
        description="Write generated .tflite models to FOLDER/NAME.tflite.",
        epilog="example: python -m switchgear.backends.generate /tmp/models mobilenet_v1",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made when missing")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"default: all of {', '.join(MODELS)}",
    )
    options = parser.parse_args(argv)
    # argparse's own `choices` refuse an empty list of names.
    unknown = sorted(set(options.names) - set(MODELS))

    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}")

    options.folder.mkdir(parents=True, exist_ok=True)

    for name in options.names or MODELS:
        path = options.folder / f"{name}.tflite"
        path.write_bytes(MODELS[name]())
        sys.stdout.write(f"{path}\n")

    return 0


if __name__ == "__main__":
    sys.exit(main())
