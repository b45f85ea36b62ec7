"""Weights of four bits: the numbers, the kernels on a real driver, and who gets them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opencl_helpers import opened

from switchgear.backends.opencl import float_product, int4
from switchgear.backends.opencl.int4_search import choose_layers

if TYPE_CHECKING:
    from collections.abc import Collection

    from switchgear.backends.opencl.tinygrad_jit import KernelSource

Array = np.ndarray[Any, Any]


def random_weights(n: int, k: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 100),
    st.integers(0, 1000),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e6]),
)
def test_no_weight_is_further_off_than_half_a_step(
    n: int, k: int, seed: int, size: float
) -> None:
    weights = random_weights(n, k, seed) * np.float32(size)
    packed = int4.quantise(weights)
    back = int4.dequantise(packed, k)
    steps = np.repeat(packed.scales, int4.GROUP, axis=1)[:, :k]
    # The zero point is rounded too, so that zero stays zero: half a step more at the ends.
    assert (np.abs(back - weights) <= steps * 1.01).all()


def test_zero_stays_exactly_zero() -> None:
    weights = random_weights(4, 64)
    weights[:, ::3] = 0
    back = int4.dequantise(int4.quantise(weights), 64)
    assert (back[:, ::3] == 0).all()


def test_a_group_of_zeros_has_no_division() -> None:
    weights = np.zeros((2, 64), np.float32)
    with np.errstate(all="raise"):
        packed = int4.quantise(weights)

    assert (int4.dequantise(packed, 64) == 0).all()


def test_weights_take_an_eighth_and_their_groups_facts() -> None:
    packed = int4.quantise(random_weights(16, 96))
    assert packed.packed.nbytes == 16 * 96 // 2
    assert packed.scales.shape == packed.zero_points.shape == (16, 3)


def computed(
    kernel: KernelSource, shape: tuple[int, int], arguments: list[Array], dtype: str = "float32"
) -> Array:
    """What the kernel writes, with room behind it that has to stay as it was."""
    device = opened()
    cl = device.cl
    program = cl.Program(device.context, kernel.source).build(["-w"])
    result = np.full((shape[0] * shape[1] + 64,), -7, dtype)
    flags = cl.mem_flags
    target = cl.Buffer(device.context, flags.COPY_HOST_PTR, hostbuf=result)
    run = cl.Kernel(program, kernel.name)
    run.set_arg(0, target)
    inputs = [
        cl.Buffer(device.context, flags.COPY_HOST_PTR, hostbuf=np.ascontiguousarray(array))
        for array in arguments
    ]
    for place, buffer in enumerate(inputs, 1):
        run.set_arg(place, buffer)

    items = tuple(g * w for g, w in zip(kernel.groups, kernel.local_size, strict=True))
    cl.enqueue_nd_range_kernel(device.queue, run, items, kernel.local_size)
    cl.enqueue_copy(device.queue, result, target)
    assert (result[shape[0] * shape[1] :] == -7).all()
    return result[: shape[0] * shape[1]].reshape(shape)


# Rows and columns that fill tiles, that do not, and single ones.
SIZES = [(1, 33, 64), (1, 20, 288), (4, 64, 32), (7, 40, 160)]


def is_near(result: Array, x: Array, weights: Array, share: float) -> bool:
    """Whether each sum is right to a share of what its terms' sizes add up to."""
    want = x.astype(np.float64) @ weights.T.astype(np.float64)
    sizes = np.abs(x).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
    return bool((np.abs(result - want) <= share * sizes).all())


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_shared_columns_multiply_by_the_rounded_weights(rows: int, n: int, k: int) -> None:
    weights = int4.quantise(random_weights(n, k))
    x = random_weights(rows, k, 1)
    kernel = int4.product_kernel(rows, n, k, shared=True)
    result = computed(kernel, (rows, n), [x, *weights.arrays])
    assert is_near(result, x, int4.dequantise(weights, k), 1e-6)


@pytest.mark.parametrize("portable", [False, True], ids=["as compiled", "portable"])
@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_own_columns_multiply_by_the_rounded_weights(
    rows: int, n: int, k: int, portable: bool
) -> None:
    """With the processor's instruction where there is one, and without."""
    weights = int4.quantise(random_weights(n, k))
    x = random_weights(rows, k, 1)
    # Groups of very different sizes: each has a scale of its own.
    x[:, :32] *= 1e-3
    shape = (rows, int4.row_words(k // 32))
    packed = computed(int4.activation_kernel(rows, k), shape, [x], "int32")
    kernel = int4.product_kernel(rows, n, k, shared=False)
    if portable:
        source = kernel.source.replace("__builtin_ia32_pmaddubsw256", "no_such_builtin")
        kernel = dataclasses.replace(kernel, source=source)

    result = computed(kernel, (rows, n), [packed, *weights.arrays])
    # The kernel's own arithmetic: exact but for the order of the sums.
    stored, scales = unpacked(packed, k)
    rounded = stored * scales.repeat(32, axis=1)
    assert is_near(result, rounded, int4.dequantise(weights, k), 1e-5)
    # An activation is off by half of 1/127 of its group's largest at most.
    assert is_near(result, x, int4.dequantise(weights, k), 1e-2)


def unpacked(packed: Array, k: int) -> tuple[Array, Array]:
    """Activations as whole numbers [rows, k] and their groups' scales [rows, k / 32]."""
    words = k // 4
    stored = np.ascontiguousarray(packed[:, :words]).view(np.int8).astype(np.float64)
    facts = np.ascontiguousarray(packed[:, words:]).view(np.float32).astype(np.float64)
    return stored, facts[:, : k // 32]


def test_activations_of_8_bits() -> None:
    x = random_weights(3, 64)
    x[1, :32] = 0
    packed = computed(int4.activation_kernel(3, 64), (3, int4.row_words(2)), [x], "int32")
    stored, scales = unpacked(packed, 64)
    sums = np.ascontiguousarray(packed[:, -2:]).view(np.float32)
    for group in range(2):
        part = slice(32 * group, 32 * group + 32)
        scale = scales[:, group, None]
        assert (np.abs(stored[:, part] * scale - x[:, part]) <= 0.51 * scale).all()
        assert np.allclose(sums[:, group], (stored[:, part] * scale).sum(1), rtol=1e-5)

    assert (stored[1, :32] == 0).all()
    assert np.abs(stored).max() == 127


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 33, 64), (6, 31, 1), (13, 16, 7)])
def test_the_float_kernel_multiplies(rows: int, n: int, k: int) -> None:
    weights = random_weights(n, k)
    x = random_weights(rows, k, 1)
    kernel = float_product.product_kernel(rows, n, k)
    result = computed(kernel, (rows, n), [x, float_product.strips(weights)])
    assert is_near(result, x, weights, 1e-6)


class Noisy:
    """A model whose layers add noise powers of their own; the signal is 1."""

    def __init__(self, powers: dict[int, float]) -> None:
        self.powers = powers
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, layers: Collection[int]) -> float:
        self.asked.append(tuple(layers))
        noise = sum(self.powers[layer] for layer in layers)
        return 10 * np.log10(1 / noise) if noise else float("inf")


def test_all_layers_where_they_are_the_only_ones() -> None:
    """A model of one layer, its first and last: there is nothing to set apart for."""
    model = Noisy({5: 0.001})
    choice = choose_layers([5], {5}, model, 20)
    assert choice.layers == (5,)
    assert choice.snr_db == pytest.approx(30)


def test_first_and_last_stay_float() -> None:
    model = Noisy(dict.fromkeys(range(5), 1e-4))
    choice = choose_layers(range(5), {0, 4}, model, 20)
    assert choice.layers == (1, 2, 3)
    assert choice.snr_db == pytest.approx(10 * np.log10(1 / 3e-4))


def test_the_noisiest_are_left_out_and_no_others() -> None:
    powers = dict.fromkeys(range(10), 0.0005) | {3: 0.5, 7: 0.02}
    choice = choose_layers(range(10), {0, 9}, Noisy(powers), 20)
    assert choice.layers == (1, 2, 4, 5, 6, 8)
    assert choice.snr_db >= 20
    assert choice.plain_snr_db < 3


def test_none_where_none_holds() -> None:
    model = Noisy(dict.fromkeys(range(4), 0.5))
    choice = choose_layers(range(4), {0, 3}, model, 20)
    assert choice.layers == ()
    assert choice.plain_snr_db == pytest.approx(10 * np.log10(1 / 2))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-6, 0.1), min_size=1, max_size=12))
def test_as_many_as_additive_noise_allows(powers: list[float]) -> None:
    model = Noisy(dict(enumerate(powers)))
    choice = choose_layers(range(len(powers)), (), model, 20)
    most = 0
    total = 0.0
    for power in sorted(powers):
        total += power
        if total <= 0.01:
            most += 1

    assert len(choice.layers) == most
    assert choice.runs == len(model.asked)


def test_few_measurements_for_many_layers() -> None:
    """Each alone once, then halves: no choice is tried one layer at a time."""
    model = Noisy({layer: 1e-5 * layer for layer in range(1, 101)})
    choice = choose_layers(range(1, 101), (), model, 20)
    assert 0 < len(choice.layers) < 100
    assert choice.runs <= 100 + 10
