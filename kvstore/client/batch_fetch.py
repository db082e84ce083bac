"""Fetches one batch: consecutive blocks of one span, from the nodes that hold their shards.

    choose k shards -> ask -> each arrives in place, is hashed while hot -> as soon as every block
    has k shards of one version: decode what is missing -> check the block's own checksum -> done

A shard that is missing, rejected or late is replaced by asking for a further one. Late is what
takes half as long again as the last one that came. What is still on its way when the batch ends is
drained by the channels and cannot touch the caller's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from erasure.code import Code

from .. import wire
from ..errors import NodeError
from .channel import NodeChannel
from .choose import choose_shards
from .geometry import ShardPlaces
from .results import ClientCounters, FetchEnd
from .shard_read import ShardRead, report_shards
from .verify import BlockVerifier

HEDGE_MIN_S = 0.01
HEDGE_MAX_S = 0.2
HEDGE_FACTOR = 3.0
"""Further shards are asked after this many times the usual delay."""

LATE_FACTOR = 1.5
LATE_MIN_S = 0.001
"""When no more shards are missing than there is parity, those that need this many times as long as
the last one that came are late, and the parity is asked for. It is not asked for from the
beginning: it would be a tenth more bytes, for the network and for the caller's processor, in every
fetch."""

GRACE_FACTOR = 0.25
GRACE_MAX_S = 0.002
"""With k shards there and data among the missing, so much longer (as a share of the time until
now) is waited for the data: to receive it costs less than to rebuild it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """`blocks` leading blocks of the batch are verified."""

    blocks: int
    decoded: int
    left: int
    """Of `blocks`: to be decoded, and verified, by whoever took them (`LeaveLost`)."""
    rejected: int
    ended: FetchEnd
    decode_s: float = 0.0
    """What it took to put the blocks together and check them."""


class EarlierShards(NamedTuple):
    """What a batch has already of a fetch in another order, which this one completes."""

    verifier: BlockVerifier
    answered: Collection[int]
    """Shards whose nodes have said all they will say."""
    has_parts: bool
    """There may be something of other shards too."""


class BatchFetch:
    """One fetch of one batch; use once. `channels[j]` reaches the node that holds shard j."""

    def __init__(
        self,
        batch: ShardPlaces,
        keys: Sequence[bytes],
        channels: Sequence[NodeChannel],
        code: Code,
        counters: ClientCounters,
        loop: asyncio.AbstractEventLoop,
        *,
        earlier: EarlierShards | None = None,
    ) -> None:
        self._keys = keys
        self._body = wire.pack_read(keys, batch.shard_bytes)
        self._channels = channels
        self._counters = counters
        self._loop = loop
        self._code = code
        self.batch = batch
        self._answered = frozenset(earlier.answered if earlier else ())
        self.verifier = earlier.verifier if earlier else BlockVerifier(batch, keys, code)
        self._unasked: list[int] = []
        self._pending: dict[int, ShardRead] = {}
        self._is_settled = False
        self.has_assembled = earlier is not None and earlier.has_parts
        self._done: asyncio.Future[None] = loop.create_future()
        self._end = FetchEnd.TOO_FEW_SHARDS
        self._timers: list[asyncio.TimerHandle] = []
        self._lateness: asyncio.TimerHandle | None = None
        self._is_grace_timed = False
        self._asked_at_s = 0.0
        self._deadline_s = 0.0
        self._rejected = 0
        self._ended = len(self._answered)
        self._decode_s = 0.0

    async def run(self, deadline_s: float) -> BatchResult:
        """Asks, waits and verifies; returns after `deadline_s` seconds at the latest."""
        self._deadline_s = deadline_s
        delays = [
            None if j in self._answered else channel.health.expected_delay_s()
            for j, channel in enumerate(self._channels)
        ]
        needed = max(self._code.k - len(self._answered), 0)
        chosen = choose_shards(delays, k=needed)
        if len(chosen) < needed:
            return self._result()
        self._unasked = [
            j for j, delay in enumerate(delays) if delay is not None and j not in chosen
        ]
        usual_s = sorted(delays[j] or 0.0 for j in chosen)[len(chosen) // 2] if chosen else 0.0
        self._call_later(min(max(HEDGE_FACTOR * usual_s, HEDGE_MIN_S), HEDGE_MAX_S), self._ask_all)
        self._call_later(deadline_s, self._on_deadline)
        self._asked_at_s = self._loop.time()
        try:
            for shard in chosen:
                self._ask(shard)
            if self._answered:
                self._go_on()
            await self._done
        finally:
            self._settle()
        return self._result()

    def _result(self) -> BatchResult:
        blocks = self.verifier.leading_blocks
        return BatchResult(
            blocks=blocks,
            decoded=self.verifier.count_decoded(blocks),
            left=self.verifier.count_left(blocks),
            rejected=self._rejected,
            ended=FetchEnd.COMPLETE if blocks == len(self.batch) else self._end,
            decode_s=self._decode_s,
        )

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls it, unless the batch is settled by then."""
        timer = self._loop.call_later(delay_s, call)
        self._timers.append(timer)
        return timer

    def _on_deadline(self) -> None:
        self._end = FetchEnd.DEADLINE
        self._settle()
        self._assemble()
        self._finish()

    def give_up(self) -> None:
        """From now on nothing is written. Whoever waits for `run` is to be cancelled."""
        self._settle()

    def _settle(self) -> None:
        self._is_settled = True
        for timer in self._timers:
            timer.cancel()
        self._detach_pending()

    def _detach_pending(self) -> None:
        """Nothing more arrives in the batch's memory; those shards may be asked for again."""
        for shard, read in self._pending.items():
            self._channels[shard].detach(read)
            self._unasked.append(shard)
        self._pending.clear()

    def _go_on(self) -> None:
        """As if the answers that came earlier had come now."""
        for shard in self._answered:
            if None in self.verifier.arrived(shard)[1]:
                self._ask_further()
        if not self._pending:
            self._check()

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
        self._time_lateness()

    def on_shard_failed(self, shard: int, error: NodeError) -> None:
        """The node of this shard will not answer any more."""
        self._counters.shards_failed += 1
        if self._is_settled:
            return
        self._pending.pop(shard, None)
        self._ask_further()
        self._check()

    def on_shards_rejected(self, shard: int, generations: dict[int, int]) -> None:
        """Shards of these blocks, with their generations, arrived with a wrong checksum: their node
        is told to look at them again."""
        self._count_rejected(len(generations))
        keys = [self._keys[row] for row in generations]
        report_shards(self._channels[shard], keys, list(generations.values()))

    def _count_rejected(self, count: int) -> None:
        self._rejected += count
        self._counters.shards_rejected += count

    def on_shards_missing(self, count: int) -> None:
        self._counters.shards_missing += count

    def _check(self) -> None:
        if self._pending and not self._is_ready():
            return
        # Decoding writes where a late shard would land: first nobody else may write there.
        self._detach_pending()
        self._assemble()
        if self._unasked and self.verifier.can_run_grow(len(self._unasked)):
            self._ask_all()
        else:
            self._finish()

    def _assemble(self) -> None:
        self.has_assembled = True
        begun_s = self._loop.time()
        self._count_rejected(self.verifier.assemble())
        self._decode_s += self._loop.time() - begun_s

    def _time_lateness(self) -> None:
        """Once so few shards are missing that the others can replace them, they must not take much
        longer than those that came."""
        if self._is_settled or not 0 < len(self._pending) <= len(self._unasked):
            return
        if self._lateness is not None:
            self._lateness.cancel()
        waited_s = self._loop.time() - self._asked_at_s
        left_s = max((LATE_FACTOR - 1) * waited_s, LATE_MIN_S)
        self._lateness = self._call_later(min(left_s, HEDGE_MAX_S), self._ask_all)

    def _is_ready(self) -> bool:
        """Is it time to put blocks together? If data is missing, a little later: it may come."""
        coming = len(self._pending) + len(self._unasked)
        if self._ended + coming >= self._code.k > self._ended:
            return False
        if not self.verifier.is_run_decided(coming):
            return False
        if self._is_grace_timed or self.verifier.has_all_data:
            return True
        self._is_grace_timed = True
        waited_s = self._loop.time() - self._asked_at_s
        self._call_later(min(GRACE_FACTOR * waited_s, GRACE_MAX_S), self._check)
        return False

    def _finish(self) -> None:
        self._settle()
        if not self._done.done():
            self._done.set_result(None)
