"""Roles of thermal zones: of every dumped device, and of types that no dump here has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from sysfs_tree import device_files

from switchgear.daemon.thermal.roles import name_roles

if TYPE_CHECKING:
    from pathlib import Path

# What the dumps call finer than our roles.
_COARSE = {
    "soc": "other",
    "board": "other",
    "battery": "other",
    "pmic": "other",
    "camera": "other",
    "wifi": "other",
}

NONE = "no temperature"

# Types as vendors' kernels name them, device by device: (device, type, role).
OTHERS = [
    ("Snapdragon 845", "cpu0-silver-usr", "cpu"),
    ("Snapdragon 845", "cpu3-gold-usr", "cpu"),
    ("Snapdragon 845", "kryo-l3-0-usr", "cpu"),
    ("Snapdragon 845", "gpu0-usr", "gpu"),
    ("Snapdragon 845", "lpass-usr", "other"),
    ("Snapdragon 845", "mdm-core-usr", "other"),
    ("Snapdragon 845", "pop-mem-step", "other"),
    ("Snapdragon 845", "xo-therm-adc", "skin"),
    ("Snapdragon 845", "quiet-therm-adc", "skin"),
    ("Snapdragon 845", "msm-therm-adc", "skin"),
    ("Snapdragon 845", "ibat-high", NONE),
    ("Snapdragon 845", "vbat_too_low", NONE),
    ("Snapdragon 845", "soc", NONE),
    ("Snapdragon 865", "cpu-1-3-usr", "cpu"),
    ("Snapdragon 865", "gpuss-max-step", "gpu"),
    ("Snapdragon 865", "npu-usr", "npu"),
    ("Snapdragon 865", "q6-hvx-usr", "npu"),
    ("Snapdragon 865", "cwlan-usr", "other"),
    ("Snapdragon 865", "apc-0-max-step", "cpu"),
    ("Snapdragon 888", "cpuss-0", "cpu"),
    ("Snapdragon 888", "nspss-2", "npu"),
    ("Snapdragon 888", "mdmss-1", "other"),
    ("Snapdragon 888", "pm8350b-bcl-lvl1", NONE),
    ("Snapdragon 888", "pm8350c_tz", "other"),
    ("Snapdragon 888", "rear-cam-therm", "skin"),
    ("Snapdragon X13s", "skin-temp-thermal", "skin"),
    ("Snapdragon, old", "tsens_tz_sensor9", "other"),
    ("Snapdragon 8 Elite", "nsphvx-0-2", "npu"),
    ("Snapdragon 8 Elite", "cpullc-1-0", "cpu"),
    ("Snapdragon 8 Elite", "ddr", "other"),
    ("Snapdragon 8 Elite", "video", "other"),
    ("Exynos 2100", "BIG", "cpu"),
    ("Exynos 2400", "MIDH", "cpu"),
    ("Exynos 2400", "MIDL", "cpu"),
    ("Exynos 9810", "LITTLE", "cpu"),
    ("Exynos 7420", "ATLAS_thermal", "cpu"),
    ("Exynos 2100", "G3D", "gpu"),
    ("Exynos 2100", "NPU", "npu"),
    ("Exynos 2100", "ISP", "other"),
    ("Exynos, mainline", "cpu0-thermal", "cpu"),
    ("Helio", "mtktscpu", "cpu"),
    ("Helio", "mtktsAP", "skin"),
    ("Helio", "mtktspmic", "other"),
    ("Helio", "mtktsbattery", "other"),
    ("Helio", "mtktsgpu", "gpu"),
    ("Dimensity", "gpu1", "gpu"),
    ("Dimensity", "apu", "npu"),
    ("Dimensity", "mdla", "npu"),
    ("Dimensity", "vpu", "npu"),
    ("Dimensity", "ap_ntc", "skin"),
    ("Dimensity", "md1", "other"),
    ("MT8195", "vpu1-thermal", "npu"),
    ("MT8195", "gpu0-thermal", "gpu"),
    ("MT8195", "infra-thermal", "other"),
    ("Helio", "mtktsbtsnrpa", "other"),
    ("Helio", "mtktswmt", "other"),
    ("Helio", "mtktspcb1", "other"),
    ("Helio", "mtktsskin", "skin"),
    ("Dimensity", "ltepa_ntc", "other"),
    ("Dimensity", "soc-top1", "other"),
    ("Dimensity", "cpu-big-core0-1", "cpu"),
    ("Dimensity", "shell_max", "skin"),
    ("Dimensity", "mtk-master-charger", "other"),
    ("MT6880", "cpu_little2", "cpu"),
    ("MT6880", "pmic_vgpu", "other"),
    ("MT6880", "md_5g", "other"),
    ("Snapdragon, OnePlus", "pa-therm2-sys3", "other"),
    ("Snapdragon, OnePlus", "wlan-therm", "other"),
    ("Snapdragon, OnePlus", "pm8550_gpio03_usr", "other"),
    ("Snapdragon, Sony", "sdm-therm-monitor", "skin"),
    ("Snapdragon, Sony", "back_therm", "skin"),
    ("Unisoc T618", "ank0-thmzone", "cpu"),
    ("Unisoc T618", "prometheus6-tzone0", "cpu"),
    ("Unisoc T618", "cputop-thmzone", "cpu"),
    ("Unisoc T618", "board-thmzone", "other"),
    ("RK3399", "cpu-thermal", "cpu"),
    ("RK3588, vendor", "bigcore1-thermal", "cpu"),
    ("RK3588, vendor", "littlecore-thermal", "cpu"),
    ("RK3588, vendor", "soc-thermal", "other"),
    ("RK3588, vendor", "center-thermal", "other"),
    ("RK3588, vendor", "npu-thermal", "npu"),
    ("Amlogic A311D2", "a53_thermal", "cpu"),
    ("Amlogic A311D2", "a73_thermal", "cpu"),
    ("Amlogic A311D2", "nna_thermal", "npu"),
    ("Amlogic A311D2", "ddr_thermal", "other"),
    ("Allwinner H6", "gpu-thermal", "gpu"),
    ("Allwinner A523", "cpul_thermal_zone", "cpu"),
    ("Allwinner A523", "npu_thermal_zone", "npu"),
    ("Allwinner H616", "ve-thermal", "other"),
    ("i.MX8QM", "gpu0-thermal", "gpu"),
    ("i.MX8QM", "pmic-thermal0", "other"),
    ("i.MX8MP", "soc-thermal", "other"),
    ("i.MX6", "imx_thermal_zone", "other"),
    ("i.MX95", "a55-thermal", "cpu"),
    ("Jetson Xavier", "CPU-therm", "cpu"),
    ("Jetson Xavier", "GPU-therm", "gpu"),
    ("Jetson Xavier", "AO-therm", "other"),
    ("Jetson Xavier", "AUX-therm", "other"),
    ("Jetson Xavier", "PMIC-Die", "other"),
    ("Jetson Xavier", "thermal-fan-est", "other"),
    ("Jetson Nano", "MEM-therm", "other"),
    ("Jetson TX2", "BCPU-therm", "cpu"),
    ("Jetson TX2", "Tboard_tegra", "other"),
    ("Jetson Orin", "cv0-thermal", "npu"),
    ("Jetson Orin", "SOC0-therm", "other"),
    ("Jetson Orin", "tj-thermal", "other"),
    ("Raspberry Pi 4", "cpu-thermal", "cpu"),
    ("Intel", "x86_pkg_temp", "cpu"),
    ("Intel", "B0D4", "cpu"),
    ("Intel", "TCPU_PCI", "cpu"),
    ("Intel", "TSKN", "skin"),
    ("Intel", "SEN3", "skin"),
    ("Intel", "pch_cannonlake", "other"),
    ("Intel", "iwlwifi_1", "other"),
    ("Intel", "INT3400 Thermal", NONE),
    ("Intel", "acpitz", "other"),
    ("Kirin 990", "cluster1", "cpu"),
    ("Kirin 990", "gpu", "gpu"),
    ("Kirin 990", "npu", "npu"),
    ("Kirin 990", "shell_frame", "skin"),
    ("Kirin 990", "Battery", "other"),
    ("Pixel 6", "ocp_tpu", NONE),
    ("Pixel 6", "soft_ocp_gpu", NONE),
    ("Pixel 9", "uvlo1", NONE),
    ("Pixel 4", "VIRTUAL-SKIN-CPU", "skin"),
    ("Unisoc T606", "apcpu0-thmzone", "cpu"),
    ("Unisoc T606", "gpu-thmzone", "gpu"),
    ("StarFive JH7110", "cpu-thermal", "cpu"),
    ("Horizon X3", "bpu-thermal", "npu"),
    ("hwmon", "k10temp", "cpu"),
    ("hwmon", "coretemp", "cpu"),
    ("hwmon", "amdgpu", "gpu"),
    ("hwmon", "nouveau", "gpu"),
    ("hwmon", "nvme", "other"),
    ("hwmon", "input0", "other"),
]


@pytest.mark.parametrize("file", device_files(), ids=lambda file: file.stem)
def test_every_zone_of_a_dumped_device_has_its_role(file: Path) -> None:
    zones = json.loads(file.read_text())["zones"]
    namings = name_roles([zone["type"] for zone in zones])
    for zone, naming in zip(zones, namings, strict=True):
        expected = _COARSE.get(zone["domain"], zone["domain"])
        if expected == "not_temperature":
            assert not naming.temperature, zone["type"]
        else:
            assert (naming.temperature, naming.role) == (True, expected), zone["type"]


@pytest.mark.parametrize(("device", "kind", "role"), OTHERS, ids=lambda value: str(value))
def test_types_of_devices_without_a_dump(device: str, kind: str, role: str) -> None:
    (naming,) = name_roles([kind])
    assert (naming.role if naming.temperature else NONE) == role, device


def test_vpu_is_a_video_unit_where_the_device_names_an_npu() -> None:
    alone, _ = name_roles(["vpu_thermal", "ddr_thermal"])
    beside, npu = name_roles(["vpu_thermal", "nna_thermal"])
    assert (alone.role, beside.role, npu.role) == ("npu", "other", "npu")


@pytest.mark.parametrize("kind", ["", " ", "7", "-_-", "\u00e9\u4e2d", "x" * 4000])
def test_odd_types_are_other(kind: str) -> None:
    (naming,) = name_roles([kind])
    assert naming.role == "other"


@pytest.mark.parametrize("kind", ["soc-thermal", "soc_max", "package-thermal", "tj-thermal"])
def test_sensors_of_the_whole_chip_are_marked(kind: str) -> None:
    (naming,) = name_roles([kind])
    assert (naming.role, naming.chip_wide) == ("other", True)
