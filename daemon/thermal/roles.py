"""What a thermal zone measures, told from its type string by how vendors name such zones.

There is no list of devices here. A type is cut into words (`cpu-1-0-usr`: cpu, usr; `bigcore0`:
bigcore; `mtktsAP`: ap), endings that say only "this is a sensor" are dropped, and the words
that are left name the part. The tables below are vocabularies of parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from switchgear.fingerprints.zones_model import Role


def _vocabulary(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Limits of battery current, battery voltage or charge that a driver registered as a zone so
# that the thermal framework acts on them: milliamperes, millivolts, percent or counts.
_NOT_TEMPERATURE_WORDS: Final = _vocabulary(
    "bcl ibat vbat vph socd ocp uvlo vdroop smpl batoilo oilo cycle cycles current curr"
    " voltage volt percent percentage pct lvl level capacity count"
)
_NOT_TEMPERATURE_STEMS: Final = ("ibat", "vbat", "vdroop", "batoilo", "uvlo")
# The whole type, nothing before or after: state of charge (Pixel, Qualcomm), not system on
# chip.
_NOT_TEMPERATURE_TYPES: Final = frozenset({"soc"})
# ACPI's DPTF policy object registers a zone with a constant for its user-space daemon.
_POLICY_OBJECT: Final = re.compile(r"int(3400|c10[0-9a-f]{2})\s+thermal", re.I)

_BATTERY: Final = _vocabulary("battery batt bat bms fuelgauge")
_SKIN: Final = _vocabulary("skin shell case quiet surface frame backlight neutral xo")
_GPU: Final = _vocabulary(
    "g3d kgsl mali adreno amdgpu radeon nouveau nvidia i915 xe sgx powervr pvr"
)
_NPU: Final = _vocabulary(
    "npu nsp nspss nsphvx nsphmx hvx hmx cdsp hexagon apu mdla nna nnp nn tpu edgetpu aur"
    " gxp dla pva bpu kpu aipu ai ane ethos hailo cnn neural cv ivpu amdxdna"
)
# A video or a vision unit, depending on the vendor: an NPU unless the device names another one.
_MAYBE_NPU: Final = frozenset({"vpu"})
_CPU: Final = _vocabulary(
    "big mid little medium prime gold silver cluster core bigcore littlecore midcore apc"
    " kryo krait oryon cortex atlas apollo mngs ananke ank prometheus tctl tdie tccd"
    " coretemp k10temp zenpower b0d4 bigcpu midh midl cl"
)
# Parts of the chip, or beside it, that run no inference; `mdm-core` is a core of the modem.
_ELSEWHERE: Final = _vocabulary(
    "modem mdm mdmss md wlan cwlan wifi iwlwifi camera isp video venc vdec ddr dram mem"
    " lpass audio adsp display mdp infra img usb nvme ufs emmc pch board"
)
# Thermistors beside a transmitter: hot while it sends, whatever the case feels like.
_RADIO: Final = _vocabulary("rf modem mdm md wlan cwlan wifi wcn mmw")
_POWER_AMPLIFIER: Final = re.compile(r"(lte|nr|md|rf)?pa")
_CHIP: Final = _vocabulary("soc package pkg tj center chip imx ap tmu")
# Words that say "sensor" and nothing about where.
_THERMISTOR: Final = _vocabulary("therm ntc thermistor tsk tskn tamb sen")
_POWER_CHIP: Final = re.compile(
    r"(pm|pmi|pmk|pmr|pmih|pmd|pmx|smb|mt63|s2mp|rk8|max77)\d*[a-z]*\d*"
)
# On the die although they end in `therm`: blocks of Tegra, whose numbered `SOC0-therm` differs
# from a thermistor beside the chip (`soc_therm` of a Pixel).
_DIE_BLOCK: Final = re.compile(r"(tj|ao|pll|aux|mem|soc\d+)[-_]?therm", re.I)
_ARM_CORE: Final = re.compile(r"a\d{2,3}[a-z]?|x\d{1,3}|x86")
_MTK_PREFIX: Final = re.compile(r"^mtkts(bts)?(?=[a-z])", re.I)


@dataclass(frozen=True, slots=True)
class Naming:
    """What a type says. `temperature` is False for zones that hold another quantity."""

    role: Role
    chip_wide: bool = False
    temperature: bool = True


_NO_TEMPERATURE: Final = Naming("other", temperature=False)


def name_roles(types: Sequence[str]) -> list[Naming]:
    """The naming of each zone of one device, in the order given.

    All types of the device go in together: a word that vendors use for different parts (`vpu`)
    is settled by whether the device names the part in another way.
    """
    found = [_naming(kind) for kind in types]
    if any(naming.role == "npu" for naming in found):
        return found

    return [
        Naming("npu") if naming.temperature and _is_maybe_npu(kind) else naming
        for kind, naming in zip(types, found, strict=True)
    ]


def _words(kind: str) -> list[str]:
    """Lower-case words without their trailing numbers, and with them where they differ."""
    plain = _MTK_PREFIX.sub("", kind.strip()).lower()
    words: list[str] = []
    for word in re.split(r"[^a-z0-9]+", plain):
        stem = word.rstrip("0123456789")
        words += [word] if stem in (word, "") else [word, stem]

    return [word for word in words if word and not word.isdigit()]


def _is_maybe_npu(kind: str) -> bool:
    return not _MAYBE_NPU.isdisjoint(_words(kind))


def _any(words: list[str], vocabulary: frozenset[str]) -> bool:
    return not vocabulary.isdisjoint(words)


def _holds_no_temperature(kind: str, words: list[str]) -> bool:
    return (
        kind.strip().lower() in _NOT_TEMPERATURE_TYPES
        or _POLICY_OBJECT.match(kind) is not None
        or _any(words, _NOT_TEMPERATURE_WORDS)
        or any(word.startswith(_NOT_TEMPERATURE_STEMS) for word in words)
    )


def _naming(kind: str) -> Naming:
    words = _words(kind)
    if _holds_no_temperature(kind, words):
        return _NO_TEMPERATURE

    if _any(words, _SKIN):
        return Naming("skin")

    # A sensor in the battery or in a power chip says nothing of the processor it feeds.
    if _any(words, _BATTERY) or any(_POWER_CHIP.fullmatch(word) for word in words):
        return Naming("other")

    if any("gpu" in word for word in words) or _any(words, _GPU):
        return Naming("gpu")

    if _any(words, _NPU) or any(
        word.startswith("npu") or word.endswith("npu") for word in words
    ):
        return Naming("npu")

    outside = _is_outside(kind, words)
    if _any(words, _ELSEWHERE) and not outside:
        return Naming("other")

    if _any(words, _RADIO) or any(_POWER_AMPLIFIER.fullmatch(word) for word in words):
        return Naming("other")

    if any("cpu" in word or _ARM_CORE.fullmatch(word) for word in words) or _any(words, _CPU):
        return Naming("cpu")

    return Naming("skin") if outside else Naming("other", chip_wide=_any(words, _CHIP))


def _is_outside(kind: str, words: list[str]) -> bool:
    """Whether the type names a thermistor on the board or the case."""
    if _DIE_BLOCK.match(kind):
        return False

    # MediaTek's AP thermistor is the one its skin model weighs.
    beside_the_chip = kind.lower().startswith("mtkts") and "ap" in words
    return beside_the_chip or _any(words, _THERMISTOR)
