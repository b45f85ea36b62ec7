"""The inputs of the known-answer check: 8 of each, the same at every run, in realistic ranges.

The rule. An input's role is told by its shape and element type; each role has 8 patterns, one
per run, written in [-1, 1] or [0, 1]:

- image (rank 4 with 1, 3 or 4 channels last, sides of at least 8): a drawn face, the same
  mirrored, a gradient, waves, edges between the extremes, white noise, a faint texture, the
  face in the dark
- signal (at least 256 elements along one axis, all others 1): a sweep, a voice-like sound,
  quiet and loud noise, clicks, a ramp, silence, a square wave
- index (integers without a quantisation that are not pixels): first, last, a count upwards,
  random ones
- flags (bool): none, all, every other, random ones
- features (everything else): normal and uniform noise, a ramp, sparse ones, one value, random
  extremes, small values

Floating-point tensors take a pattern as it is. Integers with a quantisation, and 8-bit and
16-bit ones without, take it stretched over what they can say: [-1, 1] over the whole range,
[0, 1] over its part from zero up. An index stays under the size of the table that it looks
into; where that is not known, it is 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
COUNT: Final = 8

_SEED: Final = 20260
_SIGNAL_ELEMENTS: Final = 256
_IMAGE_SIDE: Final = 8
_IMAGE_CHANNELS: Final = (1, 3, 4)
_PIXELS: Final = ("uint8", "int8", "uint16", "int16")
_SMALL_INTEGERS: Final = _PIXELS


@dataclass(frozen=True, slots=True)
class InputFacts:
    """What is known of an input. `scale` is 0 where it is not quantised per tensor.

    `index_limit` is the rows of the smallest table that it indexes, 0 where none is known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float = 0.0
    zero_point: int = 0
    index_limit: int = 0


# A pattern: values for a shape, and whether they are in [-1, 1] (else in [0, 1]).
_Pattern = tuple[Callable[[tuple[int, ...], np.random.Generator], Array], bool]


def role_of(facts: InputFacts) -> str:
    """`image`, `signal`, `index`, `flags` or `features`; see the module's table."""
    if facts.dtype == "bool":
        return "flags"

    is_integer = facts.dtype.startswith(("int", "uint"))
    if facts.index_limit or (
        is_integer and not facts.scale and facts.dtype not in _SMALL_INTEGERS
    ):
        return "index"

    shape = facts.shape
    if len(shape) == 4 and shape[3] in _IMAGE_CHANNELS and min(shape[1:3]) >= _IMAGE_SIDE:
        return "image"

    size = math.prod(shape)
    if size >= _SIGNAL_ELEMENTS and size == max(shape):
        return "signal"

    return "features"


def known_inputs(
    inputs: Sequence[InputFacts], *, images_in_unit_range: bool = False
) -> list[list[Array]]:
    """`COUNT` sets of arrays, each in the order, shapes and element types of `inputs`.

    With `images_in_unit_range` no image in floats has values under zero: the patterns of
    `SIGNED_IMAGES` are moved into [0, 1].
    """
    return [
        [
            _values(facts, run, position, images_in_unit_range)
            for position, facts in enumerate(inputs)
        ]
        for run in range(COUNT)
    ]


def _values(facts: InputFacts, run: int, position: int, unit_range: bool) -> Array:
    generator = np.random.default_rng([_SEED, run, position])
    role = role_of(facts)
    if role == "index":
        limit = facts.index_limit or 2
        values = _INDEX[run](facts.shape, limit, generator)
        return values.reshape(facts.shape).astype(facts.dtype)

    if role == "flags":
        return _FLAGS[run](facts.shape, generator).reshape(facts.shape).astype(bool)

    pattern, signed = _PATTERNS[role][run]
    values = pattern(facts.shape, generator).reshape(facts.shape)
    if unit_range and signed and role == "image" and facts.dtype.startswith("float"):
        values = (values + 1) / 2

    return _fitted(values, signed, facts)


def _fitted(values: Array, signed: bool, facts: InputFacts) -> Array:
    dtype = np.dtype(facts.dtype)
    if dtype.kind not in "iu":
        return values.astype(dtype)

    limits = np.iinfo(dtype)
    lowest = int(limits.min)
    if not signed:
        # The integer that stands for zero: the pattern has no negative values.
        lowest = min(max(lowest, facts.zero_point), int(limits.max) - 1)

    share = (np.clip(values, -1, 1) + 1) / 2 if signed else np.clip(values, 0, 1)
    fitted: Array = np.rint(lowest + share * (int(limits.max) - lowest)).astype(dtype)
    return fitted


# Images, (batch, height, width, channels)


def _axes(shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Rows and columns in [-1, 1], and channel numbers, to be broadcast against each other."""
    _, height, width, channels = shape
    return (
        np.linspace(-1, 1, height)[:, None, None],
        np.linspace(-1, 1, width)[None, :, None],
        np.arange(channels)[None, None, :],
    )


def _disc(y: Array, x: Array, centre: tuple[float, float], radii: tuple[float, float]) -> Array:
    """1 inside of an ellipse, 0 outside, with a soft rim."""
    distance = ((y - centre[0]) / radii[0]) ** 2 + ((x - centre[1]) / radii[1]) ** 2
    inside: Array = 1 / (1 + np.exp(np.clip(12 * (distance - 1), -40, 40)))
    return inside


def _face(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """A lit head before a shaded background: what detectors look for, drawn."""
    y, x, channel = _axes(shape)
    picture = 0.35 + 0.15 * x - 0.1 * y + 0.03 * channel
    skin = np.array([0.85, 0.65, 0.55, 0.9])[channel] * (1 - 0.25 * x)
    head = _disc(y, x, (0.05, 0.0), (0.62, 0.45))
    picture = picture * (1 - head) + skin * head
    dark = [
        ((-0.12, -0.18), (0.07, 0.1)),
        ((-0.12, 0.18), (0.07, 0.1)),
        ((0.38, 0.0), (0.06, 0.18)),
        ((-0.55, 0.0), (0.2, 0.42)),
    ]
    for centre, radii in dark:
        picture = picture * (1 - 0.8 * _disc(y, x, centre, radii))

    picture = picture + 0.02 * generator.standard_normal(picture.shape)
    return _batch(np.clip(picture, 0, 1), shape)


def _batch(picture: Array, shape: tuple[int, ...]) -> Array:
    """The same picture for each of the batch, a little darker from one to the next."""
    dim = 1 / (1 + 0.25 * np.arange(shape[0]))
    pictures: Array = picture[None] * dim[:, None, None, None]
    return pictures


def _face_signed(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    picture: Array = 2 * _face(shape, generator) - 1
    return picture


def _face_mirrored(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return _face(shape, generator)[:, :, ::-1, :]


def _gradient(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    y, x, channel = _axes(shape)
    return _batch(np.cos(0.7 * channel) * x + np.sin(0.7 * channel) * y, shape) / math.sqrt(2)


def _waves(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    y, x, channel = _axes(shape)
    return _batch(0.5 + 0.5 * np.sin(7 * x + 4 * y * (1 + channel)), shape)


def _edges(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    y, x, channel = _axes(shape)
    tiles = np.floor((y + 1) * 3.4) + np.floor((x + 1) * 4.3) + channel
    return np.broadcast_to(2 * (tiles % 2) - 1, shape)


def _texture(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Faint noise, smoothed along both sides."""
    noise = generator.standard_normal(shape)
    for axis in (1, 2):
        noise = noise + np.roll(noise, 1, axis) + np.roll(noise, 2, axis)

    return np.clip(0.5 + 0.03 * noise, 0, 1)


def _dark(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """The face with an eighth of the light, and a sensor's noise.

    Not one flat value, which no camera gives: on such an image fp16 was seen to lose 3 % of the
    peak where it loses 0.5 % on pictures.
    """
    noise = 0.01 * generator.standard_normal(shape)
    picture: Array = np.clip(0.125 * _face(shape, generator) + noise, 0, 1)
    return picture


# Any shape


def _uniform(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return generator.uniform(-1, 1, shape)


def _uniform_unit(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return generator.uniform(0, 1, shape)


def _normal(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return generator.standard_normal(shape)


def _quiet(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return 0.05 * generator.standard_normal(shape)


def _signs(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return 2 * generator.integers(0, 2, shape) - 1


def _sparse(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    return (generator.uniform(0, 1, shape) < 0.125) * 1.0


def _ramp(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    return np.linspace(-1, 1, math.prod(shape))


def _grey(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    return np.full(shape, 0.5)


def _silence(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    return np.zeros(shape)


# Signals; of the usual 16,000 samples a second


def _time(shape: tuple[int, ...]) -> Array:
    return np.arange(math.prod(shape)) / 16000


def _sweep(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    time = _time(shape)
    end = max(float(time[-1]), 1 / 16000)
    sweep: Array = 0.7 * np.sin(2 * np.pi * (100 * time + 3450 * time**2 / end))
    return sweep


def _formants(frequency: float) -> float:
    first = math.exp(-(((frequency - 600) / 300) ** 2))
    return first + 0.4 * math.exp(-(((frequency - 1700) / 400) ** 2))


def _voice(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Harmonics of 120 Hz under two formants, in syllables, with a breath of noise."""
    time = _time(shape)
    sound = sum(_formants(120 * n) * np.sin(2 * np.pi * 120 * n * time) for n in range(1, 30))
    syllables = 0.5 - 0.5 * np.cos(2 * np.pi * 4 * time)
    noise = 0.01 * generator.standard_normal(time.shape)
    voice: Array = np.clip(0.15 * sound * syllables + noise, -1, 1)
    return voice


def _clicks(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    clicks: Array = (np.arange(math.prod(shape)) % 160 == 80) * 0.9
    return clicks


def _square(shape: tuple[int, ...], _: np.random.Generator) -> Array:
    return np.where(np.arange(math.prod(shape)) // 20 % 2, 1.0, -1.0)


_PATTERNS: Final[dict[str, tuple[_Pattern, ...]]] = {
    "image": (
        (_face_signed, True),
        (_face_mirrored, False),
        (_gradient, True),
        (_waves, False),
        (_edges, True),
        (_uniform, True),
        (_texture, False),
        (_dark, False),
    ),
    "signal": (
        (_sweep, True),
        (_voice, True),
        (_quiet, True),
        (_uniform, True),
        (_clicks, True),
        (_ramp, True),
        (_silence, True),
        (_square, True),
    ),
    "features": (
        (_normal, True),
        (_uniform, True),
        (_uniform_unit, False),
        (_ramp, True),
        (_sparse, False),
        (_grey, False),
        (_signs, True),
        (_quiet, True),
    ),
}

SIGNED_IMAGES: Final = frozenset(
    run for run, (_, signed) in enumerate(_PATTERNS["image"]) if signed
)

_Indices = Callable[[tuple[int, ...], int, np.random.Generator], Array]


def _first(shape: tuple[int, ...], _limit: int, _: np.random.Generator) -> Array:
    return np.zeros(shape)


def _last(shape: tuple[int, ...], limit: int, _: np.random.Generator) -> Array:
    return np.full(shape, limit - 1)


def _upwards(shape: tuple[int, ...], limit: int, _: np.random.Generator) -> Array:
    return np.arange(math.prod(shape)) % limit


def _anywhere(shape: tuple[int, ...], limit: int, generator: np.random.Generator) -> Array:
    return generator.integers(0, limit, shape)


_INDEX: Final[tuple[_Indices, ...]] = (_first, _last, _upwards, *(_anywhere,) * 5)

_Flags = Callable[[tuple[int, ...], np.random.Generator], Array]
_FLAGS: Final[tuple[_Flags, ...]] = (
    lambda shape, _: np.zeros(shape),
    lambda shape, _: np.ones(shape),
    lambda shape, _: np.arange(math.prod(shape)) % 2,
    *(lambda shape, generator: generator.integers(0, 2, shape),) * 5,
)
