"""What is read from a .tflite file beside the engine, and what a damaged one does to it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from backend_helpers import custom, recurrent

from switchgear.backends import generate
from switchgear.backends.generate.graph import Model
from switchgear.backends.tflite_file import FileFacts, read_facts
from switchgear.ipc.errors import BadModel

if TYPE_CHECKING:
    from pathlib import Path


def facts(model: bytes, folder: Path) -> FileFacts:
    path = folder / "model.tflite"
    path.write_bytes(model)
    return read_facts(str(path))


def state_in_a_branch() -> bytes:
    """Variables that only the second subgraph uses."""
    model = Model("branch")
    main = model.subgraph()
    x = main.input("x", "float32", [2])
    main.operator("ADD", [x, x], [main.output(main.tensor("y", "float32", [2]))])
    branch = model.subgraph("branch")
    handle = branch.tensor("handle", "resource", [1])
    branch.operator("VAR_HANDLE", [], [handle], schema.VarHandleOptionsT(sharedName="v"))
    return model.to_bytes()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (generate.two_inputs(), FileFacts(False, ())),
        (generate.ramp(), FileFacts(False, ())),
        (generate.accumulator(), FileFacts(True, ())),
        (recurrent(), FileFacts(True, ())),
        (state_in_a_branch(), FileFacts(True, ())),
        (custom("B.two", "A"), FileFacts(False, ("A", "B.two"))),
    ],
    ids=["sum", "ramp", "variable", "recurrent", "branch", "custom"],
)
def test_state_and_custom_operators(model: bytes, expected: FileFacts, tmp_path: Path) -> None:
    assert facts(model, tmp_path) == expected


def test_codes_of_old_files_are_read_too(tmp_path: Path) -> None:
    packed = schema.ModelT.InitFromPackedBuf(generate.accumulator(), 0)
    from backend_helpers import repacked

    for code in packed.operatorCodes:
        # What stood there before codes went beyond 127.
        code.deprecatedBuiltinCode = code.builtinCode if code.builtinCode < 127 else 127

    assert facts(repacked(packed), tmp_path).state


def test_a_damaged_file_is_a_bad_model_or_read(tmp_path: Path) -> None:
    model = np.frombuffer(custom("Warp", "Bend"), np.uint8)
    random = np.random.RandomState(11)
    refused = 0
    for _ in range(300):
        damaged = model.copy()
        places = random.randint(0, damaged.size, 4)
        damaged[places] = random.randint(0, 256, 4)
        with contextlib.suppress(BadModel):
            facts(damaged.tobytes(), tmp_path)
            continue

        refused += 1

    assert refused > 20


@pytest.mark.parametrize("length", [1, 3, 8, 40])
def test_a_cut_file_is_a_bad_model(length: int, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="damaged"):
        facts(generate.accumulator()[:length], tmp_path)
