"""The table of requests: what its cells say, and how it is drawn."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .outcomes import Outcome, Request

COLUMNS = (
    "",
    "request",
    "prompt\ntokens",
    "tokens\nhit",
    "first\ntoken",
    "of which\nmatch",
    "\nfetch",
    "\nprefill",
    "answer",
)
TEXT_COLUMNS = ("request", "answer")
"""Set left, and wrapped where there is not enough room."""

NUMBERS_WIDTH = 94
"""Columns of text that everything but the answers takes."""

ANSWER_CHARACTERS_MIN = 24
ANSWER_CHARACTERS_MAX = 80


def answer_characters(table_width: int) -> int:
    """How much of an answer is shown in a table so wide: two lines where there is room."""
    room = 2 * (table_width - NUMBERS_WIDTH)
    return min(max(room, ANSWER_CHARACTERS_MIN), ANSWER_CHARACTERS_MAX)


def describe_outcome(outcome: Outcome, characters: int) -> list[str]:
    """The cells of a request that is answered, in the order of COLUMNS."""
    reply = outcome.reply
    times_s = (reply.ttft_s, reply.match_s, reply.fetch_s, reply.prefill_s)
    return [
        *describe_request(outcome.request),
        f"{reply.prompt_tokens:,}",
        f"{reply.hit_tokens:,}",
        *(format_time(time_s) for time_s in times_s),
        shorten(reply.text, characters),
    ]


def describe_request(request: Request) -> list[str]:
    """The first cells of a request."""
    return [str(request.number), request.title]


def describe_running(request: Request, text: str, characters: int) -> list[str]:
    """The cells of a request that is being answered; `text` is what has come of the answer."""
    return [*describe_request(request), *("",) * 6, shorten(text, characters) or "..."]


def format_time(time_s: float) -> str:
    """Milliseconds below a second, otherwise seconds: 3 ms, 240 ms, 4.90 s."""
    return f"{time_s:.2f} s" if time_s >= 0.9995 else f"{time_s * 1000:.0f} ms"


def shorten(text: str, characters: int) -> str:
    """A text on one line, cut to so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def describe_end(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the last table: the one to remember, unless a claim was broken.

    It sets the first request against the second, which asks something else about the same text.
    """
    if len(outcomes) < 2 or any(outcome.broken_claims for outcome in outcomes):
        return []
    cold, hit = (outcome.reply.ttft_s for outcome in outcomes[:2])
    claims = sum(len(outcome.claims) for outcome in outcomes)
    return [
        "",
        f"all {claims} claims hold",
        f"time to first token {format_seconds(cold)} -> {format_seconds(hit)}"
        " (request 1, nothing stored; request 2, a hit)",
    ]


def format_seconds(time_s: float) -> str:
    """Seconds with one figure behind the point, two below a tenth: 11.4 s, 0.4 s, 0.04 s."""
    return f"{time_s:.1f} s" if time_s >= 0.095 else f"{time_s:.2f} s"


def draw_table(rows: Sequence[Sequence[str]]) -> Table:
    """The rows as a table for rich."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        is_text = name in TEXT_COLUMNS
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows:
        # Text, not markup: an answer may hold square brackets.
        table.add_row(*(Text(cell) for cell in row))
    return table
