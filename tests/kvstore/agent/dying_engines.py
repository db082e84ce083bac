"""Engines that are processes, and are killed in the middle of what they do.

Run as a program it forks them, a batch at a time: each connects, leases a run, begins with
something, says so, and is killed with SIGKILL. Started by `let_engines_die`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvstore import agent_messages as m

from .arena_runs import SectionedBlocks
from .engine_steps import WINDOW, fetch_request, fill
from .raw_engine import RawEngine

ROOT = Path(__file__).resolve().parents[3]
CHAIN = SectionedBlocks(4, seed=19)
"""What they fetch; whoever starts them stores it."""
BATCH = 25
WAITING = 2
"""Engines of a batch that wait for a run."""
READY = b"."
LAST_MOMENT_S = 0.001
PROCESS_S = 120.0
LARGER_THAN_THE_ARENA = 5_000


def let_engines_die(socket_path: Path, count: int) -> None:
    """Returns when so many have lived and were killed. Raises CalledProcessError, with what it
    wrote, if one of them ended in another way."""
    words = [sys.executable, "-m", __spec__.name, os.fspath(socket_path), str(count)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=PROCESS_S)


Rest = Callable[[], object]
Step = Callable[[RawEngine, int], Rest | None]
"""What an engine does; it returns what it is still to do a moment before it is killed."""


def _lease(engine: RawEngine, _: int) -> None:
    engine.lease(engine.open(CHAIN.namespace), 4)


def _fetch(engine: RawEngine, _: int) -> Rest:
    leased = engine.lease(engine.open(CHAIN.namespace), 4)
    return lambda: engine.send(fetch_request(leased.run, CHAIN))


def _store(engine: RawEngine, number: int) -> None:
    leased = engine.lease(engine.open(CHAIN.namespace), 4)
    fill(engine.memory(leased, CHAIN.namespace.layout), CHAIN)
    tokens = np.full(4 * 128, number, np.int32)
    keys = b"".join(CHAIN.namespace.block_keys(tokens))
    engine.send(
        m.StoreRun(run=leased.run, keys=keys, first_block=0, ttl_class="chat", deadline_s=20.0)
    )


def _fetch_window(engine: RawEngine, number: int) -> None:
    namespace = engine.open(CHAIN.namespace, WINDOW)
    leased = engine.lease(namespace, 1, is_window=True)
    key = number.to_bytes(32, "little")
    if number % 2:
        engine.send(m.PutWindow(namespace=namespace, key=key, run=leased.run))
    engine.send(m.FetchWindow(namespace=namespace, key=key, run=leased.run, deadline_s=20.0))


def _offer(engine: RawEngine, number: int) -> Rest:
    leased = engine.lease(engine.open(CHAIN.namespace), 4)
    request = m.OfferRun(run=leased.run, ttl_s=0.2)
    if number % 2:
        engine.ask(request, m.RunOffered)
        return lambda: None
    return lambda: engine.send(request)


def _half_a_message(engine: RawEngine, _: int) -> None:
    engine.lease(engine.open(CHAIN.namespace), 4)
    engine.socket.sendall(b"\x10\x00")


def _wait_for_a_run(engine: RawEngine, _: int) -> None:
    """For one that is larger than the arena, which it gets a part of when the others are gone."""
    namespace = engine.open(CHAIN.namespace)
    engine.send(m.LeaseRun(namespace=namespace, blocks=LARGER_THAN_THE_ARENA, deadline_s=60.0))


STEPS: Sequence[Step] = (
    _lease,
    _fetch,
    _store,
    _fetch_window,
    _offer,
    _half_a_message,
)


class Batch:
    """Engines of one time. `go` ends when those that wait for it are to do the rest."""

    def __init__(self, path: Path, first: int) -> None:
        self._path = path
        self._first = first
        self._ready_read, self._ready_write = os.pipe()
        self._go_read, self._go_write = os.pipe()
        self._children: list[int] = []

    def live_and_die(self) -> None:
        # Those that wait for a run come last: whoever asks after them waits with them.
        steps = [STEPS[number % len(STEPS)] for number in range(BATCH - WAITING)]
        try:
            self._begin(steps)
            self._begin([_wait_for_a_run] * WAITING)
            os.close(self._go_write)
            time.sleep(LAST_MOMENT_S)
        finally:
            for child in self._children:
                os.kill(child, signal.SIGKILL)
            for child in self._children:
                os.waitpid(child, 0)
            for descriptor in (self._ready_read, self._ready_write, self._go_read):
                os.close(descriptor)

    def _begin(self, steps: Sequence[Step]) -> None:
        for step in steps:
            number = self._first + len(self._children)
            child = os.fork()
            if child == 0:
                self._live(number, step)
            self._children.append(child)
        for _ in steps:
            assert os.read(self._ready_read, 1) == READY, "an engine failed"

    def _live(self, number: int, step: Step) -> NoReturn:
        """In the forked process."""
        parent = os.getppid()
        os.close(self._go_write)
        try:
            engine = RawEngine(self._path)
            engine.hello()
            rest = step(engine, number)
            os.write(self._ready_write, READY)
            os.read(self._go_read, 1)
            if rest is not None:
                rest()
            while os.getppid() == parent:
                time.sleep(1.0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os.write(self._ready_write, b"!")
        finally:
            os._exit(1)


if __name__ == "__main__":
    for first in range(0, int(sys.argv[2]), BATCH):
        Batch(Path(sys.argv[1]), first).live_and_die()
