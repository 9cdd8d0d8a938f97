"""The progress view: quiet and live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hotswap.demo.view import JobView

REFRESH_S = 0.1
PLAIN_EVERY_STEPS = 5
_COLOURS = {"lost": "red", "recovering": "yellow", "training": "green", "ready": "cyan"}


class Screen:
    """Shows jobs one after the other. With *silent* it shows nothing."""

    def __init__(self, stream: TextIO | None = None, *, silent: bool = False) -> None:
        """*stream*: standard output by default."""
        self.console = Console(file=stream or sys.stdout, quiet=silent, highlight=False)
        self._live = self.console.is_terminal and not silent

    def say(self, text: RenderableType = "") -> None:
        """Print something that stays."""
        self.console.print(text, soft_wrap=isinstance(text, str))

    @contextlib.contextmanager
    def job(self, title: str, view: JobView) -> Iterator[_Live | _Plain]:
        """Show *view* while the job runs; feed the result with everything that happens."""
        self.console.print(Text(title, style="bold"))
        if not self._live:
            yield _Plain(self.console, view)
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            yield _Live(live, view)
        for at, sentence in view.story:
            self.console.print(_line(at, sentence))


class _Plain:
    """A line for each thing that happened, and one every few steps."""

    def __init__(self, console: Console, view: JobView) -> None:
        self._console = console
        self._view = view
        self._told = 0
        self._shown = -1

    def __call__(self, event: Mapping[str, Any]) -> None:
        if not event:
            return
        view = self._view
        view.apply(event)
        for at, sentence in view.story[self._told :]:
            self._console.print(_line(at, sentence), soft_wrap=True)
        self._told = len(view.story)
        due = view.step // PLAIN_EVERY_STEPS
        if event["event"] == "record" and due > self._shown and view.loss is not None:
            self._shown = due
            self._console.print(f"          step {view.step}  loss {view.loss:.4f}", soft_wrap=True)


class _Live:
    """The whole picture, drawn again a few times a second."""

    def __init__(self, live: Live, view: JobView) -> None:
        self._live = live
        self._view = view
        self._drawn_at = 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event:
            self._view.apply(event)
        now = time.monotonic()
        if now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            self._live.update(picture(self._view), refresh=True)


def picture(view: JobView) -> RenderableType:
    """Progress, nodes and the story so far."""
    progress = Table.grid(padding=(0, 2))
    loss = "" if view.loss is None else f"loss {view.loss:.4f}"
    progress.add_row(
        ProgressBar(total=view.steps, completed=view.committed, width=30),
        f"step {view.step}",
        f"committed {view.committed}/{view.steps}",
        loss,
        f"generation {view.generation}",
    )
    nodes = Table.grid(padding=(0, 2))
    for name, node in sorted(view.nodes.items()):
        nodes.add_row(
            name,
            node.role,
            f"slots {node.slots}" if node.slots else "",
            Text(node.state, style=_COLOURS.get(node.state, "")),
        )
    return Group(progress, nodes, *[_line(at, sentence) for at, sentence in view.story])


def _line(at: float, sentence: str) -> Text:
    style = "bold red" if sentence.startswith("kill -9") else ""
    return Text.assemble((f"{at:7.2f}s ", "dim"), (sentence, style))
