"""Requests that clients have asked for and that the engine's thread has not begun.

    event loop: enter -> [ reader's thread: read ] -> ready -> engine's thread: take

What takes longer the longer a prompt is (to unpack, check and hash its tokens) is done by the
reader: neither the answers of other clients nor a step wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import NoReturn, TypeAlias

from ..work_threads import WorkThreads

Begin: TypeAlias = Callable[[], None]
"""What the engine's thread does to begin a request, or to refuse it."""


def _ignore() -> None:
    """Nobody is told."""


class RequestLine:
    """First come, first served. May be used in any thread; close it.

    Bounded, and a request that is withdrawn is gone at once with all that it holds: clients that
    ask and go away leave nothing behind. `on_ready` is called in the reader's thread.
    """

    def __init__(self, requests_max: int, *, clock: Callable[[], float]) -> None:
        self.on_ready: Begin = _ignore
        self.refused = 0
        """Requests beyond `requests_max`."""
        self._requests_max = requests_max
        self._lock = Lock()
        self._unread: dict[str, Callable[[], Begin]] = {}
        self._ready: dict[str, Begin] = {}
        self._is_reading = False
        self._reader = WorkThreads("request-reader", count=1, clock=clock)

    def __len__(self) -> int:
        return len(self._unread) + len(self._ready)

    @property
    def ready(self) -> int:
        """Requests that can be taken."""
        return len(self._ready)

    def enter(self, request_id: str, read: Callable[[], Begin]) -> bool:
        """Put a request in line; False if as many as may wait already. `read` is called in the
        reader's thread."""
        with self._lock:
            if len(self) >= self._requests_max:
                self.refused += 1
                return False
            self._unread[request_id] = read
            must_wake, self._is_reading = not self._is_reading, True
        if must_wake:
            self._reader.submit(self._read_all)
        return True

    def withdraw(self, request_id: str) -> bool:
        """Nobody waits for it any more; False if it was taken already, or never came."""
        with self._lock:
            unread = self._unread.pop(request_id, None)
            return unread is not None or self._ready.pop(request_id, None) is not None

    def take(self) -> Begin | None:
        """The next one that was read. It is to be begun now."""
        with self._lock:
            request_id = next(iter(self._ready), None)
            return None if request_id is None else self._ready.pop(request_id)

    def close(self, deadline_s: float) -> bool:
        """End the thread; False if it hangs. No request may come any more."""
        with self._lock:
            self._unread.clear()
        return self._reader.close(deadline_s)

    def _read_all(self) -> None:
        while (found := self._first_unread()) is not None:
            request_id, read = found
            try:
                begin = read()
            except BaseException as error:
                # A mistake of the program: it is the engine's thread that ends with it.
                begin = partial(_fail, error)
            with self._lock:
                if self._unread.pop(request_id, None) is not None:
                    self._ready[request_id] = begin
            del found, read, begin  # what they hold must not live until the next one comes
            self.on_ready()

    def _first_unread(self) -> tuple[str, Callable[[], Begin]] | None:
        with self._lock:
            found = next(iter(self._unread.items()), None)
            self._is_reading = found is not None
            return found


def _fail(error: BaseException) -> NoReturn:
    raise error
