"""A profile as text: JSON for programs, the field report's XML, a table for people.

The table fits 80 columns and needs no colour. Nothing is left out silently: what has no number
shows its reason.
"""

from __future__ import annotations

import textwrap
import time
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Final

from switchgear.fingerprints import measurement
from switchgear.fingerprints.assemble import best_value
from switchgear.fingerprints.measurement import Failure, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from switchgear.fingerprints.profile import Device, Measurement, Profile

WIDTH: Final = 80
FORMATS: Final = ("json", "xml", "table")

_TITLES: Final = {
    measurement.CPU: "CPU: MobileNet v1 1.0 224, and memory",
    measurement.OPENCL_BANDWIDTH: "OpenCL bandwidth",
    measurement.VULKAN_MATMUL: "Vulkan 1024 x 1024 x 1024 matmul, fp32",
    measurement.NPU_UTILISATION: "NPU while MobileNet v1 1.0 224 runs",
}
# The units' own spelling, for the table.
_UNITS: Final = {"mb_s": "MB/s", "us": "us", "ms": "ms", "pct": "%", "%": "%"}


def render(profile: Profile, form: str) -> str:
    """The profile in one of `FORMATS`, with a last newline; `ValueError` on another."""
    if form == "json":
        return profile.model_dump_json(indent=1) + "\n"

    if form == "xml":
        return to_xml(profile)

    if form == "table":
        return to_table(profile)

    raise ValueError(f"unknown format {form!r}: one of {', '.join(FORMATS)}")


def to_xml(profile: Profile) -> str:
    """`device_fingerprint.xml`: five elements, each a number or empty with a `reason`.

    Of several devices the best counts, hardware before software; `device` names it. The
    threshold is the GPU's, or the CPU's where there is no GPU.
    """
    root = ET.Element("device_fingerprint", {"schema": str(profile.schema_version)})
    ET.SubElement(root, "soc").text = _xml_text(profile.key.soc)
    _xml_value(
        root,
        profile,
        "opencl_bandwidth_mb_s",
        measurement.OPENCL_BANDWIDTH,
        ["write_mb_s"],
        True,
    )
    _xml_value(
        root, profile, "vulkan_avg_latency_ms", measurement.VULKAN_MATMUL, ["matmul_ms"], False
    )
    _xml_value(
        root,
        profile,
        "nnapi_npu_utilization_pct",
        measurement.NPU_UTILISATION,
        ["float_utilisation_pct", "int8_utilisation_pct"],
        True,
    )
    gpu = next((device for device in profile.devices if device.kind == "gpu"), None)
    device = gpu or next(iter(profile.devices), None)
    element = ET.SubElement(root, "thermal_throttle_threshold_c")
    if device is None:
        element.set("reason", "no device")
    else:
        element.text = f"{device.threshold.throttle_c:g}"
        element.set("device", _xml_text(device.device_id))
        element.set("source", device.threshold.source)

    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def to_table(profile: Profile) -> str:
    """The profile for people, at most 80 columns wide."""
    lines = [*_head(profile), "", *_device_lines(profile), ""]
    for test in measurement.TESTS:
        lines += [_TITLES[test], *_test_lines(profile, test), ""]

    lines += _zone_lines(profile)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def describe_failure(failure: Failure) -> str:
    """`vulkan:-4 VK_ERROR_DEVICE_LOST: text (library)`."""
    text = f"{failure.domain}:{failure.code} {failure.code_name}"
    text += f": {failure.text}" if failure.text else ""
    return text + (f" ({failure.library})" if failure.library else "")


def number(value: float) -> str:
    """Four significant digits, without an exponent for the sizes that occur."""
    text = f"{value:.4g}"
    return f"{value:.0f}" if "e" in text and 1 <= abs(value) < 1e9 else text


def _head(profile: Profile) -> list[str]:
    key = profile.key
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(profile.measured_at))
    rows = [
        ("device", key.soc),
        ("kernel", key.kernel),
        ("image", key.system_image),
        ("engines", ", ".join(f"{name} {version}" for name, version in key.engines.items())),
        ("measured", f"{moment} (schema {profile.schema_version})"),
    ]
    return [line for name, text in rows if text for line in _wrapped(f"{name:<10}", text)]


def _device_lines(profile: Profile) -> list[str]:
    lines = ["Devices"]
    for device in profile.devices:
        lines += _wrapped(f"  {device.device_id:<26} ", f"{device.kind}, {device.name}")
        for subject in device.apis:
            driver = " ".join(
                text for text in (subject.driver_name, subject.driver_version) if text
            )
            text = f"{subject.api}: {subject.name}" + (f", driver {driver}" if driver else "")
            lines += _wrapped(f"{'':29}", text)

        lines += _wrapped(f"{'':29}", _threshold_text(device))

    return lines


def _threshold_text(device: Device) -> str:
    threshold = device.threshold
    source = threshold.source.replace("_", " ")
    note = f": {threshold.note}" if threshold.note else ""
    domain = ", ".join(device.domain.zones) or device.domain.note
    return (
        f"throttles at {threshold.throttle_c:g} C, recovers at {threshold.recover_c:g} C"
        f" ({source}{note}); sensors: {domain}"
    )


def _test_lines(profile: Profile, test: str) -> list[str]:
    entries = profile.of_test(test)
    if not entries:
        return ["  not measured yet"]

    lines: list[str] = []
    for entry in entries:
        name = entry.subject.name if entry.subject else "no device"
        where = f" [{entry.device_id}]" if entry.device_id else ""
        lines += _wrapped("  ", f"{name}{where}")
        for value in entry.values:
            lines += _value_lines(value)

        for note in entry.notes:
            lines += _wrapped(f"{'':4}note: ", note)

    return lines


def _value_lines(value: Value | Failure) -> list[str]:
    if isinstance(value, Failure):
        return _wrapped(f"    {value.name:<23} ", f"- {describe_failure(value)}")

    unit = _UNITS.get(value.unit, value.unit)
    text = f"{number(value.median):>9} {unit:<5}+- {number(value.spread):<8}"
    text += f"n={value.samples:<4}" + (" NOISY" if value.noisy else "")
    lines = _wrapped(f"    {value.name:<23} ", text)
    return lines + _wrapped(f"{'':38}", value.method) if value.method else lines


def _zone_lines(profile: Profile) -> list[str]:
    if not profile.zones:
        return ["Thermal zones", "  none found"]

    lines = ["Thermal zones"]
    for zone in profile.zones:
        trips = ", ".join(
            f"{trip.kind} {trip.temperature_mc / 1000:g} C"
            for trip in zone.trips
            if trip.temperature_mc is not None
        )
        lines += _wrapped(f"  {zone.zone_id:<26} {zone.role:<6}", trips or "no trip points")

    if profile.excluded_zones:
        lines += _wrapped("  no temperature: ", ", ".join(profile.excluded_zones))

    return lines


def _wrapped(prefix: str, text: str) -> list[str]:
    """The text behind a prefix, further lines indented to it, all within the width.

    Control characters, which a driver's text may hold, become spaces. A prefix that is itself
    too long keeps a line of its own.
    """
    clean = "".join(char if char.isprintable() else " " for char in text)
    head = "".join(char if char.isprintable() else "?" for char in prefix)
    if len(head) > WIDTH - 24:
        return [*textwrap.wrap(head.rstrip(), WIDTH), *_wrapped(" " * 29, text)]

    lines = textwrap.wrap(clean, WIDTH - len(head)) or [""]
    return [
        (head if index == 0 else " " * len(head)) + line for index, line in enumerate(lines)
    ]


def _xml_value(
    root: ET.Element,
    profile: Profile,
    tag: str,
    test: str,
    names: Sequence[str],
    highest: bool,
) -> None:
    element = ET.SubElement(root, tag)
    for name in names:
        best = best_value(profile, test, name, highest=highest)
        if best is None:
            continue

        entry, value = best
        element.text = number(value.median)
        element.set("device", _xml_text(entry.device_id or ""))
        element.set("spread", number(value.spread))
        if len(names) > 1:
            element.set("model", name.partition("_")[0])

        if value.noisy:
            element.set("noisy", "true")

        return

    element.set("reason", _xml_text(_absence(profile.of_test(test), names)))


def _absence(entries: Iterable[Measurement], names: Sequence[str]) -> str:
    """The first failure that stands in the place of a value, or of its whole test."""
    reason = "not measured yet"
    for entry in entries:
        failures = [value for value in entry.values if isinstance(value, Failure)]
        for failure in failures:
            if failure.name in (*names, entry.test):
                return describe_failure(failure)

        reason = describe_failure(failures[0]) if failures else "the test gave no such value"

    return reason


def _xml_text(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold, not even escaped."""
    return "".join(
        char if char in "\t\n\r" or " " <= char <= "\ud7ff" or char >= "\ue000" else "?"
        for char in text
        if char not in "\ufffe\uffff"
    )
