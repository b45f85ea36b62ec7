"""Which layers may have weights of four bits: as many as the answers can bear."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """`layers` get four bits; `snr_db` is then the least signal-to-noise ratio of an output.

    `plain_snr_db` is the ratio with all layers, `runs` how often the model was measured.
    """

    layers: tuple[int, ...]
    snr_db: float
    plain_snr_db: float
    runs: int


def choose_layers(
    layers: Sequence[int],
    outer: Collection[int],
    snr_db: Callable[[Collection[int]], float],
    wanted_db: float,
) -> Choice:
    """The most of `layers`, in the order of the model, that keep `wanted_db`; maybe none.

    `snr_db` measures the model with some of them in four bits. `outer` stay float, the first
    and the last of the model, except where there are no others. Of the others each is measured
    alone, and the noisiest are left out until the rest holds.
    """
    runs = 0

    def measured(some: Collection[int]) -> float:
        nonlocal runs
        runs += 1
        return snr_db(some)

    plain = measured(layers)
    kept = [layer for layer in layers if layer not in outer] or list(layers)
    if plain >= wanted_db and len(kept) == len(layers):
        return Choice(tuple(layers), plain, plain, runs)

    ratio = measured(kept)
    if ratio >= wanted_db:
        return Choice(tuple(kept), ratio, plain, runs)

    alone = {layer: measured([layer]) for layer in kept}
    by_noise = sorted(kept, key=lambda layer: alone[layer])
    # The fewest that have to be left out, by halves: fewer layers, less noise.
    low, high = 1, len(by_noise)
    best: Choice | None = None
    while low <= high:
        out = (low + high) // 2
        rest = sorted(by_noise[out:], key=kept.index)
        if not rest:
            break

        ratio = measured(rest)
        if ratio >= wanted_db:
            best = Choice(tuple(rest), ratio, plain, 0)
            high = out - 1
        else:
            low = out + 1

    if best is None:
        return Choice((), float("inf"), plain, runs)

    return Choice(best.layers, best.snr_db, plain, runs)
