"""The Grafana dashboard asks for metrics and labels that the daemon has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from switchgear.daemon.telemetry import service_families
from switchgear.daemon.telemetry.device_families import (
    backend_device_families,
    breaker_families,
    pool_families,
    zone_families,
)
from switchgear.daemon.telemetry.requests import RequestCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from switchgear.daemon.telemetry.families import Family

DOCS = Path(__file__).parents[1] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "switchgear.json").read_text(encoding="utf-8"))
# What Prometheus adds by itself, and a histogram's own.
FOREIGN_LABELS = {"instance", "le"}
METRIC = re.compile(r"switchgear_[a-z_]+")
SELECTOR = re.compile(r"(switchgear_[a-z_]+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"by \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def families() -> dict[str, Family]:
    """All that the daemon can tell, by name; none of them has a value here."""
    verdicts = SimpleNamespace(hits=0, misses=0, size_bytes=0)
    service: Any = SimpleNamespace(
        ready=True,
        version="0",
        info=lambda: {"uptime_s": 0.0},
        problems=[],
        router=SimpleNamespace(installed=()),
        sessions=SimpleNamespace(opened=0, in_flight=0, all=list),
        server=SimpleNamespace(connections=[]),
        models=SimpleNamespace(all_for=lambda uid: [], verdicts=verdicts),
        preparing=SimpleNamespace(verdicts=verdicts, backends={}, enabled=False),
        pool=SimpleNamespace(lanes=list),
    )
    all_of_them = [
        *RequestCounts().families(None),
        *service_families.collect(service, None),
        *breaker_families([]),
        *zone_families([]),
        *pool_families([]),
        *backend_device_families({}),
    ]
    return {family.name: family for family in all_of_them}


def expressions() -> Iterator[tuple[str, str, str]]:
    """Each panel's title, query and legend."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def base(name: str, families: dict[str, Family]) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        stem = name.removesuffix(suffix)
        if stem in families and families[stem].kind == "histogram":
            return stem

    return name


def test_every_metric_and_label_that_is_asked_for_exists(families: dict[str, Family]) -> None:
    asked = set()
    for title, expression, legend in expressions():
        names = {base(name, families) for name in METRIC.findall(expression)}
        assert names, title
        assert names <= set(families), title
        asked |= names
        labels = set.union(*(set(families[name].labels) for name in names)) | FOREIGN_LABELS
        for _, inside in SELECTOR.findall(expression):
            used = {part.split("=")[0].rstrip("!") for part in inside.split(",") if part}
            assert used <= labels, (title, used)

        for inside in GROUPING.findall(expression):
            assert {name.strip() for name in inside.split(",")} <= labels, title

        assert set(LEGEND.findall(legend)) <= labels, title

    assert len(asked) > 15


def test_its_variables_are_asked_of_metrics_that_exist(families: dict[str, Family]) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert match is not None
            assert match.group(1) in families
            assert match.group(2) in {*families[match.group(1)].labels, *FOREIGN_LABELS}


def test_panels_do_not_overlap_and_are_numbered_apart() -> None:
    taken: set[tuple[int, int]] = set()
    numbers = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        numbers.add(panel["id"])

    assert len(numbers) == len(DASHBOARD["panels"])


def test_the_page_lists_every_metric_with_its_labels(families: dict[str, Family]) -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(switchgear_\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    documented = {name: (kind, labels.strip()) for name, kind, labels in rows}
    # What a whole answer has beside its sources.
    documented.pop("switchgear_metrics_cut")
    assert documented == {
        name: (family.kind, ", ".join(family.labels)) for name, family in families.items()
    }
