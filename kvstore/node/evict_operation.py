"""EVICT and WITHDRAW: shards go, unless they were used since whoever chose them looked.

Who is to go is decided elsewhere, by figures that are seconds old. Here each shard is looked at
again in the instant in which it leaves the index, so one that was read meanwhile stays. A request
is worked off in pieces, each of which clears its slots in a thread, so that traffic goes on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import wire
from ..wire import EvictOutcome, EvictReason
from .answers import Request, answer, refuse
from .effects import Effect, Operation, Send
from .freeing import free_slots
from .node import Node
from .segment import ABSENT, LOCATION_BITS, SLOT_MASK
from .target import Target

PIECE_SHARDS = 256
"""So many shards leave the index at once: well under a millisecond in which nobody is served."""
_REASONS = [int(reason) for reason in EvictReason]


def evict(node: Node, target: Target, request: Request) -> Operation:
    """Answer an EVICT: shards by where they are, from the node's own worker."""
    items = wire.parse_records(request.body, wire.EVICT_ITEM, request.header.count)
    if (problem := _find_problem(items)) is not None:
        yield from refuse(node, request, wire.Status.BAD_REQUEST, problem)
        return
    outcomes = bytearray()
    for at in range(0, len(items), PIECE_SHARDS):
        piece = items[at : at + PIECE_SHARDS]
        locations = [
            location if _is_here(target, location) else ABSENT
            for location in piece["location"].tolist()
        ]
        outcomes += yield from _take_out(node, target, piece, locations, "generation")
    yield Send([answer(node, request, body=bytes(outcomes), count=len(items))])


def withdraw(node: Node, target: Target, request: Request) -> Operation:
    """Answer a WITHDRAW: shards by key, from the worker of another node of the code group."""
    items = wire.parse_records(request.body, wire.WITHDRAW_ITEM, request.header.count)
    if (problem := _find_problem(items)) is not None:
        yield from refuse(node, request, wire.Status.BAD_REQUEST, problem)
        return
    outcomes = bytearray()
    for at in range(0, len(items), PIECE_SHARDS):
        piece = items[at : at + PIECE_SHARDS]
        locations = target.index.find(piece["key"].tolist())
        outcomes += yield from _take_out(node, target, piece, locations, "block_xxh3")
    yield Send([answer(node, request, body=bytes(outcomes), count=len(items))])


def _find_problem(items: NDArray[Any]) -> str | None:
    reasons = items["reason"]
    if np.isin(reasons, _REASONS).all():
        return None
    return f"reasons {sorted(set(reasons.tolist()))}, expected each of {_REASONS}"


def _is_here(target: Target, location: int) -> bool:
    """Whether a location that somebody names holds a shard that the index points to."""
    segment = target.space.segments.get(location >> LOCATION_BITS)
    slot = location & SLOT_MASK
    if segment is None or slot >= segment.shape.slot_count:
        return False
    return bool(segment.columns.status[slot])


def _take_out(
    node: Node, target: Target, items: NDArray[Any], locations: Sequence[int], version: str
) -> Generator[Effect, Any, bytes]:
    """Take out what may go of `items`, which are at `locations`; returns an EvictOutcome each.

    `version` is the field of `items` that must be the shard's.
    """
    outcomes, rows = _judge(target, items, locations, version)
    # They leave together, so their order is free; the index drops runs faster than single keys, and
    # a chain that goes deepest block first lies in its slots the other way round.
    rows.sort(key=locations.__getitem__)
    chosen = [locations[row] for row in rows]
    last_used_s = [_last_used_s(target, location) for location in chosen]
    keys = [_key_at(target, location) for location in chosen]
    taken = target.unlink(keys)
    gone = [i for i, location in enumerate(taken) if location != ABSENT]
    for i, location in enumerate(taken):
        if location == ABSENT:
            # It stands twice in the request, and is gone when its second turn comes.
            outcomes[rows[i]] = EvictOutcome.ABSENT
    reasons = items["reason"][rows]
    target.ghosts.remember(keys, reasons)
    now_s = target.clock.unix_ns() // 1_000_000_000
    target.evictions.note(reasons[gone], now_s - np.array(last_used_s, np.int64)[gone])
    _count(target, outcomes, [chosen[i] for i in gone])
    yield from free_slots(node, target, [taken[i] for i in gone])
    return bytes(outcomes)


def _judge(
    target: Target, items: NDArray[Any], locations: Sequence[int], version: str
) -> tuple[list[int], list[int]]:
    """An EvictOutcome for each item, and the rows of those that may go."""
    outcomes: list[int] = [EvictOutcome.ABSENT] * len(locations)
    rows: list[int] = []
    wanted, used_until_s = items[version].tolist(), items["used_until_s"].tolist()
    for row, location in enumerate(locations):
        if location == ABSENT:
            continue
        segment, slot = target.index.resolve(location)
        held = getattr(segment.columns, version)[slot]
        # No shard has generation 0; a block_xxh3 of 0 asks for none in particular.
        is_other = held != wanted[row] and (wanted[row] != 0 or version == "generation")
        if is_other:
            outcomes[row] = EvictOutcome.OTHER
        elif segment.columns.last_used_s[slot] > used_until_s[row]:
            outcomes[row] = EvictOutcome.USED
        else:
            outcomes[row] = EvictOutcome.EVICTED
            rows.append(row)
    return outcomes, rows


def _key_at(target: Target, location: int) -> bytes:
    segment, slot = target.index.resolve(location)
    return segment.columns.key_at(slot)


def _last_used_s(target: Target, location: int) -> int:
    segment, slot = target.index.resolve(location)
    return int(segment.columns.last_used_s[slot])


def _count(target: Target, outcomes: Sequence[int], gone: Sequence[int]) -> None:
    """Note in the target's statistics what went, and what stayed."""
    statistics = target.statistics
    statistics.evictions_refused += outcomes.count(EvictOutcome.OTHER)
    statistics.evictions_refused += outcomes.count(EvictOutcome.USED)
    for location in gone:
        segment, _ = target.index.resolve(location)
        statistics.evicted_bytes += segment.shape.geometry.slot_bytes
