"""Fetches one batch: consecutive blocks of one span, from the nodes that hold their shards.

    choose k + 1 shards -> ask -> each arrives in place, is hashed while hot -> as soon as every
    block has k shards of one version: decode what is missing -> check the block's own checksum ->
    done

A shard that is missing, rejected or late is replaced by asking for a further one. What is still on
its way when the batch ends is drained by the channels and cannot touch the caller's memory.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from erasure.code import Code

from .. import wire
from ..errors import NodeError
from .channel import NodeChannel
from .choose import choose_shards
from .geometry import Batch
from .results import ClientCounters, FetchEnd
from .verify import BlockVerifier

HEDGE_MIN_S = 0.01
HEDGE_MAX_S = 0.2
HEDGE_FACTOR = 3.0
"""Further shards are asked after this many times the usual delay."""

GRACE_FACTOR = 0.25
GRACE_MAX_S = 0.002
"""With k shards there and data among the missing, so much longer (as a share of the time until
now) is waited for the data: to receive it costs less than to rebuild it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """`blocks` leading blocks of the batch are verified."""

    blocks: int
    decoded: int
    rejected: int
    ended: FetchEnd


class BatchFetch:
    """One fetch of one batch; use once. `channels[j]` reaches the node that holds shard j."""

    def __init__(
        self,
        batch: Batch,
        keys: Sequence[bytes],
        channels: Sequence[NodeChannel],
        code: Code,
        counters: ClientCounters,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._keys = keys
        self._body = wire.pack_read(keys, batch.shard_bytes)
        self._channels = channels
        self._counters = counters
        self._loop = loop
        self._code = code
        self.batch = batch
        self.verifier = BlockVerifier(batch, code)
        self.waste = memoryview(bytearray(batch.shard_bytes))
        self._unasked = list(range(code.k + code.m))
        self._pending: dict[int, ShardRead] = {}
        self._is_settled = False
        self._assembled = False
        self._done: asyncio.Future[None] = loop.create_future()
        self._grace: asyncio.TimerHandle | None = None
        self._asked_at_s = 0.0
        self._deadline_s = 0.0
        self._ended = 0
        self._rejected = 0

    async def run(self, deadline_s: float) -> BatchResult:
        """Asks, waits and verifies; returns after `deadline_s` seconds at the latest."""
        self._deadline_s = deadline_s
        delays = [
            channel.health.delay_s if channel.health.is_available else None
            for channel in self._channels
        ]
        chosen = choose_shards(delays, k=self._code.k)
        self._unasked = [j for j in self._unasked if delays[j] is not None and j not in chosen]
        if len(chosen) < self._code.k:
            return BatchResult(blocks=0, decoded=0, rejected=0, ended=FetchEnd.TOO_FEW_SHARDS)
        usual_s = statistics.median(delays[j] or 0.0 for j in chosen)
        hedge = self._loop.call_later(
            min(max(HEDGE_FACTOR * usual_s, HEDGE_MIN_S), HEDGE_MAX_S), self._hedge
        )
        ended = FetchEnd.DEADLINE
        self._asked_at_s = self._loop.time()
        try:
            for shard in chosen:
                self._ask(shard)
            async with asyncio.timeout(deadline_s):
                await self._done
            ended = FetchEnd.TOO_FEW_SHARDS
        except TimeoutError:
            self._settle()
            self.verifier.assemble()
        finally:
            hedge.cancel()
            self._settle()
        return self._result(ended)

    def _result(self, ended: FetchEnd) -> BatchResult:
        blocks = self.verifier.leading_blocks
        return BatchResult(
            blocks=blocks,
            decoded=self.verifier.count_decoded(blocks),
            rejected=self._rejected + self.verifier.rejected,
            ended=FetchEnd.COMPLETE if blocks == len(self.batch) else ended,
        )

    def _settle(self) -> None:
        self._is_settled = True
        if self._grace is not None:
            self._grace.cancel()
        self._detach_pending()

    def _detach_pending(self) -> None:
        """Nothing more arrives in the batch's memory; those shards may be asked for again."""
        for shard, read in self._pending.items():
            self._channels[shard].detach(read)
            self._unasked.append(shard)
        self._pending.clear()

    # Asking -------------------------------------------------------------------------------------

    def _ask(self, shard: int) -> None:
        read = ShardRead(self, shard)
        self._pending[shard] = read
        self._channels[shard].submit(
            wire.Op.READ,
            read,
            body=self._body,
            count=len(self._keys),
            deadline_s=self._deadline_s,
        )

    def _ask_further(self) -> None:
        """Asks for the promising one of the shards that were not asked for yet."""
        if self._unasked:
            best = min(self._unasked, key=lambda j: self._channels[j].health.delay_s)
            self._unasked.remove(best)
            self._counters.hedges += 1
            self._ask(best)

    def _hedge(self) -> None:
        if not self._is_settled:
            self._ask_all()

    def _ask_all(self) -> None:
        while self._unasked:
            self._ask_further()

    # Answers ------------------------------------------------------------------------------------

    def on_shard_ended(self, shard: int, *, is_whole: bool) -> None:
        """The answer for one shard is complete; `is_whole`: for every block a good shard."""
        if self._is_settled:
            return
        self._pending.pop(shard, None)
        self._ended += 1
        if not is_whole:
            self._ask_further()
        self._check()

    def on_shard_failed(self, shard: int, error: NodeError) -> None:
        """The node of this shard will not answer any more."""
        self._counters.shards_failed += 1
        if self._is_settled:
            return
        self._pending.pop(shard, None)
        self._ask_further()
        self._check()

    def on_shard_rejected(self, shard: int, block: int, generation: int) -> None:
        """A shard arrived with a wrong checksum: its node is told to look at it again."""
        self._rejected += 1
        self._counters.shards_rejected += 1
        item = np.zeros(1, wire.REPORT_ITEM)
        item["key"], item["generation"] = np.void(self._keys[block]), generation
        self._channels[shard].submit(
            wire.Op.REPORT, _IgnoredAnswer(), body=item.tobytes(), count=1, deadline_s=1.0
        )

    def on_shards_missing(self, count: int) -> None:
        self._counters.shards_missing += count

    def _check(self) -> None:
        if self._pending and not self._is_ready():
            return
        # Decoding writes where a late shard would land: first nobody else may write there.
        self._detach_pending()
        self._assembled = True
        self.verifier.assemble()
        if self.verifier.leading_blocks < len(self.batch) and self._unasked:
            self._ask_all()
        else:
            self._finish()

    def _is_ready(self) -> bool:
        """Is it time to put blocks together? If data is missing, a little later: it may come."""
        if self._ended < self._code.k or not self.verifier.has_enough_shards:
            return False
        if self._grace is not None or self.verifier.has_all_data:
            return True
        waited_s = self._loop.time() - self._asked_at_s
        self._grace = self._loop.call_later(
            min(GRACE_FACTOR * waited_s, GRACE_MAX_S), self._on_grace_over
        )
        return False

    def _on_grace_over(self) -> None:
        if not self._is_settled:
            self._check()

    def places(self, shard: int, rows: Sequence[int]) -> list[memoryview]:
        """Where the shards of these blocks go: each in its place, unless what lies there is good
        already."""
        if isinstance(rows, range):
            views = self.batch.shard_views(shard, rows.start, rows.stop)
        else:
            views = [self.batch.shard_view(row, shard) for row in rows]
        if self._assembled:
            for at, row in enumerate(rows):
                if self.verifier.has_shard(row, shard):
                    views[at] = self.waste
        return views

    def _finish(self) -> None:
        self._settle()
        if not self._done.done():
            self._done.set_result(None)


class ShardRead:
    """The answer of one node to one READ: the sink that puts shards in place and hashes them.

    `rows` are the blocks whose shard is in the frame that is being received. Nearly always that is
    every block of the frame, and every shard is good.
    """

    def __init__(self, fetch: BatchFetch, shard: int) -> None:
        self.is_detached = False
        self._fetch = fetch
        self._shard = shard
        self._next_block = 0
        self._is_whole = True
        self._part = wire.PartColumns(0, [], [], [], [])
        self._rows: Sequence[int] = ()
        self._views: list[memoryview] = []

    def on_frame(self, header: wire.Header, body: bytearray) -> Sequence[memoryview]:
        part = wire.parse_part_columns(body, header.count)
        batch = self._fetch.batch
        end = part.first + header.count
        if part.first != self._next_block or end > len(batch) or not header.count:
            raise wire.FrameError(f"blocks {part.first} to {end}, expected {self._next_block}")
        if header.is_last != (end == len(batch)):
            raise wire.FrameError(f"last frame ends at block {end} of {len(batch)}")
        self._next_block = end
        self._part = part
        expected = wire.part_head(1, self._shard, batch.shard_bytes)
        if part.heads.count(expected) == header.count:
            self._rows = range(part.first, end)
        else:
            self._rows = self._look_at_rows(expected)
        if self.is_detached:
            return [self._fetch.waste] * len(self._rows)
        self._views = self._fetch.places(self._shard, self._rows)
        return self._views

    def _look_at_rows(self, expected: int) -> list[int]:
        """The blocks whose shard is in the frame; the shard may turn out to be another one."""
        rows = []
        for row, head in enumerate(self._part.heads, self._part.first):
            if head & 0xFF == 1:
                if head >> 32 != expected >> 32:
                    raise wire.FrameError(f"a shard of {head >> 32} bytes was not asked for")
                rows.append(row)
        self._is_whole = False
        self._fetch.on_shards_missing(len(self._part.heads) - len(rows))
        return rows

    def on_payload(self) -> None:
        computed = list(map(xxh3_64_intdigest, self._views))
        part, rows, self._views = self._part, self._rows, []
        if self._is_whole and computed == part.payload_xxh3:
            self._fetch.verifier.on_shards(self._shard, rows, computed, part.block_xxh3)
            return
        self._is_whole = False
        for row, checksum in zip(rows, computed, strict=True):
            self._judge(row, row - part.first, checksum)

    def _judge(self, row: int, at: int, computed: int) -> None:
        part = self._part
        if computed != part.payload_xxh3[at]:
            self._fetch.on_shard_rejected(self._shard, row, part.generations[at])
        elif part.heads[at] >> 8 & 0xFF != self._shard:
            self._fetch.on_shards_missing(1)
        else:
            self._fetch.verifier.on_shards(self._shard, [row], [computed], [part.block_xxh3[at]])

    def on_end(self) -> None:
        # The same shard may have been asked for again since this request was given up.
        if not self.is_detached:
            self._fetch.on_shard_ended(self._shard, is_whole=self._is_whole)

    def on_failure(self, error: NodeError) -> None:
        if not self.is_detached:
            self._fetch.on_shard_failed(self._shard, error)


class _IgnoredAnswer:
    """For requests whose answer changes nothing here."""

    is_detached = False

    def on_frame(self, header: wire.Header, body: bytearray) -> Sequence[memoryview]:
        return ()

    def on_payload(self) -> None:
        """There is none: `on_frame` names no place, and the channel refuses one."""

    def on_end(self) -> None:
        """The node keeps the count; see STAT."""

    def on_failure(self, error: NodeError) -> None:
        """The channel has logged it, and the shard was not used anyway."""
