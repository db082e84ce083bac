"""What a user asks, put together from the words of a command line.

Not for token ids: what is wrong with the words is said before a tokenizer is loaded. A file of text
is read after that, when it is known how long a prompt may be.
"""

import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import EngineError, InvalidRequest

FILE_BYTES_MAX = 64 << 20
"""Longer than any prompt: a device that never ends is named by mistake."""
PROMPT_FILE = "prompt file"
EARLIER_ANSWER = "earlier answer"


class UnusableFile(EngineError):
    """A file that the user named is not there or cannot be read."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class TextBound:
    """A text with more bytes has more than so many tokens, as none stands for more than
    `token_bytes`."""

    tokens: int
    token_bytes: int

    @property
    def size_bytes(self) -> int:
        return min(self.tokens * self.token_bytes, FILE_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a command line says of a question; `file` is there, and not read yet."""

    prompt: str | None
    file: Path | None
    question: str | None
    system: str | None
    earlier: tuple[list[int], list[int]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the user asks. `earlier` is prompt and answer ids of the turn it follows, if any."""

    text: str
    system: str | None
    earlier: tuple[list[int], list[int]] | None


def read_words(
    *,
    prompt: str | None,
    prompt_file: Path | None,
    question: str | None,
    system: str | None,
    follow_up_of: Path | None,
) -> Words:
    """What can be said without a model. Raises InvalidRequest, UnusableFile."""
    for option, words in (("--prompt", prompt), ("--question", question), ("--system", system)):
        _check_words(option, words)
    if prompt_file is None:
        _join(prompt, question)  # raises if that is nothing
    else:
        _check_file(prompt_file)
    earlier = None if follow_up_of is None else _read_earlier(follow_up_of)
    return Words(prompt=prompt, file=prompt_file, question=question, system=system, earlier=earlier)


def read_question(words: Words, bound: TextBound) -> Question:
    """Put the parts of a question together: text, file and question, a blank line between. Of a
    file no more is read than `bound` lets it have. Raises InvalidRequest, UnusableFile."""
    document = None
    if words.file is not None:
        expected = (
            f"a file of at most {bound.size_bytes} bytes, blanks at its ends included: a prompt "
            f"has at most {bound.tokens} tokens, of at most {bound.token_bytes} bytes"
        )
        document = _read_text(PROMPT_FILE, words.file, bound.size_bytes, expected)
    text = _join(words.prompt, document, words.question)
    return Question(text=text, system=words.system, earlier=words.earlier)


def _join(*parts: str | None) -> str:
    stripped = [part.strip() for part in parts if part is not None]
    text = "\n\n".join([part for part in stripped if part])
    if not text:
        raise InvalidRequest(
            "prompt", given="nothing", expected="--prompt, --prompt-file or --question"
        )
    return text


def _check_words(option: str, words: str | None) -> None:
    """Bytes of a command line that are no UTF-8 come as surrogates, which no tokenizer takes."""
    try:
        (words or "").encode()
    except UnicodeEncodeError as error:
        first = max(0, error.start - 20)
        given = ascii(error.object[first : error.start + 20])
        raise InvalidRequest(option, given=given, expected="UTF-8 text") from error


def _check_file(path: Path) -> None:
    """That it is there. It is not opened: a pipe that is closed again has lost its writer."""
    with _naming(PROMPT_FILE, path):
        if stat.S_ISDIR(path.stat().st_mode):
            raise IsADirectoryError


def _read_text(what: str, path: Path, bytes_max: int, expected: str) -> str:
    """Raises InvalidRequest for more than `bytes_max`; of a pipe no one knows how much more."""
    with _naming(what, path), path.open("rb") as file:
        data = file.read(bytes_max + 1)
        size_bytes = os.fstat(file.fileno()).st_size
    if len(data) > bytes_max:
        size = f"{size_bytes}" if size_bytes > bytes_max else f"more than {bytes_max}"
        raise InvalidRequest(what, given=f"{size} bytes in {path}", expected=expected)
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(what, given=path, expected="UTF-8 text") from error


@contextmanager
def _naming(what: str, path: Path) -> Iterator[None]:
    """Errors of the system become those of the file that the user named."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableFile(f"{what}: no such file: {path}") from error
    except IsADirectoryError as error:
        raise UnusableFile(f"{what}: is a folder: {path}") from error
    except OSError as error:
        raise UnusableFile(f"{what}: {error.strerror or error}: {path}") from error


def _read_earlier(path: Path) -> tuple[list[int], list[int]]:
    """Prompt and answer ids from an object that `--json` printed."""
    expected = f"at most {FILE_BYTES_MAX} bytes"
    text = _read_text(EARLIER_ANSWER, path, FILE_BYTES_MAX, expected)
    try:
        earlier = json.loads(text)
        return _read_ids(earlier["prompt_token_ids"]), _read_ids(earlier["token_ids"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(
            EARLIER_ANSWER, given=path, expected="an object that --json printed"
        ) from error


def _read_ids(value: object) -> list[int]:
    """Token ids as `--json` prints them. Raises TypeError."""
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise TypeError("token ids are a list of whole numbers")
    return value
