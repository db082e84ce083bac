"""Fetches blocks into a run of the arena in layer order: the first sections of all blocks first.

    ask for the heads of all data shards (checksums only) -> do they combine to the blocks' own? ->
    ask for the shards of section 0 of all blocks, then section 1, ... -> each is checked by itself
    -> tell that a section of so many leading blocks is ready

What misses a head or a shard is *decoded*: its unit is completed by a `BatchFetch`, which asks for
parity, and is ready when the blocks were verified whole. Units that are in order go on meanwhile.
Where the run's reader is to rebuild what is lost, such blocks are ready when their parity is there.
Which is asked for when is `plan_layer_order`; what is known of a unit is `LayeredUnit`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from statistics import median

from .. import wire
from ..arena.losses import loss_of, write_loss
from ..arena.region import RunMemory
from ..key import Namespace
from .batch_fetch import HEDGE_FACTOR, HEDGE_MAX_S, HEDGE_MIN_S, BatchResult
from .context import ClientContext, batch_blocks
from .layered_decode import UnitDecoder
from .layered_heads import HeadsRead, plan_heads
from .layered_plan import Ask, find_section_shards, find_slow, plan_layer_order
from .layered_ready import ReadyRuns
from .layered_unit import LayeredUnit
from .results import FetchEnd, FetchResult
from .router import Lane, split_into_batches
from .run_batch import RunBatch, geometry_of
from .shard_read import ShardRead, report_shards

BYTES_IN_FLIGHT_MAX = 6 << 20
READS_IN_FLIGHT_MAX = 128
"""Both are limits beyond which nothing more is asked for until an answer has come."""
HEADS_UNITS = 16
"""Heads are asked for so many units at once, just before their first shards."""
DURATIONS_KEPT = 32
DURATIONS_NEEDED = 5
"""Before so many reads have ended nobody knows what is usual."""
LOOK_INTERVAL_S = 0.005


async def fetch_run_by_layer(
    context: ClientContext,
    namespace: Namespace,
    keys: Sequence[bytes],
    run: RunMemory,
    *,
    first_block: int,
    place: int,
    on_ready: Callable[[int, int], None],
    deadline_s: float,
    is_left_to_reader: bool = False,
) -> FetchResult:
    """Blocks `first_block` to the end of `keys` into the run from its block `place` on.

    `on_ready(section, leading blocks)` is called when that section of more blocks is there and
    verified as strongly as a whole block is; those bytes never change again. What it raises ends
    the fetch. `is_left_to_reader`: what blocks have lost is noted in the run, which has room for
    the parity that came for it, and is rebuilt and verified by whoever reads the run.
    """
    started_at_s = context.clock()
    fetch = LayeredFetch(
        context, namespace, keys, run, first_block, place, on_ready, is_left_to_reader
    )
    blocks = await fetch.run(deadline_s)
    is_complete = blocks == len(keys) - first_block
    result = FetchResult(
        blocks=blocks,
        ended=FetchEnd.COMPLETE if is_complete else fetch.end,
        decoded_blocks=fetch.decoded_blocks,
        left_blocks=fetch.left_blocks,
        rejected_shards=fetch.rejected,
        elapsed_s=context.clock() - started_at_s,
    )
    context.notes.book.note_decode(fetch.decode_s)
    context.counters.blocks_fetched += result.blocks
    context.counters.blocks_decoded += result.decoded_blocks
    context.counters.blocks_left += result.left_blocks
    return result


def _note_loss(
    run: RunMemory,
    place: int,
    row: int,
    shards: Sequence[int],
    data_xxh3: Sequence[int],
    block_xxh3: int,
) -> None:
    """A `LeaveLost` for the blocks from `place` of the run on."""
    write_loss(run, loss_of(place + row, shards, data_xxh3, block_xxh3))


class LayeredFetch:
    """One fetch in layer order; use once."""

    def __init__(
        self,
        context: ClientContext,
        namespace: Namespace,
        keys: Sequence[bytes],
        run: RunMemory,
        first_block: int,
        place: int,
        on_ready: Callable[[int, int], None],
        is_left_to_reader: bool = False,
    ) -> None:
        layout, code = namespace.layout, context.router.code
        self._context = context
        self._loop = context.loop
        self._code = code
        self._sections = find_section_shards(layout, code.k)
        self._geometry = geometry_of(run, code.k, code.m)
        self._is_left_to_reader = is_left_to_reader
        size = batch_blocks(layout.block_bytes)
        self._units = [
            self._make_unit(number, keys, run, place - first_block, start, end)
            for number, (start, end) in enumerate(
                split_into_batches(first_block, len(keys), batch_blocks=size)
            )
        ]
        self._ready = ReadyRuns(self._units, len(layout.sections), on_ready)
        self._agenda = plan_layer_order(
            range(len(self._units)), self._sections.first_section_of_shard
        )
        """A heap. To ask for shard k is to decode the unit."""
        self._asked_at_s: dict[tuple[int, int], float] = {}
        """Reads under way, by unit and shard."""
        self._heads: set[HeadsRead] = set()
        self._heads_units = 0
        """Units whose heads were asked for."""
        self._decoder = UnitDecoder(context, self, self._remaining_s)
        self._given_up: list[asyncio.Task[None]] = []
        self._in_flight_bytes = 0
        self._durations_s: deque[float] = deque(maxlen=DURATIONS_KEPT)
        self._late_after_s = HEDGE_MAX_S
        """A read that takes so long is given up."""
        self._open_units = len(self._units)
        self._is_settled = False
        self._end_at_s = 0.0
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self.end = FetchEnd.TOO_FEW_SHARDS
        """Why not all blocks are there, if they are not."""
        self.rejected = 0
        self.decode_s = 0.0
        """What it took to put decoded blocks together and check them."""

    def _make_unit(
        self, number: int, keys: Sequence[bytes], run: RunMemory, shift: int, start: int, end: int
    ) -> LayeredUnit:
        router = self._context.router
        batch = RunBatch(
            self._geometry,
            run,
            place=start + shift,
            blocks=end - start,
            scratch=memoryview(b""),
            scratch_address=0,
        )
        channels = router.shard_channels(router.span_of(keys, start), Lane.READ)
        leave_lost = partial(_note_loss, run, start + shift) if self._is_left_to_reader else None
        return LayeredUnit(
            self, number, keys[start:end], batch, channels, self._code, self._sections, leave_lost
        )

    @property
    def decoded_blocks(self) -> int:
        """Blocks of the leading run that were rebuilt from parity."""
        return sum(unit.decoded_blocks for unit in self._units)

    @property
    def left_blocks(self) -> int:
        """Blocks of the leading run that its reader is to rebuild."""
        return sum(unit.left_blocks for unit in self._units)

    async def run(self, deadline_s: float) -> int:
        """Leading blocks that are there in every section, after `deadline_s` at the latest."""
        if not self._units:
            return 0
        self._end_at_s = self._loop.time() + deadline_s
        self._call_later(deadline_s, self._on_deadline)
        self._call_later(LOOK_INTERVAL_S, self._look_for_late)
        try:
            self._judge_nodes()
            self._pump()
            await self._done
        finally:
            await self._settle()
        return min(self._ready.blocks)

    # Asking -------------------------------------------------------------------------------------

    def _judge_nodes(self) -> None:
        """A unit that has a data shard on a node which is down or slow is decoded from the start:
        the head of that shard is there as well."""
        channels = list(dict.fromkeys(channel for unit in self._units for channel in unit.channels))
        slow = find_slow([channel.health.expected_delay_s() for channel in channels])
        left_out = {channel for channel, is_slow in zip(channels, slow, strict=True) if is_slow}
        for unit in self._units:
            if not left_out.isdisjoint(unit.channels[: self._code.k]):
                unit.miss_section(0)
                self._plan_decoding(unit)

    def _pump(self) -> None:
        """Asks for what is next, as much as may be under way."""
        while self._agenda and self._has_room() and not self._is_settled:
            section, number, shard = heappop(self._agenda)
            unit = self._units[number]
            if unit.is_over or unit.is_decoding:
                continue
            if shard == self._code.k:
                self._decoder.add(unit)
            elif unit.fallback_section is None or section < unit.fallback_section:
                self._ask(unit, shard)

    def _has_room(self) -> bool:
        under_way_bytes = self._in_flight_bytes + self._decoder.asked_bytes
        return under_way_bytes < BYTES_IN_FLIGHT_MAX and len(self._asked_at_s) < READS_IN_FLIGHT_MAX

    def _ask(self, unit: LayeredUnit, shard: int) -> None:
        if unit.number >= self._heads_units:
            self._ask_heads()
        channel = unit.channels[shard]
        health = channel.health
        if not health.is_available or health.waiting_s > self._late_after_s:
            self._miss(unit, shard)
            return
        if unit.lies_in_scratch(shard):
            unit.take_scratch(self._context.scratch)
        read = ShardRead(unit, shard)
        unit.pending[shard] = read
        self._asked_at_s[unit.number, shard] = self._loop.time()
        self._in_flight_bytes += unit.shards_bytes
        channel.submit(
            wire.Op.READ,
            read,
            body=unit.read_body,
            count=unit.blocks,
            deadline_s=self._remaining_s(),
        )

    def _ask_heads(self) -> None:
        """Asks for the heads of the next units, but not of the shards that are asked for now."""
        end = self._heads_units + HEADS_UNITS
        units = [
            unit
            for unit in self._units[self._heads_units : end]
            if unit.fallback_section is None and not unit.is_over
        ]
        self._heads_units = end
        shards = [j for j in range(self._code.k) if j not in self._sections.first_shards]
        for channel, wanted in plan_heads(units, shards):
            read = HeadsRead(self, channel, wanted)
            self._heads.add(read)
            read.submit(deadline_s=self._remaining_s(), now_s=self._loop.time())

    def _remaining_s(self) -> float:
        return max(self._end_at_s - self._loop.time(), 0.0)

    # Answers ------------------------------------------------------------------------------------

    def on_read_ended(self, unit: LayeredUnit, shard: int) -> None:
        """See `UnitOwner`."""
        self._durations_s.append(self._loop.time() - self._note_ended(unit, shard))
        self._look_at(unit)
        self._pump()

    def on_shards_missing(self, count: int) -> None:
        """See `UnitOwner`."""
        self._context.counters.shards_missing += count

    def on_shards_rejected(
        self, unit: LayeredUnit, shard: int, generations: dict[int, int]
    ) -> None:
        """See `UnitOwner`. Their node is told to look at them again."""
        self._count_rejected(len(generations))
        keys = [unit.keys[row] for row in generations]
        report_shards(unit.channels[shard], keys, list(generations.values()))

    def on_shard_failed(self) -> None:
        """See `UnitOwner`."""
        self._context.counters.shards_failed += 1

    def on_heads_ended(self, read: HeadsRead) -> None:
        """See `HeadsOwner`."""
        self._heads.discard(read)
        for unit, shard in read.wanted:
            unit.on_heads_ended(shard)
            if unit.knows_more:
                self._look_at(unit)
        self._pump()

    def _note_ended(self, unit: LayeredUnit, shard: int) -> float:
        """A read is not under way any more; returns when it was asked for."""
        self._in_flight_bytes -= unit.shards_bytes
        return self._asked_at_s.pop((unit.number, shard))

    def _count_rejected(self, count: int) -> None:
        self.rejected += count
        self._context.counters.shards_rejected += count

    def _look_at(self, unit: LayeredUnit) -> None:
        """Something has become of a unit."""
        if unit.is_over or self._is_settled:
            return
        self._plan_decoding(unit)
        self._publish(unit)
        if unit.whole_blocks == unit.blocks:
            self._end_unit(unit)
        self._decoder.begin_due()

    def _publish(self, unit: LayeredUnit) -> None:
        try:
            self._ready.update(unit)
        except Exception as error:
            # It is the caller's, who waits for `run` and not for what calls this.
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """See `DecoderOwner`: whoever waits for `run` gets the error."""
        if not self._done.done():
            self._done.set_exception(error)

    # What is late -------------------------------------------------------------------------------

    def _look_for_late(self) -> None:
        self._call_later(LOOK_INTERVAL_S, self._look_for_late)
        if len(self._durations_s) >= DURATIONS_NEEDED:
            usual_s = HEDGE_FACTOR * median(self._durations_s)
            self._late_after_s = min(max(usual_s, HEDGE_MIN_S), HEDGE_MAX_S)
        asked_before_s = self._loop.time() - self._late_after_s
        late = [at for at, asked_at_s in self._asked_at_s.items() if asked_at_s < asked_before_s]
        for number, shard in late:
            unit = self._units[number]
            self._drop_read(unit, shard)
            self._miss(unit, shard)
            self._context.counters.hedges += 1
        for read in [one for one in self._heads if one.asked_at_s < asked_before_s]:
            read.channel.detach(read)
            self.on_heads_ended(read)
        for number, _ in late:
            self._look_at(self._units[number])
        self._pump()

    # Decoding -----------------------------------------------------------------------------------

    def _miss(self, unit: LayeredUnit, shard: int) -> None:
        """A shard will not come in time."""
        unit.miss(shard)
        self._plan_decoding(unit)

    def _plan_decoding(self, unit: LayeredUnit) -> None:
        """Puts the decoding of a unit in the place of the first section that needs it."""
        section = unit.fallback_section
        if section is not None and section != unit.planned_section and not unit.is_decoding:
            unit.planned_section = section
            heappush(self._agenda, Ask(section, unit.number, self._code.k))

    def on_decoded(self, unit: LayeredUnit, result: BatchResult) -> None:
        """See `DecoderOwner`."""
        self.rejected += result.rejected
        self.decode_s += result.decode_s
        self._publish(unit)
        if result.blocks < unit.blocks:
            self._cut_behind(unit, result)
        self._end_unit(unit)
        self._pump()

    # The end ------------------------------------------------------------------------------------

    def _cut_behind(self, unit: LayeredUnit, result: BatchResult) -> None:
        """A block of this unit cannot be had: those behind it are of no use."""
        self.end = result.ended
        for other in self._units[unit.number + 1 :]:
            self._end_unit(other)

    def _drop_read(self, unit: LayeredUnit, shard: int) -> None:
        self._note_ended(unit, shard)
        unit.channels[shard].detach(unit.pending.pop(shard))

    def _end_unit(self, unit: LayeredUnit) -> None:
        """Nothing more is written into a unit's blocks."""
        if unit.is_over:
            return
        for shard in list(unit.pending):
            self._drop_read(unit, shard)
        task = self._decoder.give_up(unit)
        if task is not None:
            self._given_up.append(task)
        unit.end()
        self._open_units -= 1
        if not self._open_units and not self._done.done():
            self._done.set_result(None)

    def _on_deadline(self) -> None:
        """Units that are being decoded have the same deadline, and a last look at what they have;
        the others end."""
        self.end = FetchEnd.DEADLINE
        self._agenda.clear()
        for unit in self._units:
            if not unit.is_decoding:
                self._end_unit(unit)

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers = [one for one in self._timers if one.when() > self._loop.time()]
        self._timers.append(self._loop.call_later(delay_s, call))

    async def _settle(self) -> None:
        """From here on nothing is written, whatever ended the fetch."""
        self._is_settled = True
        for timer in self._timers:
            timer.cancel()
        for read in self._heads:
            read.channel.detach(read)
        for unit in self._units:
            self._end_unit(unit)
        await asyncio.gather(*self._given_up, return_exceptions=True)
