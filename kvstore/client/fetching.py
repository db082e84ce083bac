"""Fetches a range of a chain: batch after batch, up to the first block that cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .batch_fetch import BatchFetch, BatchResult
from .context import ClientContext, batch_blocks
from .geometry import Batch, ShardGeometry
from .pipeline import FETCHES_IN_FLIGHT, run_in_order
from .results import FetchEnd, FetchResult
from .router import Lane, split_into_batches


async def fetch_blocks(
    context: ClientContext,
    keys: Sequence[bytes],
    *,
    first_block: int,
    views: Sequence[memoryview],
    addresses: NDArray[np.uintp],
    block_bytes: int,
    deadline_s: float,
) -> FetchResult:
    """Blocks `first_block` to the end of `keys` into `views`, which begin at `addresses`."""
    code = context.router.code
    geometry = ShardGeometry(block_bytes, code.k, code.m)
    started_at_s = context.clock()
    end_at_s = started_at_s + deadline_s

    async def fetch_one(start: int, end: int) -> BatchResult:
        place = slice(start - first_block, end - first_block)
        placement = context.router.span_of(keys, start)
        channels = context.router.shard_channels(placement, Lane.READ)
        with context.scratch.lend((end - start) * geometry.scratch_bytes) as (scratch, address):
            batch = Batch(
                geometry,
                blocks=views[place],
                addresses=addresses[place],
                scratch=scratch,
                scratch_address=address,
            )
            fetch = BatchFetch(
                batch, keys[start:end], channels, code, context.counters, context.loop
            )
            return await fetch.run(context.remaining_s(end_at_s))

    runs = split_into_batches(first_block, len(keys), batch_blocks=batch_blocks(block_bytes))
    results = await run_in_order(
        fetch_one,
        runs,
        in_flight=FETCHES_IN_FLIGHT,
        goes_on=lambda one: one.ended is FetchEnd.COMPLETE,
    )
    result = FetchResult(
        blocks=sum(one.blocks for one in results),
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
