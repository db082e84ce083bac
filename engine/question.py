"""What a user asks, put together from the words of a command line.

Not for token ids: what is wrong with the words is said before a tokenizer is loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from .errors import EngineError, InvalidRequest

TEXT_CHARACTERS_MAX = 64 << 20
"""Longer than any prompt: a device that never ends is named by mistake."""


class UnusableFile(EngineError):
    """A file that the user named is not there or cannot be read."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the user asks. `earlier` is prompt and answer ids of the turn it follows, if any."""

    text: str
    system: str | None
    earlier: tuple[list[int], list[int]] | None


def read_question(
    *,
    prompt: str | None,
    prompt_file: Path | None,
    question: str | None,
    system: str | None,
    follow_up_of: Path | None,
) -> Question:
    """Put the parts of a question together: text, file and question, a blank line between."""
    for option, words in (("--prompt", prompt), ("--question", question), ("--system", system)):
        _check_words(option, words)
    document = None if prompt_file is None else _read_text(prompt_file)
    parts = [part.strip() for part in (prompt, document, question) if part is not None]
    text = "\n\n".join([part for part in parts if part])
    if not text:
        raise InvalidRequest(
            "prompt", given="nothing", expected="--prompt, --prompt-file or --question"
        )
    earlier = None if follow_up_of is None else _read_earlier(follow_up_of)
    return Question(text=text, system=system, earlier=earlier)


def _check_words(option: str, words: str | None) -> None:
    """Bytes of a command line that are no UTF-8 come as surrogates, which no tokenizer takes."""
    try:
        (words or "").encode()
    except UnicodeEncodeError as error:
        first = max(0, error.start - 20)
        given = ascii(error.object[first : error.start + 20])
        raise InvalidRequest(option, given=given, expected="UTF-8 text") from error


def _read_text(path: Path, what: str = "prompt file") -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(TEXT_CHARACTERS_MAX + 1)
    except FileNotFoundError as error:
        raise UnusableFile(f"{what}: no such file: {path}") from error
    except IsADirectoryError as error:
        raise UnusableFile(f"{what}: is a folder: {path}") from error
    except OSError as error:
        raise UnusableFile(f"{what}: {error.strerror or error}: {path}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(what, given=path, expected="UTF-8 text") from error
    if len(text) > TEXT_CHARACTERS_MAX:
        expected = f"a text of at most {TEXT_CHARACTERS_MAX} characters"
        raise InvalidRequest(what, given=f"{path}, which is longer", expected=expected)
    return text


def _read_earlier(path: Path) -> tuple[list[int], list[int]]:
    """Prompt and answer ids from an object that `--json` printed."""
    text = _read_text(path, "earlier answer")
    try:
        earlier = json.loads(text)
        return _read_ids(earlier["prompt_token_ids"]), _read_ids(earlier["token_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            "earlier answer", given=path, expected="an object that --json printed"
        ) from error


def _read_ids(value: object) -> list[int]:
    """Token ids as `--json` prints them. Raises TypeError."""
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise TypeError("token ids are a list of whole numbers")
    return value
