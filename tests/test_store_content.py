"""What a profile file may hold: the checksum, the migration, and anything else at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_helpers import profile
from store_files import SCHEMA_1, WHOLE, checksum, sealed

from switchgear.fingerprints.dump import FORMATS, render
from switchgear.fingerprints.key import current_key, stale_parts
from switchgear.fingerprints.measurement import CPU, TESTS, Value
from switchgear.fingerprints.store import ProfileStore, decode, encode


@pytest.mark.parametrize("data", [WHOLE, SCHEMA_1], ids=["current", "schema 1"])
def test_anyone_can_check_the_checksum(data: bytes) -> None:
    envelope = json.loads(data)
    assert checksum(envelope["profile"]) == envelope["sha256"]


def test_schema_1_is_migrated_and_keeps_its_numbers(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.path.write_bytes(SCHEMA_1)
    loaded = store.load()
    assert loaded.problem is None
    assert loaded.migrated_from == 1
    migrated = loaded.profile
    assert migrated is not None
    (matmul,) = list(migrated.of_test("vulkan_matmul"))
    assert isinstance(matmul.value("matmul_ms"), Value)
    gpu = migrated.device(matmul.device_id)
    assert gpu is not None
    assert {subject.api for subject in gpu.apis} == {"vulkan", "opencl"}
    assert (gpu.threshold.throttle_c, gpu.threshold.source) == (62.5, "operator")
    assert store.save(migrated) is None
    again = store.load()
    assert (again.profile, again.migrated_from) == (migrated, None)


def test_after_migration_only_what_depends_on_drivers_is_stale() -> None:
    migrated, schema = decode(SCHEMA_1)
    assert schema == 1
    old = migrated.key.parts
    now = current_key()
    new = {test: dict(part) for test, part in now.parts.items()}
    for test in TESTS:
        # The same machine, as far as schema 1 knew it.
        new[test] |= {"soc": old[CPU]["soc"], "kernel": old[CPU]["kernel"]}
        new[test]["engine:ai-edge-litert"] = old[CPU]["engine:ai-edge-litert"]

    stale = stale_parts(migrated.key, now.model_copy(update={"parts": new}))
    assert set(stale) == set(TESTS) - {CPU}


@pytest.mark.parametrize("field", ["soc", "kernel", "engines", "measured_at", "reports"])
@pytest.mark.parametrize("value", [None, True, [1], {"a": 1}, "x", 10**400])
def test_a_bad_schema_1_is_refused(field: str, value: object) -> None:
    old = json.loads(SCHEMA_1)["profile"]
    if (field, value) in (("soc", "x"), ("kernel", "x")):
        value = 3

    with pytest.raises(ValueError):
        decode(sealed(1, old | {field: value}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_profile_or_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


@given(st.sampled_from([0, 1, 2, 3, -1]), JSON)
def test_any_sealed_content_is_a_profile_or_a_value_error(schema: int, data: object) -> None:
    with pytest.raises(ValueError):
        decode(sealed(schema, data))


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_profile_is_never_taken_for_another(data: st.DataObject) -> None:
    damaged = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))

    del damaged[data.draw(st.integers(0, len(damaged))) or len(damaged) :]
    try:
        found, _ = decode(bytes(damaged))
    except ValueError:
        return

    assert found == profile()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path] + [found for key, inner in items for found in _paths(inner, (*path, key))]


@given(st.data())
def test_a_resealed_change_is_refused_or_survives_a_round_trip(data: st.DataObject) -> None:
    """A profile changed by hand, checksum and all: refused, or equal after saving again."""
    schema, source = data.draw(st.sampled_from([(2, WHOLE), (1, SCHEMA_1)]))
    changed = json.loads(source)["profile"]
    path = data.draw(st.sampled_from(_paths(changed)[1:]))
    place = changed
    for key in path[:-1]:
        place = place[key]

    place[path[-1]] = data.draw(JSON)
    try:
        found, _ = decode(sealed(schema, changed))
    except ValueError:
        return

    assert decode(encode(found))[0] == found
    for form in FORMATS:
        assert render(found, form)
