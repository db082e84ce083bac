"""The client of the block store: match, fetch, save. This surface is stable.

    async with StoreClient.connect("cluster.toml") as store:    # or StoreClient.open(...), blocking
        n = await store.match(ns, keys)
        result = await store.fetch(ns, keys[:n], buffers[:n])

`keys` is always a whole chain from block 0, because the place of a block follows from the first key
of its span. No operation raises because a node is down, slow or wrong: such faults cost blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..arena.region import RunMemory
from ..arena.run_layout import RunCode
from ..cluster.entities import ClusterMap
from ..cluster.source import FileMapSource, MapSource
from ..errors import ClientClosed, ClusterMapError
from ..key import Namespace
from ..retention import RetentionPolicy
from .arguments import (
    check_deadline,
    check_first_block,
    check_keys,
    check_parity_room,
    check_range,
    check_run,
    check_ttl_class,
    hold_buffers,
)
from .context import ClientContext
from .fetching import fetch_blocks
from .geometry import BufferMemory, ShardGeometry
from .layered_fetch import fetch_run_by_layer
from .matching import match_blocks
from .notes import NoteSender
from .policy_question import ask_policy
from .recall import Recalls
from .results import ClientCounters, FetchResult, SaveResult
from .router import Router
from .run_batch import RunBlocks
from .run_fetching import fetch_run_by_block
from .saving import forget_blocks, save_blocks
from .scratch import ScratchPool
from .statistics import NodeReport, ask_statistics

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from .blocking import BlockingStoreClient

log = logging.getLogger(__name__)

MAP_LOOK_INTERVAL_S = 1.0
OLD_MAP_GRACE_S = 60.0


class StoreClient:
    """A connection to a cluster. Belongs to the event loop in which it was opened.

    Make one with `connect` or `open`. Operations may run concurrently.
    """

    def __init__(
        self,
        cluster_map: ClusterMap,
        *,
        source: MapSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._shared = ClientContext(
            router=Router(cluster_map, loop, clock),
            scratch=ScratchPool(),
            counters=ClientCounters(),
            notes=NoteSender(lambda: self._shared.router, loop),
            recalls=Recalls(loop),
            loop=loop,
            clock=clock,
        )
        self._source = source
        self._looked_at_s = clock()
        self._old_routers: list[Router] = []
        self._is_closed = False

    @staticmethod
    @asynccontextmanager
    async def connect(path: str | Path) -> AsyncIterator[StoreClient]:
        """A client for the cluster whose map lies at `path`.

        Raises MissingClusterMap or InvalidClusterMap. Nodes are connected to when first needed.
        """
        source = FileMapSource(path)
        client = StoreClient(source.load(), source=source)
        try:
            yield client
        finally:
            try:
                await client.finish_writes()
                await client.end_background()
            finally:
                client.close()

    @staticmethod
    def open(path: str | Path) -> BlockingStoreClient:
        """The same client with blocking calls, for code without an event loop."""
        from .blocking import BlockingStoreClient

        return BlockingStoreClient(path)

    @property
    def map(self) -> ClusterMap:
        """The cluster map this client uses."""
        return self._shared.router.map

    @property
    def counters(self) -> ClientCounters:
        """What this client has done since it was opened."""
        return self._shared.counters

    async def finish_writes(self, *, deadline_s: float = 1.0) -> None:
        """Waits until the nodes that were still busy when a save returned have answered too, until
        a node has this client's statistics, and until shards of blocks that too few nodes took have
        been taken back, which is about two seconds after such a save."""
        with suppress(TimeoutError):
            async with asyncio.timeout(check_deadline(deadline_s)):
                for router in (self._shared.router, *self._old_routers):
                    await router.wait_until_written()
                await self._shared.notes.flush()
                await self._shared.recalls.wait()

    @property
    def background_tasks(self) -> frozenset[asyncio.Task[None]]:
        """Tasks that are no operation of a caller's."""
        return self._shared.recalls.tasks

    async def end_background(self) -> None:
        """Gives up what still runs in the background; returns when nothing does."""
        await self._shared.recalls.end()

    def close(self) -> None:
        """Closes all connections. Operations that run end with what they have."""
        self._is_closed = True
        self._shared.notes.close()
        self._shared.recalls.close()
        for router in (self._shared.router, *self._old_routers):
            router.close()

    async def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> int:
        """Number of leading blocks of `keys` that are stored, as far as the cluster can say.

        A hint: a block may be gone when it is fetched. Renews nothing. 0 if nobody answers in time.
        Raises InvalidArgument, ClientClosed.
        """
        context = self._context("match")
        check_keys(namespace, keys)
        deadline_s = check_deadline(deadline_s)
        started_at_s = context.clock()
        matched = await match_blocks(context.router, keys, deadline_s, context.loop)
        elapsed_s = context.clock() - started_at_s
        context.notes.book.note_match(
            namespace, asked=len(keys), matched=matched, elapsed_s=elapsed_s
        )
        context.notes.wake()
        return matched

    async def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[WriteableBuffer],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> FetchResult:
        """Reads blocks `first_block` to the end of `keys` into `buffers`: for each block a writable
        C-contiguous buffer of the layout's block_bytes.

        Returns within `deadline_s` with the number of leading blocks that arrived and were
        verified; never raises for a miss. Buffers behind that run hold undefined bytes; nothing is
        written to any buffer after the return. Raises InvalidArgument, ClientClosed.
        """
        context = self._context("fetch")
        check_keys(namespace, keys)
        check_range(keys, buffers, first_block)
        deadline_s = check_deadline(deadline_s)
        views, held = hold_buffers(buffers, namespace.layout.block_bytes, writable=True)
        with held:
            result = await fetch_blocks(
                context,
                keys,
                first_block=first_block,
                memory=BufferMemory(views, held.addresses, _geometry(context, namespace)),
                deadline_s=deadline_s,
            )
        context.notes.book.note_fetch(namespace, asked=len(views), result=result)
        context.notes.wake()
        return result

    async def fetch_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: RunMemory,
        *,
        first_block: int,
        place: int = 0,
        is_by_layer: bool = False,
        is_left_to_reader: bool = False,
        on_ready: Callable[[int, int], None],
        deadline_s: float,
    ) -> FetchResult:
        """For agents: reads blocks `first_block` to the end of `keys` into a run, from its block
        `place` on.

        `on_ready(section, blocks)`: that section of so many leading blocks of this call is there
        and verified; called only when it has become more. Otherwise as `fetch`: nothing of the run
        is written after the return, also when this is cancelled. `is_left_to_reader`:
        only in layer order, and into a run with room for parity: what blocks have lost is not
        rebuilt but noted in the run. Raises InvalidArgument, ClientClosed.
        """
        context = self._context("fetch_run")
        check_keys(namespace, keys)
        check_run(namespace, keys, run, first_block, place)
        fetch = fetch_run_by_layer if is_by_layer else fetch_run_by_block
        if is_left_to_reader:
            code = context.router.code
            check_parity_room(run, RunCode(code.k, code.m), is_by_layer=is_by_layer)
            fetch = partial(fetch_run_by_layer, is_left_to_reader=True)
        result = await fetch(
            context,
            namespace,
            keys,
            run,
            first_block=first_block,
            place=place,
            on_ready=on_ready,
            deadline_s=check_deadline(deadline_s),
        )
        context.notes.book.note_fetch(namespace, asked=len(keys) - first_block, result=result)
        context.notes.wake()
        return result

    async def save(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[ReadableBuffer],
        *,
        first_block: int = 0,
        ttl_class: str = "chat",
        deadline_s: float = 10.0,
    ) -> SaveResult:
        """Stores blocks `first_block` to the end of `keys` from `buffers`: for each block a
        C-contiguous buffer of the layout's block_bytes.

        Blocks that the cluster has are not sent again. Returns within `deadline_s`; from then on
        the buffers may be changed. Never raises because a node is down or full: that is in the
        result. Raises InvalidArgument, ClientClosed.
        """
        context = self._context("save")
        check_keys(namespace, keys)
        check_range(keys, buffers, first_block)
        check_ttl_class(ttl_class)
        deadline_s = check_deadline(deadline_s)
        views, held = hold_buffers(buffers, namespace.layout.block_bytes, writable=False)
        with held:
            return await save_blocks(
                context,
                namespace,
                keys,
                first_block=first_block,
                memory=BufferMemory(views, held.addresses, _geometry(context, namespace)),
                ttl_class=ttl_class,
                deadline_s=deadline_s,
            )

    async def save_run(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: RunMemory,
        *,
        first_block: int,
        place: int = 0,
        ttl_class: str = "chat",
        deadline_s: float,
    ) -> SaveResult:
        """For agents: stores blocks `first_block` to the end of `keys` out of a run, from its block
        `place` on. Otherwise as `save`: from the return on, also when this is cancelled, the run
        may be changed. Raises InvalidArgument, ClientClosed.
        """
        context = self._context("save_run")
        check_keys(namespace, keys)
        check_run(namespace, keys, run, first_block, place)
        check_ttl_class(ttl_class)
        code = context.router.code
        count = len(keys) - first_block
        return await save_blocks(
            context,
            namespace,
            keys,
            first_block=first_block,
            memory=RunBlocks(run, place=place, count=count, k=code.k, m=code.m),
            ttl_class=ttl_class,
            deadline_s=check_deadline(deadline_s),
        )

    async def forget(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        first_block: int = 0,
        deadline_s: float = 10.0,
    ) -> int:
        """Removes blocks `first_block` to the end of `keys` from every node that answers.

        Returns how many of these blocks cannot be read any more, whether they were stored or not:
        fewer than asked if k or more nodes did not answer. Raises InvalidArgument, ClientClosed.
        """
        context = self._context("forget")
        check_keys(namespace, keys)
        check_first_block(keys, first_block)
        return await forget_blocks(context, keys, first_block, check_deadline(deadline_s))

    async def node_reports(self, *, deadline_s: float = 2.0) -> list[NodeReport]:
        """What each node says of itself, in the map's order; also of nodes that do not answer
        within `deadline_s`.

        The map is looked at first, and once more if a node failed: one that follows a newer map
        already refuses who does not, and must not seem dead for that.
        """
        due_s = self._shared.clock() + check_deadline(deadline_s)
        self._context("node_reports")
        self._look_at_map()
        reports = await ask_statistics(self._shared, deadline_s)
        if all(report.is_alive for report in reports) or not self._look_at_map():
            return reports
        left_s = due_s - self._shared.clock()
        return await ask_statistics(self._shared, left_s) if left_s > 0 else reports

    async def ask_policy(self, *, turn: int = 0, deadline_s: float = 1.0) -> RetentionPolicy:
        """For agents: the retention policy that one node has, number `turn` of the map's, counted
        round and round. Raises NodeError if that node gives none, InvalidArgument, ClientClosed."""
        return await ask_policy(self._context("ask_policy"), turn, check_deadline(deadline_s))

    def _context(self, operation: str) -> ClientContext:
        """What an operation works with; the map is looked at now and then."""
        if self._is_closed:
            raise ClientClosed(operation)
        if self._shared.clock() - self._looked_at_s >= MAP_LOOK_INTERVAL_S:
            self._look_at_map()
        return self._shared

    def _look_at_map(self) -> bool:
        """Whether there is a newer map, which is followed from now on."""
        self._looked_at_s = self._shared.clock()
        if self._is_closed or self._source is None or not self._source.has_changed():
            return False
        before = self.map.epoch
        self._follow_map(self._source)
        return self.map.epoch > before

    def _follow_map(self, source: MapSource) -> None:
        try:
            cluster_map = source.load()
        except ClusterMapError as error:
            log.warning("the cluster map cannot be used, the old one stays: %s", error)
            return
        log.info("cluster map: epoch %d follows %d", cluster_map.epoch, self.map.epoch)
        old = self._shared.router
        self._shared = replace(
            self._shared, router=Router(cluster_map, self._shared.loop, self._shared.clock)
        )
        self._old_routers.append(old)
        self._shared.loop.call_later(OLD_MAP_GRACE_S, self._drop_router, old)

    def _drop_router(self, router: Router) -> None:
        """Closes an old map's connections, once the operations that began with it have ended."""
        if self._is_closed:
            return
        if not router.is_idle:
            self._shared.loop.call_later(OLD_MAP_GRACE_S, self._drop_router, router)
            return
        self._old_routers.remove(router)
        router.close()


def _geometry(context: ClientContext, namespace: Namespace) -> ShardGeometry:
    code = context.router.code
    return ShardGeometry(namespace.layout.block_bytes, code.k, code.m)
