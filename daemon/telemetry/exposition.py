"""The Prometheus text format, version 0.0.4, written and read.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Final, get_args

from switchgear.daemon.telemetry.families import Distribution, Family, Kind

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_KINDS: Final[dict[str, Kind]] = {kind: kind for kind in get_args(Kind)}
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.ASCII)
_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)",?', re.ASCII)
_ESCAPED: Final = re.compile(r"\\(.)")


def render(families: Iterable[Family]) -> Iterator[str]:
    """The text, in pieces of one label set each, so that the writer may rest in between.

    Families without samples are left out.
    """
    for family in families:
        if family.samples:
            text = family.text.translate(_HELP_ESCAPES)
            yield f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"

        for values, value in family.samples.items():
            labels = ",".join(
                f'{name}="{text.translate(_LABEL_ESCAPES)}"'
                for name, text in zip(family.labels, values, strict=True)
            )
            if isinstance(value, Distribution):
                yield _buckets(family.name, labels, value)
            else:
                yield f"{family.name}{_braced(labels)} {_number(value)}\n"


def _buckets(name: str, labels: str, value: Distribution) -> str:
    lead = f"{labels}," if labels else ""
    lines = []
    count = 0
    for bound, inside in zip((*value.bounds, math.inf), value.counts, strict=True):
        count += inside
        lines.append(f'{name}_bucket{{{lead}le="{_number(bound)}"}} {count}\n')

    lines.append(f"{name}_sum{_braced(labels)} {_number(value.total)}\n")
    lines.append(f"{name}_count{_braced(labels)} {count}\n")
    return "".join(lines)


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"

    if math.isnan(value):
        return "NaN"

    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def parse(text: str) -> list[Family]:
    """The families of a text that `render` wrote; histograms are put together again.

    :raises ValueError: a line is none of the format's.
    """
    found: dict[str, Family] = {}
    parts: dict[tuple[str, tuple[str, ...]], _Parts] = {}
    # Only \n ends a line: a label may hold what else Unicode counts as an end.
    for line in text.split("\n"):
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if kind not in _KINDS:
                raise ValueError(f"the type {kind!r} is none of ours")

            found[name] = Family(name, _KINDS[kind], found[name].text if name in found else "")
        elif line.startswith("# HELP "):
            _, _, name, help_text = line.split(" ", 3)
            found[name] = Family(name, "gauge", _unescape(help_text))
        elif line and not line.startswith("#"):
            _read_sample(line, found, parts)

    for (name, values), histogram in parts.items():
        found[name].samples[values] = histogram.whole()

    return list(found.values())


class _Parts:
    """A histogram whose lines are being read."""

    def __init__(self) -> None:
        self.buckets: list[tuple[float, int]] = []
        self.total = 0.0

    def whole(self) -> Distribution:
        bounds = [bound for bound, _ in self.buckets if not math.isinf(bound)]
        counts = [count for _, count in self.buckets]
        steps = [high - low for low, high in zip([0, *counts], counts, strict=False)]
        return Distribution(bounds, steps, self.total)


def _read_sample(
    line: str,
    found: dict[str, Family],
    parts: dict[tuple[str, tuple[str, ...]], _Parts],
) -> None:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ValueError(f"no sample: {line[:80]!r}")

    name, inside, number = match.groups()
    pairs = [(key, _unescape(text)) for key, text in _LABEL.findall(inside or "")]
    stem, _, suffix = name.rpartition("_")
    if name in found and found[name].kind != "histogram":
        family = found[name]
    elif stem in found and suffix in ("bucket", "sum", "count"):
        family = found[stem]
    else:
        raise ValueError(f"{name} has no TYPE line")

    own = [(key, text) for key, text in pairs if not (suffix == "bucket" and key == "le")]
    family.labels = tuple(key for key, _ in own)
    values = tuple(text for _, text in own)
    if family.kind != "histogram":
        family.samples[values] = float(number)
        return

    histogram = parts.setdefault((family.name, values), _Parts())
    if suffix == "bucket":
        histogram.buckets.append((float(dict(pairs)["le"]), int(number)))
    elif suffix == "sum":
        histogram.total = float(number)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda m: {"n": "\n"}.get(m.group(1), m.group(1)), text)
