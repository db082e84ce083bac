"""Saves one batch: consecutive blocks of one span, a shard of each to every node of its group.

    encode -> hash each shard -> one WRITE to each of the k + m nodes -> done at `write_acks` for
    every block; the nodes that are still busy then get a copy of what they had not taken

A block counts as stored with `write_acks` acknowledgements, or, when every node has had its say,
with at least k: it can be read, though on fewer nodes than wished ("degraded"). A batch that cannot
reach k because too many nodes are full is not sent; what is left of one that did not reach it is
taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from erasure.code import Code

from .. import wire
from ..errors import NodeError
from ..key import Namespace
from .channel import NodeChannel
from .geometry import ShardPlaces
from .health import NodeHealth
from .inquiry import SingleFrameSink, require_single_frame
from .recall import Recalls, RefusedBatch

_STORED, _KNOWN, _KEPT, _FULL = map(
    int,
    (
        wire.WriteOutcome.STORED,
        wire.WriteOutcome.KNOWN,
        wire.WriteOutcome.KEPT,
        wire.WriteOutcome.FULL,
    ),
)
IN_CACHE_BYTES = 1 << 20
"""Blocks of about so many bytes are encoded, and then hashed while they are in the cache still."""
STRAGGLER_WAIT_S = 0.25
"""Once every block can be read, the nodes that are missing for `write_acks` get so much longer."""
SILENT_S = 1.0
"""A node that has not answered for so long is sent nothing more: its shards are written later, by
repair, and do not pile up here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSaveResult:
    """Blocks of the batch by outcome."""

    stored: int
    known: int
    failed: int
    degraded: int


class BatchSave:
    """One save of one batch; use once. `channels[j]` reaches the node for shard j."""

    def __init__(
        self,
        batch: ShardPlaces,
        *,
        namespace: Namespace,
        keys: Sequence[bytes],
        anchor: bytes,
        first_block: int,
        ttl_class: str,
        channels: Sequence[NodeChannel],
        code: Code,
        write_acks: int,
        recalls: Recalls,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._batch = batch
        self._namespace = namespace
        self._keys = keys
        self._anchor = anchor
        self._first_block = first_block
        self._ttl_class = ttl_class
        self._channels = channels
        self._code = code
        self._write_acks = write_acks
        self._recalls = recalls
        self._versions: list[int] = []
        self._failed_nodes = 0
        n = len(batch)
        self._acks: NDArray[np.int64] = np.zeros(n, np.int64)
        self._stored: NDArray[np.int64] = np.zeros(n, np.int64)
        self._kept: NDArray[np.int64] = np.zeros(n, np.int64)
        self._pending: dict[int, tuple[ShardWrite, int]] = {}
        self._loop = loop
        self._patience: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None] = loop.create_future()

    async def run(self, deadline_s: float) -> BatchSaveResult:
        """Encodes, sends and waits; returns after `deadline_s` seconds at the latest."""
        reachable = self._reachable_shards()
        if len(reachable) < len(self._channels):
            await self._read_what_came()
            reachable = self._reachable_shards()
        with_room = [shard for shard in reachable if not self._channels[shard].health.is_full]
        # With fewer than k the block could not be read, and might replace one that can be again.
        if deadline_s <= 0 or len(with_room) < self._code.k:
            return self._result()
        shards = self._shard_views()
        sums = self._encode_and_hash(shards)
        self._versions = wire.combine_checksums(self._keys, sums[: self._code.k])
        items = self._items()
        try:
            for shard in reachable:
                items["payload_xxh3"] = sums[shard]
                body = self._head(shard) + items.tobytes()
                self._send(shard, shards[shard], body, deadline_s)
            if self._pending:
                async with asyncio.timeout(deadline_s):
                    await self._done
        except TimeoutError:
            pass  # what has been acknowledged until now is what counts
        finally:
            self._recall_failed()
            self._settle()
        return self._result()

    def _reachable_shards(self) -> list[int]:
        """Those whose node is there, and not silent."""
        return [
            shard
            for shard, channel in enumerate(self._channels)
            if channel.health.is_available and channel.health.waiting_s < SILENT_S
        ]

    async def _read_what_came(self) -> None:
        """Let the loop look at its sockets once. After a process stood still, or was busy, for a
        while, every node seems silent, and their answers lie there."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_soon(turn.set_result, None)
        await turn

    def _encode_and_hash(self, shards: list[list[memoryview]]) -> list[list[int]]:
        """Fills the parity; payload_xxh3 of each shard's blocks. A few blocks at a time, so that
        they are read from memory once and not a second time for hashing."""
        batch, k = self._batch, self._code.k
        batch.spread_tails()
        sums: list[list[int]] = [[] for _ in shards]
        step = max(1, IN_CACHE_BYTES // batch.block_bytes)
        for first in range(0, len(batch), step):
            end = first + step
            for column in batch.columns:
                self._code.encode_at(
                    np.ascontiguousarray(column.addresses[first:end, :k]),
                    np.ascontiguousarray(column.addresses[first:end, k:]),
                    shard_bytes=column.bytes,
                )
            for shard, views in enumerate(shards):
                pieces = batch.pieces_per_shard(shard)
                sums[shard] += batch.checksums(shard, views[first * pieces : end * pieces])
        return sums

    def _shard_views(self) -> list[list[memoryview]]:
        """For each shard its bytes in every block, in one or more pieces."""
        width = self._code.k + self._code.m
        return [self._batch.shard_views(shard, 0, len(self._batch)) for shard in range(width)]

    def _send(self, shard: int, views: list[memoryview], body: bytes, deadline_s: float) -> None:
        n, size = len(self._batch), self._batch.shard_bytes
        write = ShardWrite(self, shard, n, self._channels[shard].health)
        request_id = self._channels[shard].submit(
            wire.Op.WRITE,
            write,
            body=body,
            count=n,
            payload=views,
            payload_bytes=n * size,
            deadline_s=deadline_s,
        )
        self._pending[shard] = (write, request_id)

    def _head(self, shard: int) -> bytes:
        """The WRITE_BATCH record for one shard."""
        head = np.zeros(1, wire.WRITE_BATCH)
        head["namespace_id"] = np.void(self._namespace.namespace_id)
        head["layout"] = np.void(self._namespace.layout.fingerprint[:16])
        head["ttl_class"] = self._ttl_class.encode()
        head["k"], head["m"], head["shard"] = self._code.k, self._code.m, shard
        head["shard_bytes"] = self._batch.shard_bytes
        head["block_bytes"] = self._batch.block_bytes
        head["anchor"] = np.void(self._anchor)
        return head.tobytes()

    def _items(self) -> NDArray[Any]:
        """The WRITE_ITEM record of each block, but for the checksum of a shard."""
        items = np.zeros(len(self._batch), wire.WRITE_ITEM)
        items["key"] = np.frombuffer(b"".join(self._keys), "V32")
        items["block_index"] = np.arange(self._first_block, self._first_block + len(items))
        items["block_xxh3"] = self._versions
        return items

    def on_outcomes(self, shard: int, outcomes: NDArray[np.uint8]) -> None:
        """A node has answered for its shard of every block."""
        self._pending.pop(shard, None)
        is_stored = outcomes == _STORED
        self._stored += is_stored
        self._acks += is_stored | (outcomes == _KNOWN)
        self._kept += outcomes == _KEPT
        fewest_acks = int(self._acks.min())
        if not self._pending or fewest_acks >= self._write_acks:
            self._finish()
        elif self._patience is None and fewest_acks >= self._code.k:
            self._patience = self._loop.call_later(STRAGGLER_WAIT_S, self._finish)
        if self._patience is not None and self._only_stragglers_left():
            self._finish()

    def _only_stragglers_left(self) -> bool:
        """True if every node that is missing has kept others waiting before."""
        waits_s = [self._channels[shard].health.waiting_s for shard in self._pending]
        return all(wait_s > STRAGGLER_WAIT_S for wait_s in waits_s)

    def on_failed(self, shard: int) -> None:
        """A node will not answer."""
        self._pending.pop(shard, None)
        self._failed_nodes += 1
        if not self._pending:
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _recall_failed(self) -> None:
        """Have the shards taken back of blocks that cannot be read, as far as there may be any."""
        k = self._code.k
        may_be_there = self._acks + self._failed_nodes + len(self._pending) > 0
        rows = np.flatnonzero((self._acks < k) & (self._kept < k) & may_be_there).tolist()
        if rows:
            self._recalls.add(
                RefusedBatch(
                    keys=[self._keys[row] for row in rows],
                    versions=[self._versions[row] for row in rows],
                    channels=self._channels,
                    k=k,
                )
            )

    def _settle(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        for shard, (write, request_id) in self._pending.items():
            self._channels[shard].detach(write)
            self._channels[shard].keep_payload(request_id)
        self._pending.clear()

    def _result(self) -> BatchSaveResult:
        k = self._code.k
        is_readable = self._acks >= k
        # "Kept": another writer's version stays. It counts only where it can be read by itself.
        is_known = (is_readable & (self._stored == 0)) | (~is_readable & (self._kept >= k))
        is_stored = is_readable & ~is_known
        return BatchSaveResult(
            stored=int(is_stored.sum()),
            known=int(is_known.sum()),
            failed=int((~is_stored & ~is_known).sum()),
            degraded=int((is_stored & (self._acks < self._write_acks)).sum()),
        )


class ShardWrite(SingleFrameSink):
    """The answer of one node to one WRITE. Once detached it knows nothing of the save any more, but
    still tells whether the node has room."""

    def __init__(self, save: BatchSave, shard: int, count: int, health: NodeHealth) -> None:
        self._save: BatchSave | None = save
        self._health = health
        self._shard = shard
        self._outcomes: NDArray[np.uint8] = np.zeros(count, np.uint8)

    def detach(self) -> None:
        super().detach()
        self._save = None

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        require_single_frame(header)
        if header.count != len(self._outcomes) or len(body) != len(self._outcomes):
            raise wire.FrameError(f"{header.count} outcomes, expected {len(self._outcomes)}")
        self._outcomes = np.frombuffer(body, np.uint8)
        return ()

    def on_end(self) -> None:
        if (self._outcomes == _FULL).any():
            self._health.on_full()
        elif (self._outcomes == _STORED).any():
            self._health.on_stored()
        if self._save is not None:
            self._save.on_outcomes(self._shard, self._outcomes)

    def on_failure(self, error: NodeError) -> None:
        if self._save is not None:
            self._save.on_failed(self._shard)
