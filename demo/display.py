"""What a person sees while the demo runs: a live table, plain lines, or nothing until the end."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .outcomes import Outcome, Request
from .table import (
    ANSWER_CHARACTERS_MAX,
    NUMBERS_WIDTH,
    answer_characters,
    describe_end,
    describe_outcome,
    describe_running,
    draw_table,
    format_time,
    shorten,
)

REFRESH_PER_S = 4
PLAIN_WIDTH = NUMBERS_WIDTH + ANSWER_CHARACTERS_MAX // 2
"""Width of the table where there is no terminal to ask."""


class Display(Protocol):
    """Told what happens, in order. None of these calls may fail for what an answer says."""

    def shown(self) -> AbstractContextManager[object]:
        """To be held while requests run."""

    def note(self, text: str) -> None:
        """Something was done to the cluster."""

    def begin(self, request: Request) -> None:
        """A request is about to be sent."""

    def take_text(self, piece: str) -> None:
        """More of its answer has come."""

    def end(self, outcome: Outcome) -> None:
        """It is answered, and its claims were checked."""

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """No request follows; the last one may have broken a claim."""


class SilentDisplay:
    """Shows nothing: for `--json`, whose one object is printed elsewhere."""

    def shown(self) -> AbstractContextManager[object]:
        return nullcontext()

    def note(self, text: str) -> None:
        """Nothing is shown."""

    def begin(self, request: Request) -> None:
        """Nothing is shown."""

    def take_text(self, piece: str) -> None:
        """Nothing is shown."""

    def end(self, outcome: Outcome) -> None:
        """Nothing is shown."""

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing is shown."""


class PlainDisplay(SilentDisplay):
    """Lines for a pipe or a file: one for each event, and the table at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        console.width = PLAIN_WIDTH

    def note(self, text: str) -> None:
        self._print(f"  {text}")

    def begin(self, request: Request) -> None:
        self._print(f"{request.number}. {request.title}")

    def end(self, outcome: Outcome) -> None:
        reply = outcome.reply
        self._print(
            f"  prompt {reply.prompt_tokens} tokens, hit {reply.hit_tokens}, first token after"
            f" {format_time(reply.ttft_s)}: match {format_time(reply.match_s)},"
            f" fetch {format_time(reply.fetch_s)}, prefill {format_time(reply.prefill_s)}"
        )
        self._print(f"  answer: {shorten(reply.text, ANSWER_CHARACTERS_MAX)}")
        for claim in outcome.claims:
            self._print(f"  {'ok' if claim.holds else 'WRONG'}: {claim.text}")

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        self._print("")
        characters = answer_characters(PLAIN_WIDTH)
        rows = [describe_outcome(outcome, characters) for outcome in outcomes]
        self._console.print(draw_table(rows))
        for line in describe_end(outcomes):
            self._print(line)

    def _print(self, line: str) -> None:
        # soft_wrap: a line of a log stays a line, however wide the terminal is.
        self._console.print(Text(line), soft_wrap=True)


class LiveDisplay(SilentDisplay):
    """A table that grows in place, with what was done to the cluster above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._characters = answer_characters(console.width)
        self._rows: list[list[str]] = []
        self._running: Request | None = None
        self._text = ""
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, transient=True)

    def shown(self) -> AbstractContextManager[object]:
        return self._live

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def begin(self, request: Request) -> None:
        self._running = request
        self._text = ""
        self._draw()

    def take_text(self, piece: str) -> None:
        self._text += piece
        self._draw()

    def end(self, outcome: Outcome) -> None:
        self._running = None
        self._rows.append(describe_outcome(outcome, self._characters))
        # In full, because the table has room for its beginning only.
        answer = " ".join(outcome.reply.text.split())
        self._console.print(Text(f"{outcome.request.number}. answer: {answer}"))
        for claim in outcome.claims:
            mark, style = ("ok", "green") if claim.holds else ("WRONG", "bold red")
            line = Text(f"{outcome.request.number}. ").append(mark, style).append(f" {claim.text}")
            self._console.print(line)
        self._draw()

    def finish(self, outcomes: Sequence[Outcome]) -> None:
        self._console.print(draw_table(self._rows))
        for line in describe_end(outcomes):
            self._console.print(Text(line, style="bold"))

    def _draw(self) -> None:
        rows = list(self._rows)
        if self._running is not None:
            rows.append(describe_running(self._running, self._text, self._characters))
        self._live.update(Group("", draw_table(rows)))


def choose_display(console: Console, *, is_json: bool) -> Display:
    """The display for where the output goes."""
    if is_json:
        return SilentDisplay()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
