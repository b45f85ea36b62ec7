"""Switchgear: a local daemon that runs apps' inference on the best backend of a device."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    # Read on demand: importing the metadata machinery costs more than the client itself.
    if name == "__version__":
        from importlib.metadata import version

        return version("switchgear")

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
