"""How every program here ends when it was given what it cannot use: one line on stderr, code 2.

What a person gave is told apart where it is read: `InvalidInput` there, errors of the engine and of
the system as they are. Any other exception is a mistake of ours and keeps its traceback.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from engine.errors import EngineError

EXIT_CODE = 2
WHOLE_NUMBER_MAX = 2**31 - 1
REASON_CHARACTERS_MAX = 200

Number = TypeVar("Number", int, float)


class InvalidInput(ValueError):
    """A path or a value that a person gave breaks a rule; says what was given and expected."""

    def __init__(self, what: str, *, given: object, expected: str) -> None:
        super().__init__(f"{what}: given {given}, expected {expected}")


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End the process in one line for input that cannot be used. Also a decorator."""
    try:
        yield
    except (InvalidInput, EngineError, OSError) as error:
        print(_one_line(error), file=sys.stderr)
        raise SystemExit(EXIT_CODE) from error


@contextmanager
def reading(what: str, path: Path, *, expected: str) -> Iterator[None]:
    """InvalidInput in place of any error of a library that reads a file.

    Only for the library's call itself: what such readers raise for damaged files is no fixed list,
    and around code of ours this would pass mistakes off as bad files.
    """
    try:
        yield
    except Exception as error:
        given = f"what cannot be read ({_reason(error)})"
        raise InvalidInput(f"{what} {path}", given=given, expected=expected) from error


def require_folder(what: str, path: Path) -> None:
    """Raises InvalidInput unless there is a folder at `path`."""
    if not path.is_dir():
        given = "no folder" if path.exists() else "a path where nothing is"
        raise InvalidInput(f"{what} {path}", given=given, expected="a folder")


def whole_number(least: int, most: int = WHOLE_NUMBER_MAX) -> Callable[[str], int]:
    """For an option: whole numbers `least` to `most`."""

    def parse(text: str) -> int:
        number = _parse(int, text)
        if number is None or not least <= number <= most:
            bounds = f"{least} or more" if most == WHOLE_NUMBER_MAX else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"given {text}, expected a whole number, {bounds}")
        return number

    return parse


def not_negative(text: str) -> float:
    """For an option: finite numbers from 0 on."""
    number = _parse(float, text)
    if number is None or not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"given {text}, expected a number, 0 or more")
    return number


def share(text: str) -> float:
    """For an option: numbers from 0 to below 1."""
    number = _parse(float, text)
    if number is None or not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"given {text}, expected a number, 0 to below 1")
    return number


def _parse(kind: Callable[[str], Number], text: str) -> Number | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return _joined(
            f"{error.filename}: given a path that cannot be used ({error.strerror}), "
            "expected one that can be read or written"
        )
    return _joined(str(error))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _joined(f"{type(error).__name__}: {error}")[:REASON_CHARACTERS_MAX]


def _joined(text: str) -> str:
    return " ".join(text.split())
