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
from typing import Any, NamedTuple, Protocol

from ..errors import DeadlineExceeded, NodeError
from .entrypoint_link import EntrypointLink
from .messages import TTL_MS_MAX, AnnounceAnswer, AnnouncedItem, Announcement
from .part_transport import PartTransport
from .partition import choose_entrypoints, plan_moves

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


class OwnRecords(Protocol):
    """The records of this host."""

    def __len__(self) -> int:
        """How many there are."""

    def keys(self) -> list[bytes]:
        """Their keys."""

    def find(self, key: bytes) -> tuple[int, float] | None:
        """Bytes of a record and seconds it has left, or None. It is no use of the record."""


class Place(NamedTuple):
    """Where an entrypoint of the map is."""

    name: str
    address: str


OpenPart = Callable[[Place], PartTransport]


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
        self._places = places
        self._open_part = open_part
        self._loop = loop
        self._clock = clock
        self._links: dict[str, EntrypointLink] = {}
        self._parts: dict[str, PartTransport] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._alive: tuple[str, ...] = ()
        self._ticking: asyncio.TimerHandle | None = None
        self._ticked_at_s = clock()
        self.announced = 0
        """Records told to parts, and withdrawals."""
        self.lost_announcements = 0

    def start(self) -> None:
        """Begins to tell and to listen."""
        self._ticked_at_s = self._clock()
        self._tick()

    # Who is responsible ---------------------------------------------------------------------------

    def links_of(self, keys: Sequence[bytes]) -> list[EntrypointLink] | None:
        """Of each key the entrypoint whose share it is now; None if none answers."""
        if not self._alive:
            return None
        chosen = choose_entrypoints(keys, self._alive).tolist()
        return [self._links[self._alive[index]] for index in chosen]

    def _follow_map(self) -> None:
        """Takes over the entrypoints of the map; others than before get a fresh link."""
        wanted = {place.name: place for place in self._places()}
        for name, link in list(self._links.items()):
            if name not in wanted or wanted[name].address != link.address:
                self._drop(name)
        for name, place in wanted.items():
            if name not in self._links:
                self._links[name] = EntrypointLink(name, place.address, self._clock)
                self._parts[name] = self._open_part(place)

    def _drop(self, name: str) -> None:
        del self._links[name]
        self._parts.pop(name).close()
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _follow_alive(self) -> None:
        """If other entrypoints answer than before, tells each what is newly in its share."""
        before = self._alive
        self._alive = tuple(sorted(name for name, link in self._links.items() if link.is_alive))
        if self._alive == before or not self._alive:
            return
        log.info("window directory: entrypoints=%s", ",".join(self._alive))
        keys = self._records.keys()
        if not keys:
            return
        for name, share in plan_moves(keys, before, self._alive).items():
            self._tell_later(self._links[name], share)

    # Telling --------------------------------------------------------------------------------------

    def note(self, keys: Sequence[bytes]) -> None:
        """These records have just come, or gone; which of the two is looked up when it is told."""
        links = self.links_of(keys) if keys else None
        if links is None:
            return  # whoever answers first is told everything
        for key, link in zip(keys, links, strict=True):
            self._tell_later(link, (key,))

    def withdraw(self, host: str, key: bytes) -> None:
        """Another host was found not to have this record: the directory forgets that it does."""
        links = self.links_of([key])
        if links is None:
            return
        said = Announcement(host, 0, items=(AnnouncedItem(key, 0, 0),))
        self._parts[links[0].name].announce(said, lambda _: None, lambda _: None)

    def _tell_later(self, link: EntrypointLink, keys: Sequence[bytes]) -> None:
        link.add(keys)
        self._send_later(link)

    def _send_later(self, link: EntrypointLink) -> None:
        if link.name not in self._timers:
            self._timers[link.name] = self._loop.call_later(BATCH_S, self._on_timer, link)

    def _on_timer(self, link: EntrypointLink) -> None:
        del self._timers[link.name]
        if not link.is_waiting and link.queued:
            self._send(link)

    def _send(self, link: EntrypointLink) -> None:
        """One announcement: of what waits, or none, which only says that this host lives."""
        items = [self._item(key) for key in link.take_batch()]
        self.announced += len(items)
        said = Announcement(self._host, self._instance, len(self._records), items=items)
        self._parts[link.name].announce(
            said, partial(self._on_answer, link), partial(self._on_failure, link)
        )

    def _item(self, key: bytes) -> AnnouncedItem:
        found = self._records.find(key)
        if found is None:
            return AnnouncedItem(key, 0, 0)
        size_bytes, ttl_s = found
        return AnnouncedItem(key, size_bytes, min(max(int(ttl_s * 1000), 1), TTL_MS_MAX))

    def _on_answer(self, link: EntrypointLink, answer: AnnounceAnswer) -> None:
        if self._links.get(link.name) is not link:
            return  # of a map that is not in force any more
        must_tell_all = link.on_answer(answer)
        self._follow_alive()
        if must_tell_all:
            keys = self._records.keys()
            links = self.links_of(keys) or ()
            share = [key for key, one in zip(keys, links, strict=True) if one is link]
            self._tell_later(link, share)
        elif link.queued:
            self._send_later(link)

    def _on_failure(self, link: EntrypointLink, error: NodeError) -> None:
        if self._links.get(link.name) is link:
            self.lost_announcements += 1
            link.on_failure()
            log.debug("entrypoint %s: %s", link.name, error.detail)

    # Asking ---------------------------------------------------------------------------------------

    async def look_up(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        """Who has the records of `keys`, at most 1,024, as far as the directory says in time:
        within `deadline_s`, and within LOOKUP_S_MAX."""
        found: list[str | None] = [None] * len(keys)
        places_by_link: dict[EntrypointLink, list[int]] = {}
        for place, link in enumerate(self.links_of(keys) or ()):
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
        if link.is_suspect or self._links.get(link.name) is not link:
            return nobody
        try:
            part = self._parts[link.name]
            return await part.look_up(keys, min(deadline_s, LOOKUP_S_MAX))
        except NodeError as error:
            log.debug("entrypoint %s: %s", link.name, error.detail)
            # Who had less time than an answer may take learns nothing about the entrypoint.
            is_hasty = isinstance(error, DeadlineExceeded) and deadline_s < LOOKUP_S_MAX
            if not is_hasty and self._links.get(link.name) is link:
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
        self._follow_map()
        for link in self._links.values():
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
        for link in self._links.values():
            is_due = link.sent_at_s is None or now_s - link.sent_at_s >= HEARTBEAT_S
            if is_due and not link.is_waiting:
                self._send(link)

    def describe(self) -> list[dict[str, Any]]:
        """Of each entrypoint what is known, for the status document."""
        return [
            {
                "name": link.name,
                "address": link.address,
                "is_alive": link.is_alive,
                "queued": link.queued,
                "entries": link.last_answer.entries if link.last_answer else 0,
                "entries_of_host": link.last_answer.host_entries if link.last_answer else 0,
            }
            for link in self._links.values()
        ]

    async def leave(self, deadline_s: float) -> None:
        """Tells nothing more but that this host ends, and waits at most `deadline_s` until all
        parts have heard it. To be closed afterwards."""
        self._stop_timers()
        told = [self._say_goodbye(name) for name in self._alive]
        if told:
            await asyncio.wait(told, timeout=deadline_s)

    def close(self) -> None:
        """Ends at once."""
        self._stop_timers()
        for part in self._parts.values():
            part.close()
        self._links.clear()
        self._parts.clear()
        self._alive = ()

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
        self._parts[name].announce(said, on_end, on_end)
        return told
