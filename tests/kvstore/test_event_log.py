"""Log lines: one for each event, whatever is in it, and not too many of one kind."""

import json
import logging

import pytest

from kvstore.event_log import (
    EVENTS_PER_S_MAX,
    EventLimit,
    JsonFormatter,
    LineFormatter,
    short_key,
)
from tests.kvstore.node.driven_node import SetClock


def make_record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("kvstore.node.x", logging.INFO, "", 0, message, arguments, None)


def test_key_is_shortened_to_eight_digits() -> None:
    assert short_key(bytes.fromhex("0123456789abcdef" * 4)) == "01234567"


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_event_is_one_line_whatever_a_peer_put_into_it(formatter: logging.Formatter) -> None:
    line = formatter.format(make_record("name %s", "a\nb\r\nINFO forged"))
    assert "\n" not in line
    assert "\r" not in line


def test_json_line_has_the_event_as_text() -> None:
    line = json.loads(JsonFormatter().format(make_record("count %d of %s", 3, "x")))
    assert (line["event"], line["level"], line["logger"]) == (
        "count 3 of x",
        "INFO",
        "kvstore.node.x",
    )


def test_events_of_one_kind_are_limited_and_the_rest_is_counted() -> None:
    clock = SetClock()
    limit = EventLimit(clock.monotonic_s)
    passed = [limit.filter(make_record("bad frame %d", i)) for i in range(100)]
    assert passed == [True] * EVENTS_PER_S_MAX + [False] * (100 - EVENTS_PER_S_MAX)
    assert limit.filter(make_record("another kind"))
    clock.advance(1.0)
    record = make_record("bad frame %d", 7)
    assert limit.filter(record)
    assert record.getMessage() == f"bad frame 7 ({100 - EVENTS_PER_S_MAX} more of these before)"


def test_json_line_has_each_named_value_as_a_field() -> None:
    record = make_record("target open name=%s shards=%d of %s %% seconds=%.3f", "t01", 7, "x", 0.25)
    line = json.loads(JsonFormatter().format(record))
    assert line["event"] == "target open name=t01 shards=7 of x % seconds=0.250"
    assert line["fields"] == {"name": "t01", "shards": 7, "seconds": 0.25}
    assert "fields" not in json.loads(JsonFormatter().format(make_record("nothing named")))


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_time_of_an_event_says_that_it_is_utc(formatter: logging.Formatter) -> None:
    record = make_record("x")
    record.created = 1_800_000_000.5
    assert "2027-01-15T08:00:00.500+00:00" in formatter.format(record)
