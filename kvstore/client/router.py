"""From a block to the channels of the nodes that hold its shards.

Owns every connection of a client. Channels are opened when first used and kept. Each target has
two lanes, so that a fetch never waits behind a save that is being sent to the same node.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum

from erasure.code import Code

from ..cluster.entities import ClusterMap
from ..cluster.placement import SPAN_BLOCKS, Placement, SpanPlacement
from .channel import NodeChannel
from .health import Breaker, NodeHealth

PLACEMENTS_KEPT_MAX = 65536


class Lane(Enum):
    """What a connection is used for."""

    READ = "read"
    WRITE = "write"


class Router:
    """Placement and connections of one client for one map."""

    def __init__(
        self,
        cluster_map: ClusterMap,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self.map = cluster_map
        self.code = Code(cluster_map.code.k, cluster_map.code.m)
        self._placement = Placement(cluster_map)
        self._loop = loop
        self._clock = clock
        self._channels: dict[tuple[str, Lane], NodeChannel] = {}
        self._turned: dict[tuple[str, int, str], list[NodeChannel]] = {}
        """Channels in shard order by group, rotation and lane."""
        self._breakers: dict[str, Breaker] = {}
        self._placed: OrderedDict[bytes, SpanPlacement] = OrderedDict()

    def span_of(self, keys: Sequence[bytes], block: int) -> SpanPlacement:
        """Placement of the span that block `block` of the chain `keys` belongs to."""
        anchor = anchor_of(keys, block)
        placement = self._placed.get(anchor)
        if placement is None:
            placement = self._placed[anchor] = self._placement.place(anchor)
            if len(self._placed) > PLACEMENTS_KEPT_MAX:
                self._placed.popitem(last=False)
        return placement

    def shard_channels(self, placement: SpanPlacement, lane: Lane) -> list[NodeChannel]:
        """The channel for each shard of a span, in shard order."""
        turn = (placement.group.name, placement.rotation, lane.value)
        channels = self._turned.get(turn)
        if channels is None:
            targets = placement.targets_by_shard()
            channels = self._turned[turn] = [self.channel(target, lane) for target in targets]
        return channels

    def channel(self, target: str, lane: Lane) -> NodeChannel:
        """The channel to a target, made if it is not there yet."""
        channel = self._channels.get((target, lane))
        if channel is None:
            channel = self._channels[target, lane] = self._open_channel(target)
        return channel

    def channel_in_use(self) -> NodeChannel | None:
        """Some channel that was opened before and whose node is not known to be down, if any."""
        channels = self._channels.values()
        return next((one for one in channels if one.health.is_available), None)

    def _open_channel(self, target: str) -> NodeChannel:
        node = self.map.node_of(target)
        breaker = self._breakers.setdefault(node.name, Breaker(self._clock))
        return NodeChannel(
            node=node.name,
            address=(node.host, node.port),
            cluster=self.map.cluster_id,
            target=target,
            target_index=self.map.target_number_by_name[target],
            epoch=self.map.epoch,
            health=NodeHealth(self._clock, breaker),
            loop=self._loop,
            clock=self._clock,
        )

    @property
    def is_idle(self) -> bool:
        """True if no request waits anywhere."""
        return all(channel.is_idle for channel in self._channels.values())

    async def wait_until_written(self) -> None:
        """Waits until every node has answered for what was sent to it on the write lane."""
        for (_, lane), channel in list(self._channels.items()):
            if lane is Lane.WRITE:
                await channel.wait_until_idle()

    def close(self) -> None:
        """Closes every connection; requests that wait fail."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._turned.clear()


def anchor_of(keys: Sequence[bytes], block: int) -> bytes:
    """The key of the first block of the span that block `block` of the chain belongs to."""
    return keys[block - block % SPAN_BLOCKS]


def split_into_batches(
    first_block: int, end_block: int, *, batch_blocks: int
) -> list[tuple[int, int]]:
    """Cuts blocks [first, end) at span borders and into runs of at most `batch_blocks`."""
    runs = []
    start = first_block
    while start < end_block:
        span_end = start - start % SPAN_BLOCKS + SPAN_BLOCKS
        end = min(start + batch_blocks, span_end, end_block)
        runs.append((start, end))
        start = end
    return runs
