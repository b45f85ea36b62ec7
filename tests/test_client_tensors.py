"""Values into tensors and views of them, with numpy and without."""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_session import tensor

from switchgear.client import tensors
from switchgear.client.tensors import Target
from switchgear.ipc.dtypes import DTYPES
from switchgear.ipc.errors import (
    BadInput,
)


@pytest.fixture(params=["numpy", "memoryview"])
def _views(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tensors.numpy_module.cache_clear()
    if request.param == "memoryview":
        monkeypatch.setitem(sys.modules, "numpy", None)

    yield
    tensors.numpy_module.cache_clear()


def target_of(dtype: str, shape: tuple[int, ...]) -> tuple[Target, bytearray]:
    spec = tensor("x", dtype, shape)
    memory = bytearray(spec.capacity_bytes)
    return Target(spec, memoryview(memory)), memory


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_view_has_format_and_shape_and_shares_the_memory(dtype: str) -> None:
    target, memory = target_of(dtype, (2, 3))
    view: Any = target.view

    assert bytes(memoryview(view).cast("B")) == bytes(len(memory))
    memory[0] = 1
    copied: Any = tensors.copy_of(view)
    memory[0] = 0

    assert bytes(memoryview(view).cast("B"))[0] == 0
    assert bytes(memoryview(copied).cast("B"))[0] == 1
    assert tuple(view.shape)[:2] == tuple(copied.shape)[:2] == (2, 3)


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1, 1)])
def test_views_of_scalars_and_of_nothing(shape: tuple[int, ...]) -> None:
    target, memory = target_of("float32", shape)

    view: Any = target.view
    assert memoryview(view).nbytes == len(memory)
    tensors.copy_of(view)


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize(
    "value",
    [
        array.array("f", [1, 2, 3, 4, 5, 6]),
        struct.pack("<6f", 1, 2, 3, 4, 5, 6),
        bytearray(struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
        memoryview(struct.pack("<6f", 1, 2, 3, 4, 5, 6)).cast("f", (2, 3)),
        np.array([[1, 2, 3], [4, 5, 6]], np.float32),
        np.array([[1, 4], [2, 5], [3, 6]], np.float32).T,
        [[1, 2, 3], [4, 5, 6]],
        ((1.0, 2, 3), [4, 5, 6.0]),
    ],
    ids=["array", "bytes", "bytearray", "memoryview", "numpy", "strided", "list", "tuple"],
)
def test_what_has_the_right_size_and_format_is_accepted(value: Any) -> None:
    target, memory = target_of("float32", (2, 3))
    target.write(value)

    assert struct.unpack("<6f", memory) == (1, 2, 3, 4, 5, 6)


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("float32", np.zeros((2, 3), np.float64), "dtype float64.*takes float32 .2, 3.*24 b"),
        ("float32", np.zeros((2, 3), np.int32), "dtype int32"),
        ("float32", np.zeros((2, 3), ">f4"), "dtype"),
        ("float32", np.zeros((3, 2), np.float32), r"shape \[3, 2\]"),
        ("float32", array.array("d", [0] * 6), "dtype float64"),
        ("float32", array.array("f", [0] * 5), "20 bytes"),
        ("float32", bytes(23), "23 bytes"),
        ("float32", bytes(25), "25 bytes"),
        ("float32", "123456", "is a str"),
        ("float32", None, "is a NoneType"),
        ("float32", [[1, 2, 3]], "list of another shape"),
        ("float32", [[1, 2, 3], [4, 5]], "list of another shape"),
        ("float32", [[1, 2, 3], [4, 5, "6"]], "str where a number"),
        ("uint8", [[1, 2, 3], [4, 5, 300]], "does not fit"),
        ("uint8", [[1, 2, 3], [4, 5, 6.5]], "does not fit"),
        ("int64", np.zeros((2, 3), np.uint64), "dtype uint64"),
        ("complex64", [[1, 2, 3], [4, 5, 6]], "give an array"),
    ],
)
def test_what_does_not_fit_is_named(dtype: str, value: Any, said: str) -> None:
    target, memory = target_of(dtype, (2, 3))

    with pytest.raises(BadInput, match=f"input 'x'.*{said}"):
        target.write(value)

    assert memory == bytes(len(memory))


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_of_each_dtype_go_in(dtype: str) -> None:
    target, memory = target_of(dtype, (2, 3))
    value = np.arange(6).reshape(2, 3).astype(dtype)
    target.write(value)

    assert bytes(memory) == value.tobytes()
