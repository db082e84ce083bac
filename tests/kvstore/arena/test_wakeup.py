"""Wake-ups: the writer never waits, whatever the reader does, and the reader misses none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.arena.wakeup import Waker, drain, make_wakeup

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ends() -> Iterator[tuple[Waker, int]]:
    waker, reader = make_wakeup()
    yield waker, reader
    waker.close()
    with contextlib.suppress(OSError):
        os.close(reader)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """What waits for ever is what is tested for."""
    signal.setitimer(signal.ITIMER_REAL, 20.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def is_readable(reader: int) -> bool:
    return bool(select.select([reader], [], [], 0)[0])


@pytest.mark.parametrize("wakes", [1, 2, 250, 10_000])
def test_any_number_of_wakeups_is_drained_at_once(ends: tuple[Waker, int], wakes: int) -> None:
    waker, reader = ends
    assert not is_readable(reader)
    assert drain(reader), "none is no end"
    for _ in range(wakes):
        waker.wake()
    assert is_readable(reader)
    assert drain(reader)
    assert not is_readable(reader)
    waker.wake()
    assert is_readable(reader)


def test_reader_cannot_make_the_writer_wait(ends: tuple[Waker, int]) -> None:
    """Of an eventfd it could: the flags belong to all who have it."""
    waker, reader = ends
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)
    fcntl.fcntl(reader, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    assert fcntl.fcntl(waker, fcntl.F_GETFL) & os.O_NONBLOCK
    # The writer does not depend on its own flags either: a worker has a copy of the descriptor.
    fcntl.fcntl(waker, fcntl.F_SETFL, 0)
    for _ in range(10_000):
        waker.wake()
    assert is_readable(reader)


def test_reader_can_send_nothing_to_the_writer(ends: tuple[Waker, int]) -> None:
    _, reader = ends
    with pytest.raises(BrokenPipeError):
        os.write(reader, b"x")


def test_reader_that_is_gone_is_no_error(ends: tuple[Waker, int]) -> None:
    waker, reader = ends
    waker.wake()
    os.close(reader)
    for _ in range(3):
        waker.wake()


def test_reader_that_will_not_hear_is_no_error(ends: tuple[Waker, int]) -> None:
    waker, reader = ends
    with socket.socket(fileno=os.dup(reader)) as deaf:
        deaf.shutdown(socket.SHUT_RDWR)
    waker.wake()
    assert waker.fileno() >= 0, "it is not closed either"


def test_reader_is_woken_by_the_end_of_all_writers(ends: tuple[Waker, int]) -> None:
    waker, reader = ends
    copy = Waker(os.dup(waker.fileno()))
    waker.wake()
    waker.close()
    assert drain(reader)
    assert not is_readable(reader), "a worker still has a copy"
    copy.close()
    assert is_readable(reader)
    assert not drain(reader)
    assert not drain(reader)


def test_reader_is_woken_when_the_process_of_the_writer_is_killed(
    ends: tuple[Waker, int],
) -> None:
    waker, reader = ends
    command = "import sys, time; print('here', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", command], pass_fds=[waker.fileno()], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        waker.close()
        assert not is_readable(reader)
        process.kill()
        assert select.select([reader], [], [], 10)[0]
        assert not drain(reader)


def test_wakeups_leave_no_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    waker, reader = make_wakeup()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert not os.get_inheritable(reader)
    waker.close()
    waker.close()
    os.close(reader)
    assert len(os.listdir("/proc/self/fd")) == before
