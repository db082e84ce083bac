"""Threads that are there from the beginning, and take jobs in line."""

from __future__ import annotations

import threading
import time
from functools import partial
from threading import Event, Thread

import pytest

from engine.work_threads import WorkThreads
from tests.engine.waiting import DEADLINE_S, wait_until


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> None:
    """The system gives `after` threads more, and then none."""
    sound_start = Thread.start
    left = after

    def start(thread: Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        sound_start(thread)

    monkeypatch.setattr(Thread, "start", start)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_jobs_need_no_thread_that_was_not_there_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = WorkThreads("early", count=2, clock=time.monotonic)
    refuse_threads(monkeypatch)
    assert threads.call(sum, [1, 2]).result(DEADLINE_S) == 3
    assert threads.close(DEADLINE_S)


def test_threads_that_were_started_end_when_the_system_gives_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_threads(monkeypatch, after=2)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        WorkThreads("few", count=3, clock=time.monotonic)
    wait_until(lambda: not any(name.startswith("few-") for name in names()))


def test_error_of_a_call_is_its_callers_and_harms_no_thread() -> None:
    threads = WorkThreads("calls", count=1, clock=time.monotonic)
    wrong = threads.call(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        wrong.result(DEADLINE_S)
    assert threads.is_whole
    assert threads.call(int, "7").result(DEADLINE_S) == 7
    assert threads.close(DEADLINE_S)


def test_what_is_in_line_is_done_before_the_end_and_nothing_after_it() -> None:
    threads = WorkThreads("line", count=1, clock=time.monotonic)
    may_go_on, done = Event(), list[int]()
    threads.call(may_go_on.wait, DEADLINE_S)
    for number in range(3):
        assert threads.submit(partial(done.append, number))
    assert not threads.close(0.0)
    assert not threads.submit(lambda: done.append(99))
    with pytest.raises(AssertionError, match="the threads are closed"):
        threads.call(int)
    may_go_on.set()
    assert threads.close(DEADLINE_S)
    assert done == [0, 1, 2]
