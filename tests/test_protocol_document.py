"""`docs/protocol-states.md` says what the code does."""

from __future__ import annotations

from protocol_document import DOCUMENT, parts, written


def test_the_tables_are_those_of_the_code() -> None:
    """If this fails: python tests/protocol_document.py"""
    text = DOCUMENT.read_text()
    assert written(text) == text
    for name in parts():
        assert f"<!-- {name} -->" in text
