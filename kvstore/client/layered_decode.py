"""Completes units of a fetch in layer order that miss something: with parity, and verified whole.

A `BatchFetch` does the work, out of what the unit has already. A few units are decoded at one time,
in their order; each begins when nothing of it is under way any more, because decoding writes where
a late shard would land.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from .batch_fetch import BatchFetch, BatchResult, EarlierShards
from .context import ClientContext
from .layered_unit import LayeredUnit

DECODINGS_MAX = 2


class DecoderOwner(Protocol):
    """Who wants units decoded (`LayeredFetch`)."""

    def on_decoded(self, unit: LayeredUnit, result: BatchResult) -> None:
        """A unit has what can be had of it."""

    def fail(self, error: BaseException) -> None:
        """Something is broken."""


class UnitDecoder:
    """The units of one fetch that are to be decoded, and those that are being decoded."""

    def __init__(
        self, context: ClientContext, owner: DecoderOwner, remaining_s: Callable[[], float]
    ) -> None:
        self._context = context
        self._owner = owner
        self._remaining_s = remaining_s
        self._due: list[tuple[int, LayeredUnit]] = []
        """A heap by the unit's number."""
        self._running: dict[int, tuple[BatchFetch, asyncio.Task[None]]] = {}
        self.asked_bytes = 0
        """What is asked for, about: bytes under way."""

    def add(self, unit: LayeredUnit) -> None:
        """The unit's turn has come."""
        heappush(self._due, (unit.number, unit))
        self.begin_due()

    def begin_due(self) -> None:
        """Begins what can begin. To be called whenever a read of a unit has ended."""
        waiting: list[tuple[int, LayeredUnit]] = []
        while self._due and len(self._running) < DECODINGS_MAX:
            number, unit = heappop(self._due)
            if unit.is_over or unit.is_decoding:
                continue
            if unit.pending:
                waiting.append((number, unit))
            else:
                self._begin(unit)
        for one in waiting:
            heappush(self._due, one)

    def _begin(self, unit: LayeredUnit) -> None:
        unit.take_scratch(self._context.scratch)
        unit.begin_decoding()
        fetch = BatchFetch(
            unit.batch,
            unit.keys,
            unit.channels,
            self._context.router.code,
            self._context.counters,
            self._context.loop,
            earlier=EarlierShards(unit.verifier, unit.answered, unit.has_parts),
        )
        task = self._context.loop.create_task(self._decode(unit, fetch))
        task.add_done_callback(self._on_task_ended)
        self._running[unit.number] = (fetch, task)

    async def _decode(self, unit: LayeredUnit, fetch: BatchFetch) -> None:
        k = self._context.router.code.k
        asked_bytes = max(k - len(unit.answered), 1) * unit.shards_bytes
        self.asked_bytes += asked_bytes
        try:
            result = await fetch.run(self._remaining_s())
        finally:
            self.asked_bytes -= asked_bytes
        del self._running[unit.number]
        if not unit.is_over:
            unit.end_decoding(result.blocks, decoded_blocks=result.decoded, left_blocks=result.left)
            self._owner.on_decoded(unit, result)
        self.begin_due()

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._owner.fail(error)

    def give_up(self, unit: LayeredUnit) -> asyncio.Task[None] | None:
        """From now on nothing is written into the unit; the task that has nothing to do any more,
        if there is one."""
        running = self._running.pop(unit.number, None)
        if running is None:
            return None
        fetch, task = running
        fetch.give_up()
        task.cancel()
        return task
