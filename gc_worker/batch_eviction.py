"""One batch of victims, from "should go" to "gone everywhere", in steps that may end anywhere.

    step        what it does                                  a kill after it leaves
    read        slot headers: key, anchor, version            nothing
    located     asks m peers for later uses; spares those     nothing
    journaled   victims into TARGET/gc-journal                a journal: the next worker evicts and
                                                              withdraws what was not used since
    evicted     EVICT at the own node, if not used since      a journal, as above
    withdrawn   WITHDRAW at the other nodes of the group      a journal: told twice, harmless
    cleared     journal removed                               nothing

Every step carries the version and the last use that it is about, so that a shard that was fetched
or saved anew meanwhile stays, whenever and however often a step is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.wire import EvictOutcome

from .columns import TargetColumns
from .context import WorkerContext
from .headers import HeaderReader
from .journal import Journal
from .peers import Withdrawals, find_last_uses
from .victims import group_victims, make_victims, pack_evict, reason_name

log = logging.getLogger(__name__)

EVICT_DEADLINE_S = 10.0
"""Clearing the headers of 1,024 scattered slots may take a disk a while."""

StepHook = Callable[[str], None]


def no_hook(step: str) -> None:
    """Nobody watches the steps."""


class BatchEviction:
    """Evicts batches of one own target. `on_step` is told each step when it is done."""

    def __init__(
        self,
        context: WorkerContext,
        target: str,
        folder: Path,
        withdrawals: Withdrawals,
        on_step: StepHook = no_hook,
    ) -> None:
        self._context = context
        self._target = target
        self._withdrawals = withdrawals
        self._on_step = on_step
        self._reader = HeaderReader(folder)
        self._journal = Journal(folder)
        self._is_journaled = True

    def close(self) -> None:
        """Close the files that were read from; says if some could not be read."""
        self._reader.close()
        if self._reader.problem is not None:
            problem, self._reader.problem = self._reader.problem, None
            log.error("segments cannot be read target=%s: %s", self._target, problem)

    async def evict(
        self,
        columns: TargetColumns,
        rows: NDArray[np.int64],
        reasons: NDArray[np.uint8],
        until_s: NDArray[np.uint32],
    ) -> int:
        """Evict some `rows` for their `reasons`; how many went. Raises NodeError, OSError.

        `until_s`: the latest use, if only a peer saw it, with which each would still be a victim.
        """
        locations = columns.location[rows].tolist()
        found = await asyncio.to_thread(self._reader.read, locations, columns.generation[rows])
        victims = make_victims(columns, rows, reasons, found)
        self._context.counters.gone_before += len(rows) - len(victims)
        self._on_step("read")
        groups = group_victims(self._context.link, self._target, victims)
        uses = await find_last_uses(self._context, victims, groups)
        victims = await self._spare(victims, uses, until_s[found.rows])
        self._on_step("located")
        if not len(victims):
            return 0
        self._write_journal(victims)
        self._on_step("journaled")
        return await self._finish(victims, is_resumed=False)

    def _write_journal(self, victims: NDArray[Any]) -> None:
        if not self._journal.write(victims) and self._is_journaled:
            self._is_journaled = False
            log.warning("no room for a journal, evicting without one target=%s", self._target)

    async def resume(self) -> int:
        """Finish the batch that an earlier worker left; how many victims it had. Raises NodeError,
        OSError."""
        victims = self._journal.read()
        if len(victims):
            log.info("resuming an eviction target=%s victims=%d", self._target, len(victims))
            await self._finish(victims, is_resumed=True)
        return len(victims)

    async def _finish(self, victims: NDArray[Any], *, is_resumed: bool) -> int:
        outcomes = await self._evict_own(victims)
        self._on_step("evicted")
        is_out = outcomes == EvictOutcome.EVICTED
        if is_resumed:
            # The worker before us may have been killed just after it had evicted them here.
            is_out |= (outcomes == EvictOutcome.ABSENT) | (outcomes == EvictOutcome.OTHER)
        gone = victims[is_out]
        if is_resumed:
            gone = await self._leave_used(gone)
        if len(gone):
            groups = group_victims(self._context.link, self._target, gone)
            await self._withdrawals.send(gone, groups)
        self._on_step("withdrawn")
        self._journal.clear()
        self._on_step("cleared")
        return int((outcomes == EvictOutcome.EVICTED).sum())

    async def _leave_used(self, victims: NDArray[Any]) -> NDArray[Any]:
        """Those of `victims` that no peer has seen used since they were chosen: while there was no
        worker, somebody may have found them at the peers and counts on them."""
        groups = group_victims(self._context.link, self._target, victims)
        uses = await find_last_uses(self._context, victims, groups)
        unused: NDArray[Any] = victims[uses <= victims["used_until_s"]]
        return unused

    async def _evict_own(self, victims: NDArray[Any]) -> NDArray[np.uint8]:
        outcomes: NDArray[np.uint8] = await self._context.link.ask_records(
            self._target,
            wire.Op.EVICT,
            np.dtype(np.uint8),
            body=pack_evict(victims),
            count=len(victims),
            deadline_s=EVICT_DEADLINE_S,
        )
        counters = self._context.counters
        is_evicted = outcomes == EvictOutcome.EVICTED
        reasons = Counter(victims["reason"][is_evicted].tolist())
        for reason, count in reasons.items():
            counters.evicted[reason_name(reason)] += count
        counters.evicted_bytes += int(victims["slot_bytes"][is_evicted].sum(dtype=np.int64))
        counters.spared += int((outcomes == EvictOutcome.USED).sum())
        is_gone = (outcomes == EvictOutcome.ABSENT) | (outcomes == EvictOutcome.OTHER)
        counters.gone_before += int(is_gone.sum())
        return outcomes

    async def _spare(
        self, victims: NDArray[Any], uses: NDArray[np.uint32], until_s: NDArray[np.uint32]
    ) -> NDArray[Any]:
        """The victims without those that a peer saw used so late that they are none. Our node is
        told of those uses, so that it does not choose the same again."""
        is_spared = uses > np.maximum(until_s, victims["used_until_s"])
        spared = victims[is_spared]
        if len(spared):
            self._context.counters.spared += len(spared)
            items = np.zeros(len(spared), wire.TOUCH_ITEM)
            items["key"], items["last_used_s"] = spared["key"], uses[is_spared]
            await self._context.link.ask(
                self._target, wire.Op.TOUCH, body=items.tobytes(), count=len(items)
            )
        kept: NDArray[Any] = victims[~is_spared]
        kept["used_until_s"] = np.maximum(kept["used_until_s"], uses[~is_spared])
        return kept
