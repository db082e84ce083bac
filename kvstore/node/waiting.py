"""Waiting in line inside one event loop: who came first is served first, and anybody may leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Waiter:
    """One place in a line. `serve` is called once with what was waited for, or never."""

    __slots__ = ("has_left", "serve")

    def __init__(self, serve: Callable[[object], None]) -> None:
        self.serve = serve
        self.has_left = False

    def leave(self) -> None:
        """Give up the place; `serve` will not be called."""
        self.has_left = True


class Turn:
    """Only one holder at a time; the next in line gets it when it is released."""

    def __init__(self) -> None:
        self.is_taken = False
        self._line: deque[Waiter] = deque()

    def try_take(self) -> bool:
        """Take the turn now, if nobody has it."""
        if self.is_taken:
            return False
        self.is_taken = True
        return True

    def wait(self, waiter: Waiter) -> None:
        """Join the line; `serve(True)` is called with the turn taken."""
        self._line.append(waiter)

    def release(self) -> None:
        """Hand the turn to the next in line."""
        assert self.is_taken
        while self._line:
            waiter = self._line.popleft()
            if not waiter.has_left:
                waiter.serve(True)
                return
        self.is_taken = False
