"""Writes, reads and bounds one blob again and again: `python cache_writer.py ROOT NUMBER`.

Prints how many reads gave something that nobody wrote. Number 1 deletes all that it can.
"""

from __future__ import annotations

import sys
from pathlib import Path

from switchgear.backends.cache_store import CacheStore, trim

KEY = {"what": "contended"}
SIZE = 50_000
ROUNDS = 25


def main() -> None:
    root, number = Path(sys.argv[1]), int(sys.argv[2])
    store = CacheStore(root)
    wrong = 0
    for _ in range(ROUNDS):
        store.put(KEY, bytes([number]) * SIZE)
        data = store.get(KEY).data
        if data is not None and (len(data) != SIZE or len(set(data)) != 1):
            wrong += 1

        trim(root, 0 if number == 1 else 1 << 30)

    print(wrong)


if __name__ == "__main__":
    main()
