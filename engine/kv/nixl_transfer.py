"""A transfer of NIXL: what its agent says of it, and when its memory may be let go of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Protocol

from ..errors import TransferFailed, TransferStuck
from .mover import first_line, left_behind
from .polling import poll

log = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""A transfer that has not ended for so long never will: it takes milliseconds."""


class Transfers(Protocol):
    """What is asked of NIXL's agent about a transfer."""

    def transfer(self, handle: object) -> str:
        """Begin; as `check_xfer_state`."""

    def check_xfer_state(self, handle: object) -> str:
        """PROC, DONE or ERR."""

    def release_xfer_handle(self, handle: object) -> None:
        """It has ended, or is cancelled; raises if it goes on."""


class NixlTransfer:
    """A `Transfer` that NIXL is asked about. Is one of `under_way` until it has ended."""

    def __init__(
        self,
        agent: Transfers,
        handle: object,
        lock: Lock,
        under_way: set[NixlTransfer],
        part: memoryview,
    ) -> None:
        """With the lock held."""
        self._agent = agent
        self._handle = handle
        self._lock = lock
        self._under_way = under_way
        self._part: memoryview | None = part
        self._failure: str | None = None
        self._is_told = False
        under_way.add(self)

    @property
    def has_ended(self) -> bool:
        """See Transfer."""
        with self._lock:
            if self in self._under_way:
                self._ask(self._agent.check_xfer_state)
            if self._failure is not None:
                raise TransferFailed(f"nixl: {self._failure}")
            return self not in self._under_way

    def begin(self) -> None:
        """With the lock held."""
        self._ask(self._agent.transfer)

    def _ask(self, ask: Callable[[object], str]) -> None:
        """Have NIXL say how it goes; if it has ended, or can be ended, it is none of those under
        way any more."""
        try:
            with in_words("a transfer"):
                state = ask(self._handle)
            failure = None if state == "DONE" else f"a transfer ended as {state}"
        except TransferFailed as error:
            state, failure = "ERR", str(error).removeprefix("nixl: ")
        if state == "PROC":
            return
        try:
            with in_words("a transfer that is to be released"):
                self._agent.release_xfer_handle(self._handle)
        except TransferFailed as error:
            if state != "DONE":
                # It may still write: as long as that is so, nobody lets go of its memory.
                if not self._is_told:
                    log.error("%s; before: %s", error, failure)
                self._is_told = True
                return
            left_behind.append((self._agent, self._handle))
        self._failure = failure
        self._part = None
        self._under_way.discard(self)

    def wait(self) -> None:
        """See Transfer."""
        if not poll(lambda: self.has_ended, DEADLINE_S):
            raise TransferStuck(f"a transfer of nixl has not ended for {DEADLINE_S:.0f} s")

    def order_compute(self) -> None:
        """The calling thread waits: no stream of a GPU knows of a NIC."""
        self.wait()


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Errors of the package, which have no base class of their own, as TransferFailed."""
    try:
        yield
    except Exception as error:
        raise TransferFailed(f"nixl: {what}: {first_line(error)}") from error
