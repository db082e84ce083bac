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
from .geometry import BlockMemory
from .inquiry import ask_node
from .matching import present_blocks
from .pipeline import SAVES_IN_FLIGHT, run_in_order
from .results import SaveResult
from .router import Lane, anchor_of, split_into_batches
from .shard_read import IgnoredAnswer

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
    memory: BlockMemory,
    ttl_class: str,
    deadline_s: float,
) -> SaveResult:
    """Blocks `first_block` to the end of `keys` from `memory`, which has as many."""
    router = context.router
    started_at_s = context.clock()
    end_at_s = started_at_s + deadline_s
    inquiry_s = min(INQUIRY_DEADLINE_S, deadline_s * INQUIRY_SHARE)
    runs, doubtful = await _unknown_runs(context, keys, first_block, memory.block_bytes, inquiry_s)

    async def save_one(start: int, end: int) -> BatchSaveResult:
        channels = router.shard_channels(router.span_of(keys, start), Lane.WRITE)
        with context.scratch.lend((end - start) * memory.scratch_bytes) as (scratch, address):
            save = BatchSave(
                memory.batch(start - first_block, end - first_block, scratch, address),
                namespace=namespace,
                keys=keys[start:end],
                anchor=anchor_of(keys, start),
                first_block=start,
                ttl_class=ttl_class,
                channels=channels,
                code=router.code,
                write_acks=router.map.code.write_acks,
                recalls=context.recalls,
                loop=context.loop,
            )
            return await save.run(context.remaining_s(end_at_s))

    results = await run_in_order(save_one, runs, in_flight=SAVES_IN_FLIGHT, goes_on=lambda _: True)
    stored = sum(one.stored for one in results)
    context.counters.blocks_saved += stored
    return SaveResult(
        stored=stored,
        known=len(memory)
        - doubtful
        - sum(end - start for start, end in runs)
        + sum(one.known for one in results),
        failed=doubtful + sum(one.failed for one in results),
        degraded=sum(one.degraded for one in results),
        elapsed_s=context.clock() - started_at_s,
    )


async def _unknown_runs(
    context: ClientContext,
    keys: Sequence[bytes],
    first_block: int,
    block_bytes: int,
    deadline_s: float,
) -> tuple[list[tuple[int, int]], int]:
    """Batches of the blocks to be sent: those that the cluster does not have.

    Also the number of blocks in doubt: too few nodes answer to read them, but with the silent ones
    there may be enough. Such a block is not sent: another version of it would replace what is
    there, without being readable itself.
    """
    end_at_s = context.clock() + deadline_s
    is_known = await present_blocks(
        context.router, keys, first_block, deadline_s, context.loop, is_probe=True
    )
    runs = split_into_batches(first_block, len(keys), batch_blocks=batch_blocks(block_bytes))
    unknown: list[tuple[int, int]] = []
    doubtful = 0
    for start, end in runs:
        claimed = is_known[start - first_block : end - first_block]
        if claimed.any():
            remaining_s = context.remaining_s(end_at_s)
            readable, may_be = await _look_up(context, keys, start, end, remaining_s, claimed)
            doubtful += int(may_be.sum())
            _renew(context, keys, start, readable)
            unknown += _false_runs(readable | may_be, start)
        else:
            unknown.append((start, end))
    return unknown, doubtful


def _renew(
    context: ClientContext, keys: Sequence[bytes], start: int, is_readable: NDArray[np.bool_]
) -> None:
    """Blocks from `start` on that are stored already and are saved again were used just now."""
    known = [keys[start + row] for row in np.flatnonzero(is_readable).tolist()]
    if not known:
        return
    items = np.zeros(len(known), wire.TOUCH_ITEM)
    items["key"] = np.frombuffer(b"".join(known), "V32")
    items["last_used_s"] = wire.USED_NOW_S
    body = items.tobytes()
    for channel in context.router.shard_channels(context.router.span_of(keys, start), Lane.READ):
        if channel.health.is_available:
            channel.submit(
                wire.Op.TOUCH,
                IgnoredAnswer(),
                body=body,
                count=len(known),
                deadline_s=INQUIRY_DEADLINE_S,
            )


async def _look_up(
    context: ClientContext,
    keys: Sequence[bytes],
    start: int,
    end: int,
    deadline_s: float,
    claimed: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each block: do k nodes hold a shard of one and the same version? And if not: is something
    of it there (`claimed` by a match, or found now), and could it be k if the silent nodes hold
    it too?"""
    router = context.router
    channels = router.shard_channels(router.span_of(keys, start), Lane.READ)
    body = wire.join_keys(keys[start:end])
    asking = [
        asyncio.ensure_future(_locate_versions(context, channel, body, end - start, deadline_s))
        for channel in channels
        if channel.health.is_available
    ]
    end_at_s = context.clock() + deadline_s
    answers: list[list[int]] = []
    readable = np.zeros(end - start, np.bool_)
    try:
        pending = set(asking)
        while pending and not readable.all():
            done, pending = await asyncio.wait(
                pending,
                timeout=context.remaining_s(end_at_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                break
            answers = [found for one in asking if one.done() and (found := one.result())]
            readable = _count_versions(answers, end - start) >= router.code.k
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    silent = len(channels) - len(answers)
    counts = _count_versions(answers, end - start)
    may_be: NDArray[np.bool_] = (claimed | (counts > 0)) & (counts + silent >= router.code.k)
    return readable, may_be & ~readable


async def _locate_versions(
    context: ClientContext, channel: NodeChannel, body: bytes, count: int, deadline_s: float
) -> list[int]:
    """block_xxh3 of each block that one node has, 0 for the others; empty if it does not answer."""
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
        return []
    versions: list[int] = np.where(found["status"] == 1, found["block_xxh3"], 0).tolist()
    return versions


def _count_versions(answers: Sequence[Sequence[int]], count: int) -> NDArray[np.int64]:
    """For each block: how many of the nodes' answers name the version that most of them name."""
    most = [
        max(Counter(answer[block] for answer in answers if answer[block]).values(), default=0)
        for block in range(count)
    ]
    return np.array(most, np.int64)


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
    return sum(
        await run_in_order(forget_one, runs, in_flight=SAVES_IN_FLIGHT, goes_on=lambda _: True)
    )


def _false_runs(flags: NDArray[np.bool_], offset: int) -> list[tuple[int, int]]:
    """Runs [start, end) of False in `flags`, moved by `offset`."""
    padded = np.concatenate(([True], flags, [True]))
    edges = np.flatnonzero(padded[1:] != padded[:-1]) + offset
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
