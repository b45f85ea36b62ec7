"""JSON, XML and the table of a profile."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_helpers import CPU_SUBJECT, LAVAPIPE, NO_NPU, ZONES, key, profile, reports

from switchgear.fingerprints.assemble import assemble
from switchgear.fingerprints.dump import WIDTH, render, to_table, to_xml
from switchgear.fingerprints.measurement import (
    NPU_UTILISATION,
    OPENCL_BANDWIDTH,
    VULKAN_MATMUL,
    Failure,
    Report,
    Subject,
    Value,
)
from switchgear.fingerprints.profile import Profile

TAGS = [
    "soc",
    "opencl_bandwidth_mb_s",
    "vulkan_avg_latency_ms",
    "nnapi_npu_utilization_pct",
    "thermal_throttle_threshold_c",
]


def xml(found: Profile) -> ET.Element:
    return ET.fromstring(to_xml(found).encode())


def test_the_xml_has_the_five_elements_in_order() -> None:
    root = xml(profile())
    assert (root.tag, root.get("schema")) == ("device_fingerprint", "2")
    assert [element.tag for element in root] == TAGS
    soc, bandwidth, latency, npu, threshold = root
    assert soc.text == "rockchip,rk3588"
    assert (bandwidth.text, bandwidth.get("device")) == ("6000", "gpu-8680a656")
    assert (latency.text, latency.get("device")) == ("12", "gpu-8680a656")
    assert npu.text is None
    assert npu.get("reason") == "switchgear:400 NoBackend: no delegate is configured"
    assert (threshold.text, threshold.get("source")) == ("75", "kernel_passive_trip")


def test_the_xml_of_nothing() -> None:
    root = xml(assemble([], key=key(), measured_at=0))
    assert [element.get("reason") for element in root[1:4]] == ["not measured yet"] * 3
    assert (root[4].text, root[4].get("device")) == ("65", "cpu")


def test_the_xml_names_the_npus_model_and_a_noisy_machine() -> None:
    npu = Subject(api="npu", name="ethos", device_type="npu")
    value = Value("int8_utilisation_pct", 61.25, 0.5, 9, "%", "busy counter", noisy=True)
    root = xml(assemble([Report(NPU_UTILISATION, npu, (value,))], key=key(), measured_at=0))
    assert root[3].text == "61.25"
    assert (root[3].get("model"), root[3].get("noisy")) == ("int8", "true")


def test_a_failure_says_which_library_was_opened() -> None:
    failure = Failure(
        "matmul_ms", "vulkan", -4, "VK_ERROR_DEVICE_LOST", "lost", "/usr/lib/libvulkan_x.so"
    )
    report = Report(VULKAN_MATMUL, LAVAPIPE, (failure,))
    found = assemble([report], key=key(), measured_at=0)
    assert xml(found)[2].get("reason") == (
        "vulkan:-4 VK_ERROR_DEVICE_LOST: lost (/usr/lib/libvulkan_x.so)"
    )
    unwrapped = " ".join(to_table(found).split())
    assert "vulkan:-4 VK_ERROR_DEVICE_LOST: lost (/usr/lib/libvulkan_x.so)" in unwrapped


def test_the_json_is_the_model() -> None:
    text = render(profile(), "json")
    assert Profile.model_validate_json(text) == profile()
    assert json.loads(text)["schema_version"] == 2


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="json, xml, table"):
        render(profile(), "yaml")


def test_the_table_shows_every_number_and_every_reason() -> None:
    table = to_table(profile())
    for report in reports():
        for value in report.values:
            assert value.name in table

        for note in report.notes:
            assert note in table

    for zone in ZONES:
        assert zone.zone_id in table

    assert "NOISY" in table
    assert "no delegate is" in table
    assert max(len(line) for line in table.splitlines()) <= WIDTH
    assert table.isascii()


def test_long_and_odd_texts_stay_within_the_width() -> None:
    odd = "very long " * 30 + "x" * 200 + "\x1b[31m\x07\t\r\n\u4e2d"
    subject = replace(CPU_SUBJECT, name=odd, driver_name=odd)
    report = Report(
        OPENCL_BANDWIDTH,
        subject,
        (
            Value("w" * 90, 1e30, 1e-30, 10**9, "u" * 5, odd),
            replace(NO_NPU, name="n" * 100, text=odd, library="/" + "l" * 300),
        ),
        notes=(odd,),
    )
    found = assemble([report], key=key(), measured_at=0)
    table = to_table(found)
    assert max(len(line) for line in table.splitlines()) <= WIDTH
    assert "\x1b" not in table
    assert xml(found) is not None


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(min_value=0, allow_infinity=False),
    st.text(max_size=200),
    st.text(min_size=1, max_size=60),
)
def test_any_report_can_be_dumped(median: float, spread: float, text: str, name: str) -> None:
    subject = Subject(api="opencl", name=text, device_type="gpu", driver_info=text)
    values = (
        Value("write_mb_s", median, spread, 3, "MB/s", text),
        Failure(name, "opencl", -5, name, text, text),
    )
    found = assemble(
        [Report(OPENCL_BANDWIDTH, subject, values)], key=key(soc=text), measured_at=0
    )
    assert [element.tag for element in xml(found)] == TAGS
    lines = to_table(found).splitlines()
    assert max(len(line) for line in lines) <= WIDTH, [x for x in lines if len(x) > WIDTH]
