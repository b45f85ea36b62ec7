"""Profiles of older schemas, made into current ones without inventing anything.

Schema 1 was flat, and had neither devices nor zones nor files in its key:

    {"soc": TEXT, "kernel": TEXT, "engines": {PACKAGE: VERSION}, "measured_at": SECONDS,
     "throttle_c": NUMBER or null, "reports": [REPORT, ...]}

A report is what `switchgear.fingerprints.measurement.Report.to_json` writes. The numbers mean
the same in schema 2, so they are kept; the driver files are not known, so that every test that
depends on a driver is stale and is measured again, while the CPU's numbers hold.
"""

from __future__ import annotations

import math
from typing import Any, Final

from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.key import UNKNOWN, engine_inputs
from switchgear.fingerprints.measurement import CPU, TESTS, report_from_json
from switchgear.fingerprints.profile import SCHEMA_VERSION, Key, Profile

OLDEST_SCHEMA: Final = 1


def migrate(schema: int, data: Any) -> Profile:
    """The current profile that an older schema's content amounts to.

    Raises `ValueError` for content that is not of that schema, and for a schema that there is
    no migration from.
    """
    if schema == 1:
        return _from_schema_1(data)

    raise ValueError(f"there is no migration from schema {schema}")


def _from_schema_1(data: Any) -> Profile:
    if not isinstance(data, dict):
        raise ValueError("the profile is not an object")

    soc = _text(data, "soc")
    kernel = _text(data, "kernel")
    engines = data.get("engines")
    measured_at = data.get("measured_at")
    throttle_c = data.get("throttle_c")
    reports = data.get("reports")
    if not isinstance(engines, dict) or not all(
        isinstance(text, str) for text in (*engines, *engines.values())
    ):
        raise ValueError("engines is not an object of texts")

    if not isinstance(measured_at, int) or isinstance(measured_at, bool):
        raise ValueError("measured_at is not a number of seconds")

    if throttle_c is not None and not _is_number(throttle_c):
        raise ValueError("throttle_c is not a number")

    if not isinstance(reports, list):
        raise ValueError("reports is not a list")

    parts = {test: {"files": "not recorded by schema 1"} for test in TESTS}
    parts[CPU] = {
        "soc": soc,
        "kernel": kernel,
        "schema": str(SCHEMA_VERSION),
        "image": UNKNOWN,
        "cpus": UNKNOWN,
        **engine_inputs(CPU, engines),
    }
    key = Key(
        schema_version=SCHEMA_VERSION,
        soc=soc,
        soc_source="schema 1",
        kernel=kernel,
        engines=engines,
        parts=parts,
    )
    # The only threshold of schema 1 was the one an operator had set.
    operator_c = {} if throttle_c is None else {"gpu": float(throttle_c)}
    return assemble(
        [report_from_json(report) for report in reports],
        key=key,
        measured_at=measured_at,
        operator_c=operator_c,
    )


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text")

    return value


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
