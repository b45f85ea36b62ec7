"""What the kernel's pressure files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from switchgear.daemon.pressure import memory_is_short, some_avg10

CALM = "some avg10=0.00 avg60=0.12 avg300=0.05 total=1234\nfull avg10=99.00 avg60=0 total=1\n"


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        (CALM, 0.0),
        ("some avg10=12.50 avg60=1", 12.5),
        ("some avg10=x", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_line_counts(text: str, percent: float) -> None:
    assert some_avg10(text) == percent


@pytest.mark.parametrize(("percent", "short"), [("9.99", False), ("10.00", True)])
def test_the_limit(tmp_path: Path, percent: str, short: bool) -> None:
    path = tmp_path / "memory"
    path.write_text(f"some avg10={percent} avg60=0.00 avg300=0.00 total=0\n")
    assert memory_is_short(path) is short


def test_a_kernel_without_it_is_never_short(tmp_path: Path) -> None:
    assert not memory_is_short(tmp_path / "none")
