"""What an agent knows of one entrypoint: does it answer, and what must it still be told.

            silent for DEAD_AFTER_S
    alive ---------------------------> dead: its share belongs to the others
      ^                                 |
      '------------- it answers --------'

One announcement is under way at a time. What must be told is a set of keys: whether a record is
announced or withdrawn is looked up when it is sent, so that the last state always wins. No socket,
no timer: `announcer` moves this on, `part_transport` carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from .messages import AnnounceAnswer

DEAD_AFTER_S = 2.0
"""An entrypoint that has not answered for so long counts as dead."""
ITEMS_MAX = 1024
"""Records of one announcement."""
QUEUE_MAX = 1 << 20
"""Keys that wait to be told. The oldest are forgotten beyond it: entries expire all the same."""


class EntrypointLink:
    """One entrypoint of the map, as this agent sees it. Times are of the clock passed in."""

    def __init__(self, name: str, address: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.address = address
        self.is_alive = True
        self.is_waiting = False
        """An announcement is under way."""
        self.is_suspect = False
        """A lookup was not answered, and nothing was since."""
        self.last_answer: AnnounceAnswer | None = None
        self.sent_at_s: float | None = None
        self._clock = clock
        self._silent_since_s: float | None = None
        self._queue: dict[bytes, None] = {}
        self._has_lost_items = False
        self._items_under_way = 0

    # What must be told ----------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Keys that wait to be told."""
        return len(self._queue)

    def add(self, keys: Iterable[bytes]) -> None:
        """These records came or went, or must be told anew."""
        self._queue.update(dict.fromkeys(keys))
        while len(self._queue) > QUEUE_MAX:
            del self._queue[next(iter(self._queue))]

    def take_batch(self) -> list[bytes]:
        """The keys of the next announcement, which is under way from now on; perhaps none."""
        assert not self.is_waiting
        keys = list(islice(self._queue, ITEMS_MAX))
        for key in keys:
            del self._queue[key]
        self.is_waiting = True
        self.sent_at_s = self._clock()
        self._items_under_way = len(keys)
        if self._silent_since_s is None:
            self._silent_since_s = self.sent_at_s
        return keys

    # What it says ---------------------------------------------------------------------------------

    def on_answer(self, answer: AnnounceAnswer) -> bool:
        """The announcement under way was answered. True if the part must be told everything: it
        began anew, it had forgotten this host, or something did not reach it before."""
        before, self.last_answer = self.last_answer, answer
        is_other = before is not None and before.instance != answer.instance
        must_tell_all = is_other or answer.is_new or self._has_lost_items
        self.is_waiting = self.is_suspect = self._has_lost_items = False
        self.is_alive = True
        self._silent_since_s = None
        return must_tell_all

    def on_failure(self) -> None:
        """The announcement under way will not be answered."""
        self.is_waiting = False
        self._has_lost_items |= self._items_under_way > 0

    def check(self) -> bool:
        """True if it has just been found dead; then nothing waits to be told any more."""
        since_s = self._silent_since_s
        is_silent = since_s is not None and self._clock() - since_s >= DEAD_AFTER_S
        if not is_silent or not self.is_alive:
            return False
        self.is_alive = False
        self._queue.clear()
        return True

    def forgive(self, stalled_s: float) -> None:
        """This process itself stood still for so long, and may not have read what was answered."""
        if self._silent_since_s is not None:
            self._silent_since_s += stalled_s
