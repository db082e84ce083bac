"""How long a wake-up takes: the pair of sockets of a run beside the eventfd that it stands in for.

Two processes wake each other in turn, each sleeping in poll(2). Prints a JSON line for each kind:
half of a round trip, and what the writer pays for a wake-up that the reader takes at once.

    python -m benchmarks.wakeup [--rounds 5000]
"""

from __future__ import annotations

import argparse
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.node_read import emit
from kvstore.arena.wakeup import drain, make_wakeup


@dataclass(frozen=True)
class Line:
    """One direction: what wakes, what is polled, what takes the wake-up."""

    wake: Callable[[], object]
    reader: int
    take: Callable[[], object]


def by_sockets() -> Line:
    waker, reader = make_wakeup()
    return Line(waker.wake, reader, lambda: drain(reader))


def by_eventfd() -> Line:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    return Line(
        lambda: os.eventfd_write(descriptor, 1), descriptor, lambda: os.eventfd_read(descriptor)
    )


def sleep_and_take(line: Line) -> None:
    poll = select.poll()
    poll.register(line.reader, select.POLLIN)
    poll.poll()
    line.take()


def one_way_us(make: Callable[[], Line], rounds: int) -> list[float]:
    """Of each round, sorted."""
    there, back = make(), make()
    pid = os.fork()
    if pid == 0:
        for _ in range(rounds):
            sleep_and_take(there)
            back.wake()
        os._exit(0)
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        there.wake()
        sleep_and_take(back)
        took.append((time.perf_counter() - begin) / 2 * 1e6)
    os.waitpid(pid, 0)
    return sorted(took)


def wake_and_take_us(make: Callable[[], Line], rounds: int) -> float:
    line = make()
    begin = time.perf_counter()
    for _ in range(rounds):
        line.wake()
        line.take()
    return (time.perf_counter() - begin) / rounds * 1e6


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000)
    rounds = parser.parse_args().rounds
    for name, make in (("eventfd", by_eventfd), ("sockets", by_sockets)):
        took = one_way_us(make, rounds)
        emit(
            "wakeup",
            {"by": name, "rounds": rounds},
            one_way_us_median=took[rounds // 2],
            one_way_us_p99=took[int(rounds * 0.99)],
            wake_and_take_us=min(wake_and_take_us(make, rounds) for _ in range(9)),
        )


if __name__ == "__main__":
    main()
