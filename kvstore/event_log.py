"""One line for each event: how it is written, and how many there may be.

A peer can cause as many events as it likes; it cannot fill a disk with them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

EVENTS_PER_S_MAX = 10
"""Lines of one kind in one second; the next one that is written says how many were left out."""


def short_key(key: bytes) -> str:
    """The first 8 hex digits of a key: enough to find it, too little to ask for it."""
    return key[:4].hex()


def set_up_logging(clock: Callable[[], float], *, is_json: bool) -> None:
    """Write all events of this process to stderr. To be called once, by a process's `main`.

    `clock` gives seconds and never goes back.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else LineFormatter())
    handler.addFilter(EventLimit(clock))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class EventLimit(logging.Filter):
    """Lets EVENTS_PER_S_MAX events of each kind through; a kind is the text before formatting."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._second = 0
        self._counts: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._counts.clear()
        kind = str(record.msg)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] > EVENTS_PER_S_MAX:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        left_out = self._left_out.pop(kind, 0)
        if left_out:
            record.msg = f"{kind} ({left_out} more of these before)"
        return True


class LineFormatter(logging.Formatter):
    """Time (ISO 8601, UTC), level and event on one line, whatever a peer put into it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _format_time(record)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, event, and perhaps trace.

    `event` is the whole line; what it says as `name=value` stands in `fields` once more, so that
    nobody needs to take the line apart.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _format_time(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields = find_fields(str(record.msg), record.args)
        if fields:
            line["fields"] = fields
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _format_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


_PLACE = re.compile(r"(?:(\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")


def find_fields(template: str, arguments: object) -> dict[str, Any]:
    """What a logging template says as `name=%s`: numbers as they are, all else as text.

    Raises nothing: the formatting of the line has complained of wrong arguments already.
    """
    values = iter(arguments if isinstance(arguments, tuple) else ())
    fields: dict[str, Any] = {}
    for place in _PLACE.finditer(template):
        if place[0] == "%%":
            continue
        value = next(values, None)
        if place[1]:
            fields[place[1]] = value if isinstance(value, int | float) else str(value)
    return fields
