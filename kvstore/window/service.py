"""Window records of this host and of others: put, look up, fetch.

The pool comes first, then the directory, then the host that the directory names. Everything is a
hint until its bytes have passed the checksum, and everything that fails is a miss: the caller
computes 128 tokens once more. No operation raises because another host is slow, gone or wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import wire
from ..cluster.entities import ClusterMap
from ..layout import BlockLayout
from .announcer import Announcer
from .counters import WindowCounters
from .directory_host import DirectoryHost
from .entrypoints import Place
from .messages import WindowRequest, check_host
from .own_records import PoolRecords
from .part_transport import OwnPart, PartTransport, RemotePart
from .peers import Peers, open_channel
from .pool import WindowPool
from .record import WindowRecord, layout_prefix_of
from .remote import RemoteEnd, fetch_remote

log = logging.getLogger(__name__)

EXPIRE_INTERVAL_S = 0.1
STALL_S = 2.0
FAIR_DEADLINE_S = 0.1
"""A host that is asked for less time than this, and is late, has not failed."""
GOODBYE_DEADLINE_S = 0.3
HERE = ""
"""As the host of a record: this very agent."""


@dataclass(frozen=True, slots=True)
class WindowResult:
    """How a fetch ended; `host`: where the record was, empty for this host, or was said to be."""

    is_found: bool
    host: str


class WindowService:
    """What an agent offers of window records. Belongs to one event loop.

    `cluster_map` gives the map in force, `address` is where other agents reach this one, `instance`
    random once for this process. `directory` is there in the agent of the entrypoint `entrypoint`.
    """

    def __init__(
        self,
        *,
        pool: WindowPool,
        directory: DirectoryHost | None,
        entrypoint: str | None,
        cluster_map: Callable[[], ClusterMap],
        address: str,
        instance: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.directory = directory
        self.counters = WindowCounters()
        self._entrypoint = entrypoint
        self._cluster_map = cluster_map
        self._address = check_host(address)
        self._loop = loop
        self._clock = clock
        self._cluster = cluster_map().cluster_id
        self._peers = Peers(cluster=self._cluster, loop=loop, clock=clock)
        self._announcer = Announcer(
            host=address,
            instance=instance,
            records=PoolRecords(pool),
            places=self._places,
            open_part=self._open_part,
            loop=loop,
            clock=clock,
        )
        self._expiring: asyncio.TimerHandle | None = None
        self._expired_at_s = clock()

    def start(self) -> None:
        """Begins to speak with the entrypoints of the map."""
        self._announcer.start()
        self._expired_at_s = self._clock()
        self._expire()

    async def stop(self) -> None:
        """Says goodbye to the directory, and closes."""
        try:
            await self._announcer.leave(GOODBYE_DEADLINE_S)
        finally:
            self.close()

    def close(self) -> None:
        """Ends at once; fetches that run are misses."""
        if self._expiring is not None:
            self._expiring.cancel()
        self._announcer.close()
        self._peers.close()

    # Records --------------------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        namespace_id: bytes,
        layout: BlockLayout,
        data: bytes | bytearray | memoryview,
    ) -> bool:
        """Keeps a copy of the record here and tells the directory; False if it is larger than the
        pool. Raises InvalidArgument as `WindowPool.put`."""
        gone = self.pool.put(key, namespace_id, layout, data)
        if gone is None:
            return False
        self._announcer.note([*gone, key])
        return True

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        """For each key the address of an agent that is believed to have its record: empty for this
        one, None for nobody. Returns within `deadline_s`; silence is None."""
        found: list[str | None] = [HERE if key in self.pool else None for key in keys]
        missing = [place for place, host in enumerate(found) if host is None]
        self.counters.lookups += len(keys)
        self.counters.found_here += len(keys) - len(missing)
        if not missing:
            return found
        hosts = await self._ask_directory([keys[place] for place in missing], deadline_s)
        for place, host in zip(missing, hosts, strict=True):
            found[place] = host
            self.counters.found_elsewhere += host is not None
        return found

    async def _ask_directory(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        """Who has the records of `keys`, none of which is here, as far as the directory says."""
        step = wire.KEYS_PER_REQUEST_MAX
        pieces = [keys[at : at + step] for at in range(0, len(keys), step)]
        ask = self._announcer.look_up
        if len(pieces) == 1:
            answers = [await ask(keys, deadline_s)]
        else:
            answers = await asyncio.gather(*(ask(piece, deadline_s) for piece in pieces))
        hosts = [host for answer in answers for host in answer]
        for place, host in enumerate(hosts):
            if host == self._address:
                # Not here any more; the directory is told so once more, in case that was lost.
                self._announcer.note([keys[place]])
                hosts[place] = None
        return hosts

    async def fetch(
        self,
        namespace_id: bytes,
        layout: BlockLayout,
        key: bytes,
        into: memoryview,
        deadline_s: float,
    ) -> WindowResult:
        """The record, verified, into `into`: a writable byte view of layout.block_bytes.

        Returns within `deadline_s`. What is in `into` is undefined unless the record was found;
        nothing is written there after the return, also when this is cancelled.
        """
        assert len(into) == layout.block_bytes, (len(into), layout.block_bytes)
        self.counters.fetches += 1
        wanted = WindowRequest(key, namespace_id, layout_prefix_of(layout), layout.block_bytes)
        if self._fetch_here(wanted, into):
            return WindowResult(True, HERE)
        begun_s = self._clock()
        (host,) = await self._ask_directory([key], deadline_s)
        left_s = deadline_s - (self._clock() - begun_s)
        if host is None or left_s <= 0:
            return WindowResult(False, HERE)
        return WindowResult(await self._fetch_from(host, wanted, into, left_s), host)

    def find(self, wanted: WindowRequest) -> WindowRecord | None:
        """The record, if it is here and is the one that is meant; it counts as used."""
        record = self.pool.get(wanted.key)
        if record is None or not record.is_of(*wanted[1:]):
            return None
        return record

    def _fetch_here(self, wanted: WindowRequest, into: memoryview) -> bool:
        record = self.find(wanted)
        if record is None:
            return False
        if not self.pool.verify(record):
            self._announcer.note([wanted.key])
            return False
        into[:] = record.view
        self.counters.fetched_here += 1
        return True

    async def _fetch_from(
        self, host: str, wanted: WindowRequest, into: memoryview, deadline_s: float
    ) -> bool:
        channel = self._peers.channel(host)
        if not channel.health.is_available:
            self.counters.skipped += 1
            return False
        end = await fetch_remote(channel, wanted, [into], deadline_s=deadline_s, loop=self._loop)
        if end is RemoteEnd.UNREACHABLE and channel.health.is_available:
            # The host was not even asked: too much waits for it, or its channel made room for
            # another. That says nothing of the entry.
            self.counters.skipped += 1
            return False
        name = f"remote_{end.value}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        if end is RemoteEnd.FOUND:
            self.counters.fetched_bytes += wanted.size_bytes
            return True
        if end is RemoteEnd.LATE:
            # The host may only be busy; it is left alone for a moment, and the entry stays.
            if deadline_s >= FAIR_DEADLINE_S:
                channel.health.on_failed()
            return False
        log.debug("window record %s at %s: %s", wanted.key[:4].hex(), host, end.value)
        self._announcer.withdraw(host, wanted.key)
        self.counters.withdrawn += 1
        return False

    # The entrypoints ------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        return [Place(point.name, point.address) for point in self._cluster_map().entrypoints]

    def _open_part(self, place: Place) -> PartTransport:
        if self.directory is not None and place.name == self._entrypoint:
            return OwnPart(self.directory, self._loop)
        channel = open_channel(
            place.address,
            cluster=self._cluster,
            loop=self._loop,
            clock=self._clock,
            name=f"entrypoint {place.name}",
        )
        return RemotePart(channel, self._loop)

    def _expire(self) -> None:
        """Lets go what has expired, here and in this agent's part of the directory."""
        now_s = self._clock()
        stalled_s = now_s - self._expired_at_s - EXPIRE_INTERVAL_S
        self._expired_at_s = now_s
        self._expiring = self._loop.call_later(EXPIRE_INTERVAL_S, self._expire)
        self._announcer.note(self.pool.expire())
        if self.directory is not None:
            if stalled_s > STALL_S:
                self.directory.forgive(stalled_s)
            self.directory.expire()

    def describe(self) -> dict[str, Any]:
        """For the status document: what the pool has, what was asked, who answers."""
        return {
            **self.pool.describe(),
            **asdict(self.counters),
            "announced": self._announcer.announced,
            "peers": len(self._peers),
            "entrypoints": self._announcer.describe(),
        }

    def describe_directory(self) -> dict[str, Any] | None:
        """The part of the directory that this agent holds; None if it holds none."""
        return None if self.directory is None else self.directory.describe()
