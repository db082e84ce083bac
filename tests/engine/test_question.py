"""A question is put together from words and files, of which no more is read than can be used."""

import os
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.question import TextBound, Words, read_question, read_words


def words_of(
    prompt: str | None = None,
    prompt_file: Path | None = None,
    *,
    question: str | None = None,
    system: str | None = None,
    follow_up_of: Path | None = None,
) -> Words:
    return read_words(
        prompt=prompt,
        prompt_file=prompt_file,
        question=question,
        system=system,
        follow_up_of=follow_up_of,
    )


def test_question_joins_text_file_and_question_with_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text("\n The document. \n\n", encoding="utf-8")
    question = read_question(words_of("Read this.", file, question="And?"), TextBound(100, 3))
    assert question.text == "Read this.\n\nThe document.\n\nAnd?"
    assert question.earlier is None


def test_question_refuses_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match=r"prompt file: given .*, expected UTF-8 text"):
        read_question(words_of("x", file), TextBound(100, 3))
    for content in (
        "no json",
        "[]",
        "{}",
        '{"prompt_token_ids": 1, "token_ids": [1]}',
        '{"prompt_token_ids": [1, "x"], "token_ids": [1]}',
        '{"prompt_token_ids": [1], "token_ids": "12"}',
    ):
        file.write_text(content)
        with pytest.raises(InvalidRequest, match=r"earlier answer: given .*, expected an object"):
            words_of("x", follow_up_of=file)


def test_pipe_that_has_more_than_a_prompt_can_hold_is_not_read_to_its_end() -> None:
    """It has none as long as it is open for who writes."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as more:
        more.write(b"ab" * 10_000)
        more.flush()
        words = words_of(prompt_file=Path(f"/dev/fd/{reader}"))
        with pytest.raises(InvalidRequest, match=r"given more than 30 bytes in /dev/fd/"):
            read_question(words, TextBound(tokens=10, token_bytes=3))


def test_file_of_as_many_bytes_as_a_prompt_can_hold_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    bound = TextBound(tokens=10, token_bytes=3)
    file.write_bytes("é".encode() * 15)
    assert read_question(words_of(prompt_file=file), bound).text == "é" * 15
    expected = r"given 31 bytes in .*, expected a file of at most 30 bytes, blanks at its ends incl"
    for content in (b"a" * 31, b"a" * 9 + b"\n" * 22):
        file.write_bytes(content)
        with pytest.raises(InvalidRequest, match=expected):
            read_question(words_of(prompt_file=file), bound)


def test_file_without_text_is_nothing_to_ask(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(" \n")
    with pytest.raises(InvalidRequest, match="prompt: given nothing"):
        read_question(words_of(prompt_file=file), TextBound(10, 3))
    assert read_question(words_of(prompt_file=file, question="x"), TextBound(10, 3)).text == "x"


@pytest.mark.parametrize("option", ["prompt", "question", "system"])
def test_bytes_that_are_no_utf_8_are_refused_by_the_name_of_their_option(option: str) -> None:
    given = {"prompt": "x", "question": None, "system": None, option: "before \udcff behind"}
    with pytest.raises(InvalidRequest, match=rf"--{option}: given 'before \\udcff.*UTF-8 text"):
        read_words(**given, prompt_file=None, follow_up_of=None)
