"""The preparer at the priority of whoever starts it, for tests of what it says.

At its own, the lowest, it waits for minutes where something else wants the CPU.
"""

from __future__ import annotations

from switchgear.backends import lowest_priority

# Before the preparer takes it from there.
lowest_priority.run_when_idle = lambda: None

from switchgear.backends import preparer  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(preparer.main())
