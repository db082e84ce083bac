"""The document is whole lines, not too long, and cut so that answers soon complete a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.document import (
    BORDER_TOKENS_MIN,
    CUTS_TRIED,
    TOKENS_MAX,
    choose_document,
    join_prompt,
    read_topics,
)

LINES = [f"line {number} {'word ' * (number % 7)}".strip() for number in range(500)]
TEXT = "\n".join(LINES)


def count_words(text: str) -> int:
    return len(text.split())


def words_to_border(text: str) -> int:
    return -(count_words(text) + 5) % 128


@given(tokens_max=st.integers(100, 1_500))
def test_document_is_the_longest_start_but_for_the_cuts_that_were_tried(tokens_max: int) -> None:
    document = choose_document(
        TEXT, tokens_max=tokens_max, count_tokens=count_words, tokens_to_border=words_to_border
    )
    assert TEXT.startswith(document)
    chosen = document.count("\n") + 1
    longest = next(
        count for count in range(500, 0, -1) if count_words("\n".join(LINES[:count])) <= tokens_max
    )
    tried = range(max(longest - CUTS_TRIED, 0) + 1, longest + 1)
    assert chosen in tried
    borders = {count: words_to_border("\n".join(LINES[:count])) for count in tried}
    assert borders[chosen] >= BORDER_TOKENS_MIN
    assert borders[chosen] == min(b for b in borders.values() if b >= BORDER_TOKENS_MIN)


def test_document_is_the_whole_text_when_it_is_short_enough() -> None:
    document = choose_document(
        "one\ntwo\n", tokens_max=900, count_tokens=count_words, tokens_to_border=lambda _: 9
    )
    assert document == "one\ntwo"


def test_topics_are_long_enough_for_the_longest_document() -> None:
    # A token of English text has about four characters, so this is on the safe side.
    assert len(read_topics()) > TOKENS_MAX * 6


def test_topics_say_what_is_missing_when_python_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(Exception, match=r"no pydoc_data\.topics with .*typesseq"):
        read_topics()


def test_prompts_about_one_document_share_their_beginning() -> None:
    first, second = join_prompt("text", "a?"), join_prompt("text", "b?")
    assert (first, second) == ("text\n\na?", "text\n\nb?")
