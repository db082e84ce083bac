"""The long text that the questions are about, and the prompts made of it. Pure.

The text is the interpreter's own help topics, so it is on every machine and differs a little from
one Python release to the next. Nothing here may depend on its words: claims are about tokens.
"""

from collections.abc import Callable
from importlib import import_module

TOPICS = ("typesseq", "typesmapping", "types")
"""In this order, as far as is asked for: sequences first, which the questions are about."""

TOKENS_MIN = 600
"""Less, and two questions about the text would not share two whole blocks."""
TOKENS_MAX = 6_000

CUTS_TRIED = 20
"""Ends of lines that are looked at; a line has about 16 tokens, a block 128."""

BORDER_TOKENS_MIN = 2
"""The first token of an answer is computed with the prompt; the border has to lie behind it."""


class MissingText(Exception):
    """The interpreter has not the help topics that the demo reads."""


def read_topics() -> str:
    """The topics as one text. Raises MissingText where Python was installed without them."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name].strip() for name in TOPICS)
    except (ImportError, AttributeError, KeyError) as error:
        raise MissingText(f"this Python has no pydoc_data.topics with {TOPICS}: {error}") from error


def join_prompt(document: str, question: str) -> str:
    """Document first: all questions about it then begin with the same blocks."""
    return f"{document.strip()}\n\n{question}"


def choose_document(
    text: str,
    *,
    tokens_max: int,
    tokens_to_border: Callable[[str], int],
    count_tokens: Callable[[str], int],
) -> str:
    """The start of `text`: whole lines, at most `tokens_max` tokens.

    Of the last `CUTS_TRIED` places to cut it takes the one with the smallest `tokens_to_border` of
    the document, but at least `BORDER_TOKENS_MIN`: so few tokens of an answer complete a block.
    Among equals the longest.
    """
    lines = text.splitlines(keepends=True)
    line_count = _largest(
        len(lines), lambda count: count_tokens("".join(lines[:count])) <= tokens_max
    )
    first = max(line_count - CUTS_TRIED, 0) + 1
    cuts = ["".join(lines[:count]).strip() for count in range(first, line_count + 1)]
    borders = {cut: tokens_to_border(cut) for cut in cuts if cut}
    far_enough = [cut for cut, border in borders.items() if border >= BORDER_TOKENS_MIN]
    assert far_enough, f"{tokens_max} tokens are less than one line of text"
    return min(reversed(far_enough), key=borders.__getitem__)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits; if one does, so do all smaller ones."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
