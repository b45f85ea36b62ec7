"""`python -m switchgear` is the `switchgear` command."""

from __future__ import annotations

import sys

from switchgear.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
