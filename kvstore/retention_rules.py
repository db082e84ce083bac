"""The rules that a retention policy obeys, each with the words in which its breach is refused.

Pure checks of single values. What a policy is made of, and how it changes, stands in `retention`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .errors import InvalidArgument, shown

POLICY_FORMAT = 1
POLICY_BYTES_MAX = 1 << 16
"""A document fits into the body of one POLICY request (wire.POLICY_BYTES_MAX)."""
VERSION_MAX = 2**32 - 1
LOG_ENTRIES_MAX = 100
TTL_CLASSES_MAX = 64
DRAINING_MAX = 64
TTL_S_MAX = 10 * 366 * 86_400
WHO_BYTES_MAX = 64
WHY_BYTES_MAX = 200

CHAT_CLASS = "chat"
"""The class whose TTL holds for every class that the policy does not list."""

_CLASS_PATTERN = re.compile(r"[a-z0-9_-]{1,16}")
_NODE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")

CLASS_RULE = "1 to 16 of a-z, 0-9, '_' and '-'"
TTL_RULE = f"a whole number of seconds from 1 to {TTL_S_MAX}"
WATERMARK_RULE = "0 < low < high < 1: eviction starts at high and stops at low"
NODE_RULE = "1 to 32 of A-Z a-z 0-9 . _ -, the first a letter or digit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Shares of a target in use. At `high` eviction starts, at `low` it stops.

    Raises InvalidArgument unless 0 < low < high < 1.
    """

    high: float = 0.90
    low: float = 0.85

    def __post_init__(self) -> None:
        given = (self.low, self.high)
        if not all(_is_number(value) for value in given) or not 0 < self.low < self.high < 1:
            raise InvalidArgument(
                "watermarks",
                given=f"low {self.low!r}, high {self.high!r}",
                expected=WATERMARK_RULE,
            )
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    def to_values(self) -> dict[str, float]:
        return {"high": self.high, "low": self.low}


def checked_ttls(values: Mapping[str, object]) -> Mapping[str, int]:
    if len(values) > TTL_CLASSES_MAX:
        raise InvalidArgument(
            "ttl_s", given=f"{len(values)} classes", expected=f"at most {TTL_CLASSES_MAX}"
        )
    for name in values:
        check_class(name)
    if CHAT_CLASS not in values:
        raise InvalidArgument(
            "ttl_s",
            given=f"classes {', '.join(sorted(values)) or 'none'}",
            expected=f"the class {CHAT_CLASS!r} among them: its TTL holds for classes not listed",
        )
    return MappingProxyType({name: check_ttl(name, ttl_s) for name, ttl_s in values.items()})


def check_ttl(ttl_class: str, value: object) -> int:
    return check_whole(f"TTL of class {ttl_class}", value, 1, TTL_S_MAX, rule=TTL_RULE)


def check_class(name: object) -> None:
    if not isinstance(name, str) or not _CLASS_PATTERN.fullmatch(name):
        raise InvalidArgument("TTL class", given=shown(name), expected=CLASS_RULE)


def check_node(name: object) -> None:
    if not isinstance(name, str) or not _NODE_PATTERN.fullmatch(name):
        raise InvalidArgument("node", given=shown(name), expected=NODE_RULE)


def check_draining_count(count: int) -> None:
    if count > DRAINING_MAX:
        raise InvalidArgument(
            "draining", given=f"{count} nodes", expected=f"at most {DRAINING_MAX} at a time"
        )


def check_fields(
    where: str,
    values: Mapping[str, object],
    needed: frozenset[str],
    optional: set[str] | None = None,
) -> None:
    allowed = needed | (optional or set())
    if not needed <= values.keys() <= allowed:
        raise InvalidArgument(
            f"fields of the {where}",
            given=shown(sorted(values)),
            expected=", ".join(sorted(needed)),
        )


def check_object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(where, given=shown(value), expected="a JSON object")
    return value


def check_list(where: str, value: object, count_max: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > count_max:
        raise InvalidArgument(
            where, given=shown(value), expected=f"a JSON list of at most {count_max}"
        )
    return value


def check_whole(what: str, value: object, low: int, high: int, rule: str | None = None) -> int:
    if type(value) is int and low <= value <= high:
        return value
    raise InvalidArgument(
        what, given=shown(value), expected=rule or f"a whole number from {low} to {high}"
    )


def check_text(what: str, value: object, bytes_max: int, *, is_empty_ok: bool = False) -> str:
    """Printable text in UTF-8: it is shown in terminals and written into log lines."""
    if isinstance(value, str) and (value.isprintable() or not value):
        length = len(value.encode(errors="replace"))
        if (length or is_empty_ok) and length <= bytes_max:
            return value
    low = 0 if is_empty_ok else 1
    raise InvalidArgument(
        what,
        given=shown(value),
        expected=f"printable text of {low} to {bytes_max} bytes, on one line",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
