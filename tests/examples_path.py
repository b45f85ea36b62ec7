"""Makes the modules of `examples/` importable in tests, as they are for its scripts."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))
