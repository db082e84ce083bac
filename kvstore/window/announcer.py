"""Tells the window directory what this host has, and asks it who has what.

The directory is partitioned over the entrypoints by rendezvous hashing, over those that answer:
when one falls silent, is added or comes back, only its share is told anew, and nobody coordinates
that. All of it is soft: what is lost is told again, or expires. Timers and answers of the event
loop drive it; it owns no records and knows no bytes of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import DeadlineExceeded, NodeError
from .entrypoint_link import EntrypointLink
from .entrypoints import Entrypoints, OpenPart, Place
from .messages import TTL_MS_MAX, AnnounceAnswer, AnnouncedItem, Announcement
from .own_records import OwnRecords

log = logging.getLogger(__name__)

TICK_S = 0.25
HEARTBEAT_S = 1.0
BATCH_S = 0.05
"""News wait for others so long, and a part is told at most 1,024 records in each such time."""
LOOKUP_S_MAX = 0.1
"""An answer takes a small part of a millisecond. One that takes longer than this is not worth its
while: the state is rebuilt from 128 tokens."""
STALL_S = 0.5
"""A tick that comes so late says that this process stood still, not that the others did."""


class Announcer:
    """The directory, as one host sees it. Belongs to one event loop.

    `places` gives the entrypoints of the map in force; `host` is the address of this agent, and
    `instance` random once for its process.
    """

    def __init__(
        self,
        *,
        host: str,
        instance: int,
        records: OwnRecords,
        places: Callable[[], Sequence[Place]],
        open_part: OpenPart,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._instance = instance
        self._records = records
        self._loop = loop
        self._clock = clock
        self._entrypoints = Entrypoints(places=places, open_part=open_part, clock=clock)
        self._timers: dict[EntrypointLink, asyncio.TimerHandle] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._ticked_at_s = clock()
        self.announced = 0
        """Records told to parts, and withdrawals."""
        self.lost_announcements = 0

    def start(self) -> None:
        """Begins to tell and to listen."""
        self._ticked_at_s = self._clock()
        self._tick()

    def _follow_alive(self) -> None:
        """If other entrypoints answer than before, tells each what is newly in its share; the one
        that had it before forgets it a little later."""
        moves = self._entrypoints.follow_alive(self._records.keys)
        if moves is None:
            return
        log.info("window directory: entrypoints=%s", ",".join(self._entrypoints.alive))
        for old, new, keys in moves:
            self._tell_later(new, keys)
            if old is not None:
                old.leave_behind(keys)

    # Telling --------------------------------------------------------------------------------------

    def note(self, keys: Sequence[bytes]) -> None:
        """These records have just come, or gone; which of the two is looked up when it is told."""
        links = self._entrypoints.links_of(keys) if keys else None
        if links is None:
            return  # whoever answers first is told everything
        for key, link in zip(keys, links, strict=True):
            self._tell_later(link, (key,))

    def withdraw(self, host: str, key: bytes) -> None:
        """Another host was found not to have this record: the directory forgets that it does."""
        links = self._entrypoints.links_of([key])
        if links is None:
            return
        said = Announcement(host, 0, items=(AnnouncedItem(key, 0, 0),))
        self._entrypoints.part(links[0].name).announce(said, lambda _: None, lambda _: None)

    def _tell_later(self, link: EntrypointLink, keys: Sequence[bytes]) -> None:
        link.add(keys)
        self._send_later(link)

    def _send_later(self, link: EntrypointLink) -> None:
        if link not in self._timers:
            self._timers[link] = self._loop.call_later(BATCH_S, self._on_timer, link)

    def _on_timer(self, link: EntrypointLink) -> None:
        del self._timers[link]
        if self._entrypoints.has(link) and not link.is_waiting and link.queued:
            self._send(link)

    def _send(self, link: EntrypointLink) -> None:
        """One announcement: of what waits, or none, which only says that this host lives."""
        keys = link.take_batch()
        holders = self._entrypoints.links_of(keys)
        assert holders is not None or not keys, "one that is dead is told nothing"
        items = [
            self._item(key, is_in_share=holder is link)
            for key, holder in zip(keys, holders or (), strict=True)
        ]
        self.announced += len(items)
        said = Announcement(self._host, self._instance, len(self._records), items=items)
        self._entrypoints.part(link.name).announce(
            said, partial(self._on_answer, link), partial(self._on_failure, link)
        )

    def _item(self, key: bytes, *, is_in_share: bool) -> AnnouncedItem:
        """What is so of the record now; a part has entries of its share only."""
        found = self._records.find(key) if is_in_share else None
        if found is None:
            return AnnouncedItem(key, 0, 0)
        size_bytes, ttl_s = found
        return AnnouncedItem(key, size_bytes, min(max(int(ttl_s * 1000), 1), TTL_MS_MAX))

    def _on_answer(self, link: EntrypointLink, answer: AnnounceAnswer) -> None:
        if not self._entrypoints.has(link):
            return  # of a map that is not in force any more
        must_tell_all = link.on_answer(answer)
        self._follow_alive()
        if must_tell_all:
            keys = self._records.keys()
            links = self._entrypoints.links_of(keys) or ()
            share = [key for key, one in zip(keys, links, strict=True) if one is link]
            self._tell_later(link, share)
        elif link.queued:
            self._send_later(link)

    def _on_failure(self, link: EntrypointLink, error: NodeError) -> None:
        if self._entrypoints.has(link):
            self.lost_announcements += 1
            link.on_failure()
            log.debug("entrypoint %s: %s", link.name, error.detail)

    # Asking ---------------------------------------------------------------------------------------

    async def look_up(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        """Who has the records of `keys`, at most 1,024, as far as the directory says in time:
        within `deadline_s`, and within LOOKUP_S_MAX."""
        found: list[str | None] = [None] * len(keys)
        places_by_link: dict[EntrypointLink, list[int]] = {}
        for place, link in enumerate(self._entrypoints.links_of(keys) or ()):
            places_by_link.setdefault(link, []).append(place)

        async def ask(link: EntrypointLink, places: list[int]) -> None:
            hosts = await self._ask(link, [keys[at] for at in places], deadline_s)
            for at, host in zip(places, hosts, strict=True):
                found[at] = host

        if len(places_by_link) == 1:
            ((only, places),) = places_by_link.items()
            await ask(only, places)
        else:
            async with asyncio.TaskGroup() as group:
                for link, places in places_by_link.items():
                    group.create_task(ask(link, places))
        return found

    async def _ask(
        self, link: EntrypointLink, keys: Sequence[bytes], deadline_s: float
    ) -> Sequence[str | None]:
        nobody = [None] * len(keys)
        if link.is_suspect or not self._entrypoints.has(link):
            return nobody
        try:
            part = self._entrypoints.part(link.name)
            return await part.look_up(keys, min(deadline_s, LOOKUP_S_MAX))
        except NodeError as error:
            log.debug("entrypoint %s: %s", link.name, error.detail)
            # Who had less time than an answer may take learns nothing about the entrypoint.
            is_hasty = isinstance(error, DeadlineExceeded) and deadline_s < LOOKUP_S_MAX
            if not is_hasty and self._entrypoints.has(link):
                # It is not asked again before it has answered something.
                link.is_suspect = True
                if not link.is_waiting:
                    self._send(link)
            return nobody

    # Time -----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_s = self._clock()
        stalled_s = now_s - self._ticked_at_s - TICK_S
        self._ticked_at_s = now_s
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self._entrypoints.follow_map()
        for link in self._entrypoints.links:
            if stalled_s > STALL_S:
                link.forgive(stalled_s)
            if link.check():
                log.warning(
                    "entrypoint=%s address=%s does not answer: its share of the window directory"
                    " moves to the others",
                    link.name,
                    link.address,
                )
        self._follow_alive()
        for link in self._entrypoints.links:
            is_due = link.sent_at_s is None or now_s - link.sent_at_s >= HEARTBEAT_S
            if is_due and not link.is_waiting:
                self._send(link)

    def describe(self) -> list[dict[str, Any]]:
        """Of each entrypoint what is known, for the status document."""
        return self._entrypoints.describe()

    async def leave(self, deadline_s: float) -> None:
        """Tells nothing more but that this host ends, and waits at most `deadline_s` until all
        parts have heard it. To be closed afterwards."""
        self._stop_timers()
        told = [self._say_goodbye(name) for name in self._entrypoints.alive]
        if told:
            await asyncio.wait(told, timeout=deadline_s)

    def close(self) -> None:
        """Ends at once."""
        self._stop_timers()
        self._entrypoints.close()

    def _stop_timers(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _say_goodbye(self, name: str) -> asyncio.Future[None]:
        told: asyncio.Future[None] = self._loop.create_future()

        def on_end(_: AnnounceAnswer | NodeError) -> None:
            if not told.done():
                told.set_result(None)

        said = Announcement(self._host, self._instance, is_leaving=True)
        self._entrypoints.part(name).announce(said, on_end, on_end)
        return told
