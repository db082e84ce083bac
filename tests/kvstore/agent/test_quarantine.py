"""A process that has lost its session may still write where its run was: nobody else is there."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvstore.agent.arena_runs import QUARANTINE_INTERVAL_S, ArenaRuns
from kvstore.agent.leases import QUARANTINE_S, LeaseRequest
from kvstore.arena.region import ArenaRegion

from .test_leases import LAYOUT, Time

ARENA_BYTES = 1 << 20
MOST_BLOCKS = 1 << 14


async def test_memory_of_a_lost_session_is_leased_anew_after_its_last_copy() -> None:
    descriptor = ArenaRegion.create(ARENA_BYTES)
    with ArenaRegion(descriptor) as region, ArenaRegion(descriptor) as engine:
        time = Time()
        runs = ArenaRuns(region, clock=lambda: time.now_s)

        def ask(owner: int) -> LeaseRequest:
            return runs.ask(
                owner=owner, namespace=0, layout=LAYOUT, blocks=MOST_BLOCKS, is_window=False
            )

        async def sleep(pause_s: float) -> None:
            time.now_s += pause_s
            if later.is_settled:
                raise asyncio.CancelledError
            # The thread of the engine is still at it.
            seen.section(0)[:4] = b"late"

        first = ask(1).lease
        assert first is not None
        seen = engine.run(first.offset, first.layout)
        reader = runs.tell(first).descriptor
        assert reader is not None
        later = ask(2)
        assert not later.is_settled, "the arena is full"
        runs.book.end_owner(1)
        ended_s = time.now_s
        with pytest.raises(asyncio.CancelledError):
            await runs.run(sleep)
        assert later.lease is not None
        assert later.lease.offset == first.offset
        waited_s = time.now_s - ended_s
        assert QUARANTINE_S <= waited_s <= QUARANTINE_S + 2 * QUARANTINE_INTERVAL_S
        assert first.waker is None, "its descriptor is closed"
        os.close(reader)
    os.close(descriptor)
