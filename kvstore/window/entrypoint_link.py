"""What an agent knows of one entrypoint: does it answer, and what must it still be told.

            silent for DEAD_AFTER_S
    alive ---------------------------> dead: its share belongs to the others
      ^                                 |
      '------------- it answers --------'

One announcement is under way at a time. What must be told is a set of keys: whether a record is
announced or withdrawn is looked up when it is sent, so that the last state always wins. Entries of
a share that moved to another entrypoint are withdrawn from this one too, but later: hosts that do
not know of the move yet still look for them here. No socket, no timer: `announcer` moves this on,
`part_transport` carries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from .messages import AnnounceAnswer

DEAD_AFTER_S = 2.0
"""An entrypoint that has not answered for so long counts as dead."""
ITEMS_MAX = 1024
"""Records of one announcement."""
MOVED_KEPT_S = 3.0
"""For so long after a share moved its entries stay at the old entrypoint as well. Every host sees
an entrypoint come within a second or two, by its heartbeat or by the map."""
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
        self._moved: dict[bytes, None] = {}
        """Not of its share any more, and not withdrawn yet."""
        self._moved_due_s = 0.0
        self._has_lost_items = False
        self._items_under_way = 0

    # What must be told ----------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Keys that wait to be told, and need not wait any longer."""
        is_due = self._clock() >= self._moved_due_s
        return len(self._queue) + (len(self._moved) if is_due else 0)

    def add(self, keys: Iterable[bytes]) -> None:
        """Records of its share came or went, or must be told anew."""
        for key in keys:
            self._queue[key] = None
            self._moved.pop(key, None)
        _forget_oldest(self._queue)

    def leave_behind(self, keys: Iterable[bytes]) -> None:
        """These records are of another entrypoint's share from now on; they are withdrawn here in
        MOVED_KEPT_S, when there is no news, unless they come back before."""
        for key in keys:
            self._moved[key] = None
            self._queue.pop(key, None)
        _forget_oldest(self._moved)
        self._moved_due_s = self._clock() + MOVED_KEPT_S

    def take_batch(self) -> list[bytes]:
        """The keys of the next announcement, which is under way from now on; perhaps none."""
        assert not self.is_waiting
        keys = _take(self._queue, ITEMS_MAX)
        if self._clock() >= self._moved_due_s:
            keys += _take(self._moved, ITEMS_MAX - len(keys))
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
        self._moved.clear()
        return True

    def forgive(self, stalled_s: float) -> None:
        """This process itself stood still for so long, and may not have read what was answered."""
        if self._silent_since_s is not None:
            self._silent_since_s += stalled_s


def _take(keys: dict[bytes, None], count: int) -> list[bytes]:
    """The first `count` keys, which are not there any more."""
    taken = list(islice(keys, count))
    for key in taken:
        del keys[key]
    return taken


def _forget_oldest(keys: dict[bytes, None]) -> None:
    while len(keys) > QUEUE_MAX:
        del keys[next(iter(keys))]
