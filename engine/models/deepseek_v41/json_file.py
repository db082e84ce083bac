"""JSON files whose contents are not to be trusted: read within bounds, every value by its type.

What the values mean is not known here.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ModelFileError
from .regular_file import read_regular

WHITE_SPACE = b" \t\n\r"


def read_json(path: Path, *, bytes_max: int) -> dict[str, Any]:
    """The JSON object in a file. Raises MissingModel or ModelFileError, and nothing else."""
    text = read_regular(path, bytes_max=bytes_max)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ModelFileError(path, [str(error)]) from error


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object in which none has a key twice. Raises ValueError with what is wrong."""

    def reject(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = [_shorten(name) for name, count in counts.items() if count > 1]
            raise ValueError(f"keys given twice: {', '.join(twice)}")
        return found

    # Anything else is refused unparsed: a long list takes many times its bytes.
    if not text.lstrip(WHITE_SPACE).startswith(b"{"):
        raise ValueError("not sound JSON (expected an object)")
    try:
        document: dict[str, Any] = json.loads(text, parse_constant=reject, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError("not sound JSON (nested too deep)") from error
    except ValueError as error:
        raise ValueError(f"not sound JSON ({error})") from error
    return document


class JsonSection:
    """Typed reads of one JSON object. What is wrong is noted, and a value of the type returned."""

    def __init__(self, name: str, value: object, problems: list[str]) -> None:
        self._name = name
        self._problems = problems
        self._values: dict[str, object] = {}
        if isinstance(value, dict):
            self._values = value
        else:
            self._note("", value, "an object")

    def _note(self, key: str, given: object, expected: str) -> None:
        path = ".".join(part for part in (self._name, key) if part) or "the file"
        self._problems.append(f"{path}: given {_shorten(given)}, expected {expected}")

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def section(self, key: str) -> "JsonSection":
        name = f"{self._name}.{key}" if self._name else key
        return JsonSection(name, self._values.get(key, _ABSENT), self._problems)

    def integer(self, key: str) -> int:
        value = self._values.get(key, _ABSENT)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._note(key, value, "an integer")
        return 0

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._values.get(key, _ABSENT)
        if isinstance(value, list) and all(_is_integer(item) for item in value):
            return tuple(value)
        self._note(key, value, "a list of integers")
        return ()

    def number(self, key: str) -> float:
        value = self._values.get(key, _ABSENT)
        if isinstance(value, float) or _is_integer(value):
            number = _as_float(value)
            if math.isfinite(number):
                return number
        self._note(key, value, "a finite number")
        return 0.0

    def equals(self, key: str, expected: object) -> None:
        """Note a value that is there and is not `expected`; 1 is not True here."""
        value = self._values.get(key, expected)
        if value != expected or isinstance(value, bool) is not isinstance(expected, bool):
            self._note(key, value, json.dumps(expected))

    def equals_integers(self, key: str, expected: tuple[int, ...]) -> None:
        self.equals(key, list(expected))


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_float(value: object) -> float:
    assert isinstance(value, float | int)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shorten(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
