"""Fetches a range of a chain: batch after batch, up to the first block that cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .batch_fetch import BatchFetch, BatchResult
from .context import ClientContext, batch_blocks
from .geometry import BlockMemory
from .pipeline import FETCHES_IN_FLIGHT, run_in_order
from .results import FetchEnd, FetchResult
from .router import Lane, split_into_batches


async def fetch_blocks(
    context: ClientContext,
    keys: Sequence[bytes],
    *,
    first_block: int,
    memory: BlockMemory,
    deadline_s: float,
    on_blocks: Callable[[int], None] | None = None,
) -> FetchResult:
    """Blocks `first_block` to the end of `keys` into `memory`, which has room for as many.

    `on_blocks` is told of each batch that so many leading blocks are verified now.
    """
    code = context.router.code
    verified_blocks = 0
    started_at_s = context.clock()
    end_at_s = started_at_s + deadline_s

    async def fetch_one(start: int, end: int) -> BatchResult:
        placement = context.router.span_of(keys, start)
        channels = context.router.shard_channels(placement, Lane.READ)
        with context.scratch.lend((end - start) * memory.scratch_bytes) as (scratch, address):
            batch = memory.batch(start - first_block, end - first_block, scratch, address)
            fetch = BatchFetch(
                batch, keys[start:end], channels, code, context.counters, context.loop
            )
            return await fetch.run(context.remaining_s(end_at_s))

    def take(one: BatchResult) -> bool:
        """Counts a batch that follows those before it; is it worth going on?"""
        nonlocal verified_blocks
        if one.blocks:
            verified_blocks += one.blocks
            if on_blocks is not None:
                on_blocks(verified_blocks)
        return one.ended is FetchEnd.COMPLETE

    size = batch_blocks(memory.block_bytes)
    runs = split_into_batches(first_block, len(keys), batch_blocks=size)
    results = await run_in_order(
        fetch_one,
        runs,
        in_flight=FETCHES_IN_FLIGHT,
        goes_on=take,
    )
    result = FetchResult(
        blocks=verified_blocks,
        ended=results[-1].ended if results else FetchEnd.COMPLETE,
        decoded_blocks=sum(one.decoded for one in results),
        rejected_shards=sum(one.rejected for one in results),
        elapsed_s=context.clock() - started_at_s,
    )
    for one in results:
        context.notes.book.note_decode(one.decode_s)
    context.counters.blocks_fetched += result.blocks
    context.counters.blocks_decoded += result.decoded_blocks
    return result
