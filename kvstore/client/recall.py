"""Takes back the shards of blocks that too few nodes took.

A save that ends with fewer than k acknowledgements leaves shards that nobody can read, and that
take room until a worker finds them orphaned. They are withdrawn in the background, but only what
has not been touched since by anybody, and only if fewer than k nodes can have it: another writer of
the same bytes may have completed the block, or be about to.

    batch failed -> look (LOCATE) -> RECALL_AFTER_S -> look again -> WITHDRAW what is as it was

All times that are compared are those that each node told of its own shards: the client's clock and
the nodes' may differ. They are whole seconds, so a writer of the same bytes that needs more than
RECALL_AFTER_S - 1 s from its first shard to its k-th may lose what it found there; its block is a
miss then. Best effort: what is not taken back when the client ends is left to the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import wire
from ..errors import NodeError
from .channel import NodeChannel
from .inquiry import ask_node

RECALL_AFTER_S = 2.0
RECALL_DEADLINE_S = 1.0
"""A node that does not answer for so long may have any block, and keeps what it has."""
BATCHES_MAX = 64
"""So many batches wait to be taken back; the oldest are left to the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBatch:
    """Blocks that too few nodes took: `versions` are their block_xxh3, `channels` reach all nodes
    that may have a shard, and `k` shards make a block."""

    keys: Sequence[bytes]
    versions: Sequence[int]
    channels: Sequence[NodeChannel]
    k: int


class Recalls:
    """The batches of one client that are being taken back. Belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closed = False

    @property
    def tasks(self) -> frozenset[asyncio.Task[None]]:
        """What runs in the background."""
        return frozenset(self._tasks)

    def add(self, batch: RefusedBatch) -> None:
        """Take back what there is of a batch, some time later."""
        if self._is_closed:
            return
        if len(self._tasks) >= BATCHES_MAX:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        task = self._loop.create_task(_recall(batch, self._loop))
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    async def wait(self) -> None:
        """Returns when nothing is left to be taken back."""
        while self._tasks:
            await asyncio.wait(self.tasks)

    async def end(self) -> None:
        """Gives up what is left, and returns when nothing runs any more."""
        left = self.tasks
        self.close()
        await asyncio.gather(*left, return_exceptions=True)

    def close(self) -> None:
        """Gives up what is left."""
        self._is_closed = True
        for task in self.tasks:
            task.cancel()


async def _recall(batch: RefusedBatch, loop: asyncio.AbstractEventLoop) -> None:
    before = await _look(batch, loop)
    if not any(len(rows) for rows in choose_recalled(before, before, batch.versions, batch.k)):
        return
    await _pause(RECALL_AFTER_S, loop)
    after = await _look(batch, loop)
    chosen = choose_recalled(before, after, batch.versions, batch.k)
    await asyncio.gather(
        *(
            _withdraw(batch, channel, rows, found, loop)
            for channel, rows, found in zip(batch.channels, chosen, after, strict=True)
            if found is not None and len(rows)
        )
    )


async def _pause(duration_s: float, loop: asyncio.AbstractEventLoop) -> None:
    is_over: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(duration_s, is_over.set_result, None)
    try:
        await is_over
    finally:
        timer.cancel()


def choose_recalled(
    before: Sequence[NDArray[Any] | None],
    after: Sequence[NDArray[Any] | None],
    versions: Sequence[int],
    k: int,
) -> list[NDArray[np.int64]]:
    """For each node the rows of the blocks whose shards it is to give up.

    `before` and `after`: what each node said when it was asked twice, LOCATION (blocks,), or None
    if it was silent; `versions`: block_xxh3 of each block. A silent node counts as one that has
    every block. Whatever was written or used between the two answers stays.
    """
    wanted = np.array(versions, np.uint64)
    none = np.zeros(len(wanted), np.bool_)
    held = [
        none if found is None else (found["status"] == 1) & (found["block_xxh3"] == wanted)
        for found in after
    ]
    silent = sum(found is None for found in after)
    is_unreadable = np.sum(held, axis=0, dtype=np.int64) + silent < k
    chosen = []
    for is_held, first, second in zip(held, before, after, strict=True):
        may_go = none
        if first is not None and second is not None:
            is_untouched = (first["generation"] == second["generation"]) & (
                first["last_used_s"] == second["last_used_s"]
            )
            may_go = is_held & is_unreadable & is_untouched
        chosen.append(np.flatnonzero(may_go).astype(np.int64))
    return chosen


async def _look(batch: RefusedBatch, loop: asyncio.AbstractEventLoop) -> list[NDArray[Any] | None]:
    """What each node has of the blocks, LOCATION (blocks,); None of a node that does not say."""
    body = wire.join_keys(batch.keys)

    async def locate(channel: NodeChannel) -> NDArray[Any] | None:
        try:
            answer = await ask_node(
                channel,
                wire.Op.LOCATE,
                body=body,
                count=len(batch.keys),
                deadline_s=RECALL_DEADLINE_S,
                loop=loop,
            )
            return wire.parse_records(answer, wire.LOCATION, len(batch.keys))
        except (NodeError, wire.FrameError):
            return None

    return list(await asyncio.gather(*map(locate, batch.channels)))


async def _withdraw(
    batch: RefusedBatch,
    channel: NodeChannel,
    rows: NDArray[np.int64],
    found: NDArray[Any],
    loop: asyncio.AbstractEventLoop,
) -> None:
    items = np.zeros(len(rows), wire.WITHDRAW_ITEM)
    items["key"] = np.frombuffer(b"".join(batch.keys[row] for row in rows.tolist()), "V32")
    items["block_xxh3"] = found["block_xxh3"][rows]
    items["used_until_s"] = found["last_used_s"][rows]
    items["reason"] = wire.EvictReason.ORPHANED
    try:
        await ask_node(
            channel,
            wire.Op.WITHDRAW,
            body=items.tobytes(),
            count=len(items),
            deadline_s=RECALL_DEADLINE_S,
            loop=loop,
        )
    except NodeError:
        return  # a worker will find them
