"""Requests that are not begun: in order, bounded, and gone with those who asked for them."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from engine.worker.request_line import Begin, RequestLine
from tests.engine.waiting import DEADLINE_S, wait_until


@contextmanager
def line_of(requests_max: int = 100) -> Iterator[RequestLine]:
    line = RequestLine(requests_max, clock=time.monotonic)
    yield line
    assert line.close(DEADLINE_S)


class Reading:
    """What is read of a request; it may be held up."""

    def __init__(self, begun: list[str], name: str, gate: Event | None = None) -> None:
        self.has_begun = Event()
        self._begun = begun
        self._name = name
        self._gate = gate

    def __call__(self) -> Begin:
        self.has_begun.set()
        assert self._gate is None or self._gate.wait(DEADLINE_S)
        return lambda: self._begun.append(self._name)


def test_requests_are_begun_in_the_order_in_which_they_came() -> None:
    begun: list[str] = []
    names = [f"r{number}" for number in range(20)]
    with line_of() as line:
        for name in names:
            assert line.enter(name, Reading(begun, name))
        wait_until(lambda: line.ready == len(names))
        while (begin := line.take()) is not None:
            begin()
        assert (begun, len(line)) == (names, 0)


def test_line_that_is_full_refuses_and_counts_until_somebody_leaves() -> None:
    begun: list[str] = []
    with line_of(2) as line:
        assert line.enter("a", Reading(begun, "a"))
        assert line.enter("b", Reading(begun, "b"))
        assert not line.enter("c", Reading(begun, "c"))
        assert (len(line), line.refused) == (2, 1)
        assert line.withdraw("a")
        assert line.enter("c", Reading(begun, "c"))


@pytest.mark.parametrize("when", ["before it is read", "while it is read", "after it was read"])
def test_request_that_is_withdrawn_is_gone_with_all_that_it_holds(when: str) -> None:
    begun: list[str] = []
    gate = Event()
    with line_of() as line:
        first = Reading(begun, "first", gate if when == "before it is read" else None)
        assert line.enter("first", first)
        reading = Reading(begun, "r", gate if when == "while it is read" else None)
        held, read = weakref.ref(reading), reading.has_begun
        assert line.enter("r", reading)
        del reading
        match when:
            case "while it is read":
                assert read.wait(DEADLINE_S)
            case "after it was read":
                wait_until(lambda: line.ready == 2)
        assert line.withdraw("r")
        assert len(line) == 1
        gate.set()
        wait_until(lambda: line.ready == 1 and (gc.collect(), held() is None)[1])
        begin = line.take()
        assert begin is not None
        begin()
        assert line.take() is None
        assert begun == ["first"]


def test_request_that_was_taken_is_not_withdrawn() -> None:
    with line_of() as line:
        assert line.enter("r", Reading([], "r"))
        wait_until(lambda: line.ready == 1)
        assert line.take() is not None
        assert not line.withdraw("r")


def test_mistake_of_the_program_is_raised_where_the_request_would_be_begun() -> None:
    def read() -> Begin:
        raise AssertionError("a mistake")

    with line_of() as line:
        assert line.enter("wrong", read)
        assert line.enter("sound", Reading([], "sound"))
        wait_until(lambda: line.ready == 2)
        begin = line.take()
        assert begin is not None
        with pytest.raises(AssertionError, match="a mistake"):
            begin()
