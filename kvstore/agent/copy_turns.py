"""How long requests may hold the agent's one thread by copying, over all sessions, in one turn.

A turn is one round of the event loop: between two of them every session is heard. A request that
copies (a window record, which is copied and hashed) waits for a turn with room for it; who waited
longest comes first. Requests that copy nothing wait for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class CopyTurns:
    """Belongs to the event loop. A copy larger than a whole turn has a turn for itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        self._loop = loop
        self._bytes_max = bytes_max
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_next_planned = False

    def try_take(self, length_bytes: int) -> bool:
        """Whether so much may be copied now, in this turn; then it is counted. 0 always may."""
        if length_bytes == 0:
            return True
        if self._waiting or not self._has_room(length_bytes):
            return False
        self._take(length_bytes)
        return True

    def wait(self, length_bytes: int, call: Callable[[], None]) -> None:
        """`call` is called when so much may be copied; it is counted by then. Whoever calls this
        has one wait at a time."""
        self._waiting.append((length_bytes, call))
        self._plan_next()

    def _begin_turn(self) -> None:
        self._is_next_planned = False
        self._taken_bytes = 0
        while self._waiting and self._has_room(self._waiting[0][0]):
            length_bytes, call = self._waiting.popleft()
            self._take(length_bytes)
            call()
        if self._waiting:
            self._plan_next()

    def _has_room(self, length_bytes: int) -> bool:
        return not self._taken_bytes or self._taken_bytes + length_bytes <= self._bytes_max

    def _take(self, length_bytes: int) -> None:
        self._taken_bytes += length_bytes
        self._plan_next()

    def _plan_next(self) -> None:
        if not self._is_next_planned:
            self._is_next_planned = True
            self._loop.call_soon(self._begin_turn)
