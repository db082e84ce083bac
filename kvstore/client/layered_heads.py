"""Asks nodes for the heads of shards: their checksums, which say what the shards must be.

One request to a node is for many units, each of which has another shard there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .. import wire
from ..errors import NodeError
from .channel import NodeChannel
from .inquiry import SingleFrameSink, require_single_frame
from .layered_plan import count_leading
from .layered_unit import LayeredUnit

Wanted = list[tuple[LayeredUnit, int]]
"""Units, and of each the shard whose heads are asked for."""


class HeadsOwner(Protocol):
    """Who waits for heads (`LayeredFetch`)."""

    def on_heads_ended(self, read: HeadsRead) -> None:
        """The units know what the node said; or it said nothing."""


class HeadsRead(SingleFrameSink):
    """One request for heads, and the sink of its answer."""

    def __init__(self, owner: HeadsOwner, channel: NodeChannel, wanted: Wanted) -> None:
        self.channel = channel
        self.wanted = wanted
        self.asked_at_s = 0.0
        self._owner: HeadsOwner | None = owner
        self._count = sum(unit.blocks for unit, _ in wanted)
        self._part = wire.PartColumns(0, [], [], [], [])

    def submit(self, *, deadline_s: float, now_s: float) -> None:
        """Asks."""
        self.asked_at_s = now_s
        keys = [key for unit, _ in self.wanted for key in unit.keys]
        body = wire.pack_read_heads(keys, self.wanted[0][0].batch.shard_bytes)
        self.channel.submit(wire.Op.READ, self, body=body, count=self._count, deadline_s=deadline_s)

    def detach(self) -> None:
        super().detach()
        self._owner = None

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        require_single_frame(header)
        if header.count != self._count:
            raise wire.FrameError(f"heads of {header.count} shards, expected {self._count}")
        self._part = part = wire.parse_part_columns(body, header.count)
        if part.first:
            raise wire.FrameError(f"heads from key {part.first} on, expected all of them")
        return ()

    def on_end(self) -> None:
        if self._owner is None:
            return
        part, start = self._part, 0
        for unit, shard in self.wanted:
            end = start + unit.blocks
            # A shard that is not here, or another one, ends what is known.
            expected = [wire.part_head(1, shard, unit.batch.shard_bytes)] * unit.blocks
            stop = start + count_leading(part.heads[start:end], expected)
            unit.on_heads(shard, part.payload_xxh3[start:stop], part.block_xxh3[start:stop])
            start = end
        self._owner.on_heads_ended(self)

    def on_failure(self, error: NodeError) -> None:
        """The channel has logged the error; the units miss their heads."""
        if self._owner is not None:
            self._owner.on_heads_ended(self)


def plan_heads(
    units: Iterable[LayeredUnit], shards: Sequence[int]
) -> list[tuple[NodeChannel, Wanted]]:
    """Who is to be asked for the heads of `shards` of all `units`; no request is longer than
    allowed."""
    by_channel: dict[NodeChannel, list[Wanted]] = {}
    for unit in units:
        for shard in shards:
            requests = by_channel.setdefault(unit.channels[shard], [[]])
            count = unit.blocks + sum(other.blocks for other, _ in requests[-1])
            if count > wire.KEYS_PER_REQUEST_MAX:
                requests.append([])
            requests[-1].append((unit, shard))
    return [(channel, wanted) for channel, requests in by_channel.items() for wanted in requests]
