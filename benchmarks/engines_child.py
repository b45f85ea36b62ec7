"""One pair in a process of its own, for `engines.py`: what the preparer does, not slowed down.

python engines_child.py MODEL BACKEND PRECISION CACHE OPTIONS cold|warm
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from switchgear.backends.preparation import Order, Preparation
from switchgear.backends.registry import open_backend


def main() -> int:
    path, backend, precision, cache, options, temperature = sys.argv[1:]
    # Drivers print to standard output as they like.
    channel = os.dup(1)
    os.dup2(2, 1)
    if cache:
        Path(cache).mkdir(mode=0o700, parents=True, exist_ok=True)

    order = Order(path, precision, cache=cache, again=temperature == "warm")
    result: dict[str, Any] = Preparation(
        lambda: open_backend(backend, json.loads(options)), order, lambda _: None
    ).run()
    os.write(channel, json.dumps(result).encode() + b"\n")
    # Drivers register exit handlers that hang or crash: all is said, so leave.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
