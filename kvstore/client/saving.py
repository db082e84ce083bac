"""Saves a range of a chain: first finds out what is stored already, then sends the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .. import wire
from ..cluster.placement import SPAN_BLOCKS
from ..errors import NodeError
from ..key import Namespace
from .batch_save import BatchSave, BatchSaveResult
from .channel import NodeChannel
from .context import ClientContext, batch_blocks
from .geometry import Batch, ShardGeometry
from .inquiry import ask_node
from .matching import present_blocks
from .pipeline import run_in_order
from .results import SaveResult
from .router import Lane, split_into_batches

INQUIRY_DEADLINE_S = 0.25
INQUIRY_SHARE = 0.2
"""Finding out what is known may take so long, and this share of the deadline at most; what is not
known by then is sent."""


async def save_blocks(
    context: ClientContext,
    namespace: Namespace,
    keys: Sequence[bytes],
    *,
    first_block: int,
    views: Sequence[memoryview],
    addresses: NDArray[np.uintp],
    ttl_class: str,
    deadline_s: float,
) -> SaveResult:
    """Blocks `first_block` to the end of `keys` from `views`, which begin at `addresses`."""
    router = context.router
    geometry = ShardGeometry(namespace.layout.block_bytes, router.code.k, router.code.m)
    started_at_s = context.clock()
    end_at_s = started_at_s + deadline_s
    inquiry_s = min(INQUIRY_DEADLINE_S, deadline_s * INQUIRY_SHARE)
    runs = await _unknown_runs(context, keys, first_block, geometry.block_bytes, inquiry_s)

    async def save_one(start: int, end: int) -> BatchSaveResult:
        place = slice(start - first_block, end - first_block)
        channels = router.shard_channels(router.span_of(keys, start), Lane.WRITE)
        with context.scratch.lend((end - start) * geometry.scratch_bytes) as (scratch, address):
            batch = Batch(
                geometry,
                blocks=views[place],
                addresses=addresses[place],
                scratch=scratch,
                scratch_address=address,
            )
            save = BatchSave(
                batch,
                namespace=namespace,
                keys=keys[start:end],
                first_block=start,
                ttl_class=ttl_class,
                channels=channels,
                code=router.code,
                write_acks=router.map.code.write_acks,
                loop=context.loop,
            )
            return await save.run(context.remaining_s(end_at_s))

    results = await run_in_order(save_one, runs, goes_on=lambda _: True)
    stored = sum(one.stored for one in results)
    context.counters.blocks_saved += stored
    return SaveResult(
        stored=stored,
        known=len(views)
        - sum(end - start for start, end in runs)
        + sum(one.known for one in results),
        failed=sum(one.failed for one in results),
        degraded=sum(one.degraded for one in results),
        elapsed_s=context.clock() - started_at_s,
    )


async def _unknown_runs(
    context: ClientContext,
    keys: Sequence[bytes],
    first_block: int,
    block_bytes: int,
    deadline_s: float,
) -> list[tuple[int, int]]:
    """Batches that hold exactly the blocks which the cluster cannot read back today."""
    end_at_s = context.clock() + deadline_s
    is_known = await present_blocks(context.router, keys, first_block, deadline_s, context.loop)
    runs = split_into_batches(first_block, len(keys), batch_blocks=batch_blocks(block_bytes))
    unknown: list[tuple[int, int]] = []
    for start, end in runs:
        claimed = is_known[start - first_block : end - first_block]
        if claimed.any():
            claimed &= await _are_readable(context, keys, start, end, context.remaining_s(end_at_s))
        unknown += _false_runs(claimed, start)
    return unknown


async def _are_readable(
    context: ClientContext, keys: Sequence[bytes], start: int, end: int, deadline_s: float
) -> NDArray[np.bool_]:
    """For each block: do k nodes say that they hold a shard of one and the same version?"""
    router = context.router
    channels = router.shard_channels(router.span_of(keys, start), Lane.READ)
    body = wire.join_keys(keys[start:end])
    asking = [
        asyncio.ensure_future(_locate_versions(context, channel, body, end - start, deadline_s))
        for channel in channels
        if channel.health.is_available
    ]
    end_at_s = context.clock() + deadline_s
    readable = np.zeros(end - start, np.bool_)
    try:
        pending: set[asyncio.Future[list[int]]] = set(asking)
        while pending and not readable.all():
            done, pending = await asyncio.wait(
                pending,
                timeout=context.remaining_s(end_at_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                break
            answers = [one.result() for one in asking if one.done()]
            readable = _find_readable(answers, router.code.k, end - start)
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return readable


async def _locate_versions(
    context: ClientContext, channel: NodeChannel, body: bytes, count: int, deadline_s: float
) -> list[int]:
    """block_xxh3 of each block that one node has, 0 for the others and if it does not answer."""
    try:
        answer = await ask_node(
            channel,
            wire.Op.LOCATE,
            body=body,
            count=count,
            deadline_s=deadline_s,
            loop=context.loop,
        )
        found = wire.parse_records(answer, wire.LOCATION, count)
    except (NodeError, wire.FrameError):
        return [0] * count  # this node counts for nothing here
    versions: list[int] = np.where(found["status"] == 1, found["block_xxh3"], 0).tolist()
    return versions


def _find_readable(answers: Sequence[Sequence[int]], k: int, count: int) -> NDArray[np.bool_]:
    """Blocks for which k of the nodes' answers name the same version."""
    readable = np.zeros(count, np.bool_)
    if len(answers) >= k:
        for block in range(count):
            versions = Counter(answer[block] for answer in answers if answer[block])
            readable[block] = max(versions.values(), default=0) >= k
    return readable


async def forget_blocks(
    context: ClientContext, keys: Sequence[bytes], first_block: int, deadline_s: float
) -> int:
    """Removes blocks `first_block` to the end of `keys`; how many nobody can read any more."""
    router = context.router
    end_at_s = context.clock() + deadline_s

    async def forget_one(start: int, end: int) -> int:
        body = wire.join_keys(keys[start:end])
        channels = router.shard_channels(router.span_of(keys, start), Lane.WRITE)
        answers = await asyncio.gather(
            *(
                ask_node(
                    channel,
                    wire.Op.FORGET,
                    body=body,
                    count=end - start,
                    deadline_s=context.remaining_s(end_at_s),
                    loop=context.loop,
                )
                for channel in channels
            ),
            return_exceptions=True,
        )
        silent = sum(isinstance(answer, NodeError) for answer in answers)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, NodeError):
                raise answer
        return end - start if silent < router.code.k else 0

    runs = split_into_batches(first_block, len(keys), batch_blocks=SPAN_BLOCKS)
    return sum(await run_in_order(forget_one, runs, goes_on=lambda _: True))


def _false_runs(flags: NDArray[np.bool_], offset: int) -> list[tuple[int, int]]:
    """Runs [start, end) of False in `flags`, moved by `offset`."""
    padded = np.concatenate(([True], flags, [True]))
    edges = np.flatnonzero(padded[1:] != padded[:-1]) + offset
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
