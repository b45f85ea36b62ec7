"""What a run of `thermal_vm.py` has seen, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vm_machine import Guest


class Report:
    """Prints each check as it is made. `failed` once one did not hold, or if none was made."""

    def __init__(self) -> None:
        self.checks = 0
        self.wrong = 0

    @property
    def failed(self) -> bool:
        return self.wrong > 0 or self.checks == 0

    def begin(self, name: str, up_s: float) -> None:
        """A step, at this time of the guest's clock."""
        print(f"--- {name} (guest {up_s:.0f} s)", flush=True)

    def check(self, holds: bool, text: str) -> None:
        self.checks += 1
        self.wrong += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {text}", flush=True)

    def end(self, guest: Guest, took_s: float) -> None:
        print(
            f"=== {self.checks} checks, {self.wrong} failed; {took_s / 60:.1f} minutes,"
            f" of which the emulation computed {guest.computed_s / 60:.1f}",
            flush=True,
        )
