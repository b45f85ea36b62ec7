"""What changed between two profiles, by how much, and whether it is beyond the spread.

A change counts as beyond the spread when the medians differ by more than three times the larger
median absolute deviation: the bound within which two runs of one machine agree. One sample has
no spread, and then it cannot be told.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from switchgear.fingerprints.dump import WIDTH, describe_failure, number
from switchgear.fingerprints.measurement import Failure, Value

if TYPE_CHECKING:
    from switchgear.fingerprints.profile import Key, Measurement, Profile

SPREADS: Final = 3.0

Change: TypeAlias = Literal["same", "changed", "unclear", "appeared", "disappeared", "failure"]
# Whether less is better, by the ending of a value's name. Others have no better.
_LESS_IS_BETTER: Final = ("_ms", "_us")
_MORE_IS_BETTER: Final = ("_mb_s", "_nodes_on_device")


@dataclass(frozen=True, slots=True)
class ValueChange:
    """One value in both profiles. `ratio` is new over old; `verdict` better, worse or empty.

    `change`: `same` (within the spread), `changed` (beyond it), `unclear` (one sample, or a
    noisy one), `appeared` and `disappeared` (a number where the other has none), `failure`
    (another failure than before).
    """

    test: str
    device: str
    name: str
    change: Change
    old: float | None
    new: float | None
    unit: str
    ratio: float | None
    verdict: str
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """`facts` are changes of the key, the devices, their thresholds and the zones."""

    facts: tuple[str, ...]
    values: tuple[ValueChange, ...]

    @property
    def differs(self) -> bool:
        return bool(self.facts) or any(value.change != "same" for value in self.values)

    def to_json(self) -> dict[str, Any]:
        return {
            "differs": self.differs,
            "facts": list(self.facts),
            "values": [asdict(value) for value in self.values],
        }


def compare(old: Profile, new: Profile) -> Difference:
    """Compares every value of either profile, matched by test, API, device and name."""
    before, after = _entries(old), _entries(new)
    values: list[ValueChange] = []
    for place in dict.fromkeys([*before, *after]):
        one = _values(before.get(place))
        other = _values(after.get(place))
        values += [
            _value_change(place, name, one.get(name), other.get(name))
            for name in dict.fromkeys([*one, *other])
        ]

    return Difference(tuple(_facts(old, new)), tuple(values))


def to_table(difference: Difference, *, everything: bool = False) -> str:
    """The changes for people, at most 80 columns; with `everything` the unchanged too."""
    lines: list[str] = []
    for fact in difference.facts:
        lines += _wrapped("", fact)

    if difference.facts:
        lines.append("")

    shown = [value for value in difference.values if everything or value.change != "same"]
    place = ""
    for value in shown:
        here = f"{value.test} on {value.device}"
        if here != place:
            lines += _wrapped("", here)
            place = here

        lines += _wrapped(f"  {value.name:<26}", value.text)

    same = sum(value.change == "same" for value in difference.values)
    lines.append(f"{len(difference.values) - same} of {len(difference.values)} values changed")
    return "\n".join(line.rstrip() for line in lines) + "\n"


_Place: TypeAlias = tuple[str, str, str]


def _entries(profile: Profile) -> dict[_Place, Measurement]:
    found: dict[_Place, Measurement] = {}
    for entry in profile.measurements:
        api = entry.subject.api if entry.subject else ""
        name = entry.subject.name if entry.subject else "no device"
        place = (entry.test, api, name)
        number_ = 2
        # Two equal cards: the first is compared with the first.
        while place in found:
            place = (entry.test, api, f"{name} #{number_}")
            number_ += 1

        found[place] = entry

    return found


def _values(entry: Measurement | None) -> dict[str, Value | Failure]:
    return {value.name: value for value in entry.values} if entry else {}


def _value_change(
    place: _Place, name: str, old: Value | Failure | None, new: Value | Failure | None
) -> ValueChange:
    change, text = _judge(old, new)
    one = old.median if isinstance(old, Value) else None
    other = new.median if isinstance(new, Value) else None
    ratio = other / one if one and other is not None else None
    unit = next((side.unit for side in (new, old) if isinstance(side, Value)), "")
    return ValueChange(
        test=place[0],
        device=place[2],
        name=name,
        change=change,
        old=one,
        new=other,
        unit=unit,
        ratio=ratio,
        verdict=_verdict(name, one, other) if change == "changed" else "",
        text=text if change != "changed" else f"{text}{_in_words(name, one, other)}",
    )


def _judge(old: Value | Failure | None, new: Value | Failure | None) -> tuple[Change, str]:
    if isinstance(old, Value):
        if isinstance(new, Value):
            return _judge_numbers(old, new)

        return "disappeared", f"was {number(old.median)} {old.unit}; now: {_reason(new)}"

    if isinstance(new, Value):
        return "appeared", f"now {number(new.median)} {new.unit}; was: {_reason(old)}"

    if old == new:
        return "same", _reason(old)

    return "failure", f"was: {_reason(old)}; now: {_reason(new)}"


def _reason(failure: Failure | None) -> str:
    return describe_failure(failure) if failure else "not measured"


def _judge_numbers(old: Value, new: Value) -> tuple[Change, str]:
    apart = new.median - old.median
    bound = SPREADS * max(old.spread, new.spread)
    text = f"{number(old.median)} -> {number(new.median)} {new.unit}"
    if old.median:
        text += f" ({100 * apart / abs(old.median):+.1f} %)"

    if old.unit != new.unit:
        return "unclear", f"{text}: the unit was {old.unit}"

    if old.noisy or new.noisy:
        which = (
            "both were" if old.noisy and new.noisy else f"{'old' if old.noisy else 'new'} was"
        )
        return ("same" if apart == 0 else "unclear"), f"{text}: {which} noisy"

    if apart == 0:
        return "same", text

    if min(old.samples, new.samples) < 2:
        return "unclear", f"{text}: one sample has no spread"

    if abs(apart) <= bound:
        return "same", f"{text}: within the spread"

    return "changed", f"{text}: beyond the spread"


def _verdict(name: str, old: float | None, new: float | None) -> str:
    if old is None or new is None or old == new:
        return ""

    if name.endswith(_LESS_IS_BETTER):
        return "better" if new < old else "worse"

    if name.endswith(_MORE_IS_BETTER):
        return "better" if new > old else "worse"

    return ""


def _in_words(name: str, old: float | None, new: float | None) -> str:
    verdict = _verdict(name, old, new)
    return f", {verdict}" if verdict else ""


def _facts(old: Profile, new: Profile) -> list[str]:
    facts = _key_facts(old.key, new.key)
    before = {device.device_id: device for device in old.devices}
    after = {device.device_id: device for device in new.devices}
    for device_id in dict.fromkeys([*before, *after]):
        one, other = before.get(device_id), after.get(device_id)
        if one is None or other is None:
            word = "new device" if one is None else "device gone"
            name = other.name if other else one.name if one else ""
            facts.append(f"{word}: {device_id} ({name})")
        elif one.threshold != other.threshold:
            facts.append(
                f"throttle threshold of {device_id}: {one.threshold.throttle_c:g} C"
                f" ({one.threshold.source}) -> {other.threshold.throttle_c:g} C"
                f" ({other.threshold.source})"
            )

    zones_before = {zone.zone_id for zone in old.zones}
    zones_after = {zone.zone_id for zone in new.zones}
    facts += [f"zone gone: {zone}" for zone in sorted(zones_before - zones_after)]
    facts += [f"new zone: {zone}" for zone in sorted(zones_after - zones_before)]
    return facts


def _key_facts(old: Key, new: Key) -> list[str]:
    facts = [
        f"{name}: {before or 'none'} -> {after or 'none'}"
        for name, before, after in (
            ("soc", old.soc, new.soc),
            ("kernel", old.kernel, new.kernel),
            ("image", old.system_image, new.system_image),
        )
        if before != after
    ]
    for name in sorted({*old.engines, *new.engines}):
        before, after = old.engines.get(name, "none"), new.engines.get(name, "none")
        if before != after:
            facts.append(f"{name}: {before} -> {after}")

    said_before = {(driver.api, driver.device): driver for driver in old.drivers}
    for driver in new.drivers:
        was = said_before.get((driver.api, driver.device))
        if was is not None and was != driver:
            facts.append(
                f"{driver.api} driver of {driver.device}: {was.name} {was.version} {was.info}"
                f" -> {driver.name} {driver.version} {driver.info}"
            )

    return facts


def _wrapped(prefix: str, text: str) -> list[str]:
    clean = "".join(char if char.isprintable() else " " for char in text)
    head = prefix if len(prefix) <= WIDTH - 24 else f"{prefix.rstrip()} "
    indent = " " * min(len(head), 28) if head else "  "
    return textwrap.wrap(
        head + clean, WIDTH, initial_indent="", subsequent_indent=indent, drop_whitespace=True
    ) or [""]
