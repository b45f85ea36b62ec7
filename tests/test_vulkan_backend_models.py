"""Whole models on the Vulkan device: right within tolerance, or refused by a name.

Cold, on a software driver, a model takes from half a minute to many;
`SWITCHGEAR_TEST_SHADER_CACHE` names a folder that keeps what was compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import devices
import pytest
import vulkan_cache
from isolated_backend import Steps, isolated
from model_catalogue import BY_NAME, CATALOGUE
from npu_helpers import written

from switchgear.backends import generate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.slow]
# Of the largest value of the reference. In half precision some models miss the 1e-2 that their
# known-answer check asks for, and are then served in fp32: here is held that it is rounding.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
LIMIT_S = 590.0
BY_SIZE = [model.name for model in sorted(CATALOGUE, key=lambda model: model.size_bytes)]


@pytest.fixture(autouse=True)
def vulkan() -> list[str]:
    return devices.require_vulkan()


def hold(path: str, precision: str) -> None:
    steps: Steps = [["load", path, precision, {}], ["run", 1], ["run", 2]]
    environment = vulkan_cache.environment()
    result = isolated("vulkan", steps, environment=environment, limit_s=LIMIT_S)
    loaded, *shares = result.answers
    if "error" in loaded:
        domain, _, name, text = loaded["error"]
        assert (domain, name) == ("switchgear", "UnsupportedModel")
        assert "variables" in text or any(word.isupper() for word in text.split()), text
        return

    assert loaded["same_info"]
    assert loaded["coverage"][2] == 1.0
    for share in shares:
        assert max(share.values()) < TOLERANCE[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", BY_SIZE)
def test_every_model(name: str, precision: str) -> None:
    hold(str(BY_NAME[name].fetch()), precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_mobilenet(precision: str, tmp_path: Path) -> None:
    hold(written(tmp_path, generate.mobilenet_v1()), precision)
