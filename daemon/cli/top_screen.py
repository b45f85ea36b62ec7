"""The screen of `switchgear top`: the only place that needs textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.timer import Timer
from textual.widgets import Footer, Static

from switchgear.daemon.cli import top_text
from switchgear.daemon.cli.tables import cut
from switchgear.daemon.cli.top_picture import Picture

EVERY_S: Final = 1.0
_SECTIONS: Final = ("backends", "latency", "queues", "zones")
_STYLES: Final = {
    "ready": "green",
    "tripped": "bold red",
    "absent": "red",
    "degraded": "red",
}


class TopScreen(App[None]):
    """Shows a picture each second. `look` blocks and gives one; it runs in a thread."""

    TITLE = "switchgear top"
    CSS = """
    Screen { layers: base; }
    #headline, #line { height: 1; }
    .heading { height: 1; margin-top: 1; text-style: bold; }
    .section { height: auto; max-height: 8; }
    #events { height: 1fr; min-height: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("r", "look", "Now"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, look: Callable[[], Picture]) -> None:
        super().__init__()
        self._look = look
        # Held while a question is on its way.
        self.asking = asyncio.Lock()
        self._paused = False
        self._timer: Timer | None = None
        self.picture: Picture | None = None

    def compose(self) -> ComposeResult:
        yield Static("asking the daemon", id="headline", markup=False)
        yield Static("", id="line", markup=False)
        with Vertical(id="body"):
            for name in _SECTIONS:
                heading = Static(name.upper(), id=f"{name}-heading", classes="heading")
                section = Static("", id=name, classes="section", markup=False)
                heading.display = section.display = False
                yield heading
                yield section

            yield Static("EVENTS", classes="heading")
            with VerticalScroll(id="events"):
                yield Static("", id="event-lines", markup=False)

        yield Footer()

    def on_mount(self) -> None:
        self._timer = self.set_interval(EVERY_S, self.action_look)
        self.action_look()

    def action_pause(self) -> None:
        """Stops and goes on asking."""
        self._paused = not self._paused
        if self._timer is not None:
            self._timer.pause() if self._paused else self._timer.resume()

        self._show()

    def action_look(self) -> None:
        """Asks now, beside the screen: keys work while a daemon is slow to answer."""
        self.run_worker(self.ask())

    async def ask(self) -> None:
        """Asks and shows the answer. One question at a time: a slow daemon is not pressed."""
        if self.asking.locked():
            return

        async with self.asking:
            self.picture = await asyncio.to_thread(self._look)

        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        picture = self.picture
        if picture is None:
            return

        width = self.size.width
        lead = "[paused] " if self._paused else ""
        color = "bold green" if picture.good else "bold red"
        self._set("headline", Text(cut(lead + picture.headline, width), style=color))
        self._set("line", Text(cut(picture.line, width)))
        table = top_text.backends(picture.backends, width)
        rows = [Text(table[0], style="dim")]
        for line, row in zip(picture.backends, table[1:], strict=True):
            rows.append(_colored(row, line.state))

        rows += [Text(row, style="red") for row in top_text.reasons(picture.backends, width)]
        self._section("backends", rows if picture.backends else [])
        self._section("latency", [Text(row) for row in top_text.latency(picture, width)])
        self._section("queues", [Text(row) for row in top_text.queues(picture.queues, width)])
        self._section("zones", [Text(row) for row in top_text.zones(picture.zones, width)])
        events = [Text(cut(event, width)) for event in reversed(picture.events)]
        self._set("event-lines", Text("\n").join(events))

    def _section(self, name: str, rows: list[Text]) -> None:
        """Fills a section; one with nothing to tell takes no room."""
        self._set(name, Text("\n").join(rows))
        for part in (name, f"{name}-heading"):
            self.query_one(f"#{part}", Static).display = bool(rows)

    def _set(self, name: str, text: Text) -> None:
        self.query_one(f"#{name}", Static).update(text)


def _colored(row: str, state: str) -> Text:
    """The state's word in a colour; the word itself says all."""
    text = Text(row)
    start = row.find(state[:11], 8)
    if start >= 0:
        text.stylize(_STYLES.get(state, "yellow"), start, start + len(state))

    return text
