"""Profile files for tests: a whole one, one of the previous schema, and any content sealed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from profile_helpers import profile

from switchgear.fingerprints.store import encode

SCHEMA_1 = (Path(__file__).parent / "data" / "profile" / "schema_1.json").read_bytes()
WHOLE = encode(profile())


def checksum(content: Any) -> str:
    """As docs/fingerprint.md says it, without the store's code."""
    compact = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(compact.encode("ascii")).hexdigest()


def sealed(schema: Any, content: Any, **changes: Any) -> bytes:
    """An envelope with the right checksum over any content."""
    envelope = {
        "format": "switchgear-fingerprint",
        "schema": schema,
        "sha256": checksum(content),
        "profile": content,
    }
    return json.dumps(envelope | changes).encode()


def content() -> Any:
    return json.loads(WHOLE)["profile"]
