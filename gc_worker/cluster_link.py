"""The way to the nodes of the cluster: connections, placement, and the newest cluster map.

Questions and answers only; what they mean is decided elsewhere. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.client.channel import NodeChannel
from kvstore.client.inquiry import ask_node
from kvstore.client.router import Lane, Router
from kvstore.client.statistics import read_statistics
from kvstore.cluster.entities import ClusterMap
from kvstore.cluster.placement import SpanPlacement
from kvstore.cluster.source import MapSource
from kvstore.errors import ClusterMapError, DeadlineExceeded, NodeError, ProtocolError

log = logging.getLogger(__name__)

ASK_DEADLINE_S = 2.0
SILENT_S = 1.0
"""A node that owes us an answer for so long is asked nothing more."""


class ClusterLink:
    """Connections to all nodes by the map of one source. Close it at the end.

    Raises ClusterMapError if the source has no usable map at first.
    """

    def __init__(
        self, source: MapSource, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]
    ) -> None:
        self.loop = loop
        self._source = source
        self._clock = clock
        self.router = Router(source.load(), loop, clock)
        """Placement and channels of the map as it is now; another one after each change."""
        self._old_routers: list[Router] = []

    @property
    def map(self) -> ClusterMap:
        """The cluster map as it is now."""
        return self.router.map

    def follow_map(self) -> bool:
        """Take over a newer map if there is one; True if so. One that cannot be used is logged."""
        for old in [router for router in self._old_routers if router.is_idle]:
            old.close()
            self._old_routers.remove(old)
        if not self._source.has_changed():
            return False
        try:
            found = self._source.load()
        except ClusterMapError as error:
            log.warning("the cluster map cannot be used, the old one stays: %s", error)
            return False
        if found.epoch <= self.map.epoch:
            return False
        log.info("cluster map: epoch %d follows %d", found.epoch, self.map.epoch)
        self._old_routers.append(self.router)
        self.router = Router(found, self.loop, self._clock)
        return True

    def place(self, anchor: bytes) -> SpanPlacement:
        """Where the shards of the span lie whose first block has the key `anchor`."""
        return self.router.span_of([anchor], 0)

    def node_of(self, target: str) -> str:
        """The name of the node that serves a target."""
        return self.map.node_of(target).name

    def is_available(self, target: str) -> bool:
        """Whether the target's node is worth asking: not for a while after it failed, and not while
        it keeps us waiting."""
        if target not in self.map.target_by_name:
            return False
        health = self.router.channel(target, Lane.READ).health
        return health.is_available and health.waiting_s < SILENT_S

    def channel(self, target: str, lane: Lane = Lane.READ) -> NodeChannel:
        """The channel to a target. Raises NodeError if the map has no such target any more: it may
        have changed while somebody waited."""
        if target not in self.map.target_by_name:
            raise NodeError(target, "is a target that the cluster map does not have any more")
        return self.router.channel(target, lane)

    def close(self) -> None:
        """Closes every connection; questions that wait fail."""
        for router in (self.router, *self._old_routers):
            router.close()
        self._old_routers.clear()

    async def ask(
        self,
        target: str,
        op: wire.Op,
        *,
        body: bytes = b"",
        count: int = 0,
        deadline_s: float = ASK_DEADLINE_S,
    ) -> bytes:
        """Body of the answer of the target's node. Raises NodeError."""
        return await ask_node(
            self.channel(target),
            op,
            body=body,
            count=count,
            deadline_s=deadline_s,
            loop=self.loop,
        )

    async def ask_records(
        self,
        target: str,
        op: wire.Op,
        dtype: np.dtype[Any],
        *,
        body: bytes,
        count: int,
        deadline_s: float = ASK_DEADLINE_S,
    ) -> NDArray[Any]:
        """`count` records of `dtype` that answer for `count` items. Raises NodeError."""
        node = self.channel(target).node
        answer = await self.ask(target, op, body=body, count=count, deadline_s=deadline_s)
        try:
            return wire.parse_records(answer, dtype, count)
        except wire.FrameError as error:
            raise ProtocolError(node, str(error)) from error

    async def scan(
        self,
        target: str,
        segment: int,
        first_slot: int,
        slots_max: int,
        *,
        deadline_s: float = ASK_DEADLINE_S,
    ) -> tuple[wire.ScanHead, NDArray[Any]]:
        """The head and rows (dtype SCAN_ROW) of one SCAN. Raises NodeError."""
        channel = self.channel(target)
        scan = _ScanAnswer(self.loop)
        body = wire.pack_scan(segment, first_slot, slots_max)
        channel.submit(wire.Op.SCAN, scan, body=body, deadline_s=deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                return await scan.answer
        except TimeoutError as error:
            raise DeadlineExceeded(channel.node, f"no scan within {deadline_s:.2f} s") from error
        finally:
            channel.detach(scan)

    async def statistics(self, node: str, *, deadline_s: float = ASK_DEADLINE_S) -> dict[str, Any]:
        """What a node says of itself (STAT). Raises NodeError."""
        answer = await self.ask(self.any_target(node), wire.Op.STAT, deadline_s=deadline_s)
        return read_statistics(node, answer)

    def any_target(self, node: str) -> str:
        """A target to greet a node by. Raises NodeError if the map gives it none."""
        targets = self.map.targets_by_node.get(node, ())
        if not targets:
            raise NodeError(node, "has no target in the cluster map")
        return targets[0].name


class _ScanAnswer:
    """The sink of a SCAN: one frame with a head and the rows as its payload."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_detached = False
        self.answer: asyncio.Future[tuple[wire.ScanHead, NDArray[Any]]] = loop.create_future()
        self._head: wire.ScanHead | None = None
        self._rows: NDArray[Any] = np.zeros(0, wire.SCAN_ROW)

    def detach(self) -> None:
        self.is_detached = True

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        expected = header.count * wire.SCAN_ROW.itemsize
        if not header.is_last or header.count > wire.SCAN_SLOTS_MAX:
            raise wire.FrameError(f"SCAN of {header.count} rows in more than one frame or too many")
        if header.payload_bytes != expected:
            raise wire.FrameError(f"{header.payload_bytes} bytes of rows, expected {expected}")
        self._head = wire.parse_scan_head(body)
        self._rows = np.zeros(header.count, wire.SCAN_ROW)
        return [self._rows.view(np.uint8).data] if header.count else []

    def on_payload(self) -> None:
        """The rows are in place; `on_end` hands them over."""

    def on_end(self) -> None:
        assert self._head is not None
        if not self.answer.done():
            self.answer.set_result((self._head, self._rows))

    def on_failure(self, error: NodeError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
