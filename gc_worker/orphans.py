"""Blocks with fewer than k shards: nobody can read them, so what is left of them only takes room.

Removing is the one thing here that cannot be taken back, so it takes two passes of the redundancy
check some time apart, both with every target of the group answering. While a node is merely down
nothing is removed: its shards come back with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.errors import NodeError
from kvstore.event_log import short_key
from kvstore.node.slot import HEADER_BYTES

from .context import WorkerContext
from .redundancy import newest_use
from .survey import Survey

log = logging.getLogger(__name__)

SUSPECTS_MAX = 1 << 16
"""What is found beyond that is suspected when others have gone. Forgetting the oldest instead would
confirm none as soon as one pass finds more than that."""
STALE_AFTER_PASSES = 16
"""A suspect that so many passes in a row did not see, because they could not ask everybody."""


@dataclass(slots=True)
class _Suspicion:
    first_pass: int
    since_s: float
    seen_in_pass: int


class Suspects:
    """Versions of blocks that were found unreadable, until a later pass confirms it. Pure."""

    def __init__(self, confirm_after_s: float) -> None:
        self._confirm_after_s = confirm_after_s
        self._found: dict[tuple[bytes, int], _Suspicion] = {}

    def __len__(self) -> int:
        return len(self._found)

    def confirm(
        self, keys: Sequence[bytes], versions: Sequence[int], *, pass_number: int, now_s: float
    ) -> list[bool]:
        """Which of these were found before, in an earlier pass and long enough ago; `now_s` is of a
        clock that never goes back. The others are remembered, as far as there is room."""
        return [
            self._confirm_one((key, version), pass_number, now_s)
            for key, version in zip(keys, versions, strict=True)
        ]

    def _confirm_one(self, name: tuple[bytes, int], pass_number: int, now_s: float) -> bool:
        known = self._found.get(name)
        if known is None:
            if len(self._found) < SUSPECTS_MAX:
                self._found[name] = _Suspicion(pass_number, now_s, pass_number)
            return False
        known.seen_in_pass = pass_number
        is_confirmed = (
            known.first_pass < pass_number and now_s - known.since_s >= self._confirm_after_s
        )
        if is_confirmed:
            # It goes now; if it does not, it is found and suspected anew.
            del self._found[name]
        return is_confirmed

    def forget_others(self, pass_number: int, *, has_asked_all: bool = True) -> None:
        """A pass has ended: what it did not find unreadable is suspected no more. Of one that could
        not ask everybody that is not known; then only what was not seen for long is forgotten."""
        oldest = pass_number if has_asked_all else pass_number - STALE_AFTER_PASSES
        for name in [n for n, one in self._found.items() if one.seen_in_pass < oldest]:
            del self._found[name]


async def remove_unreadable(context: WorkerContext, survey: Survey) -> int:
    """Removes what is left of all blocks of `survey`, first from the peers and then here, so that a
    crash in between leaves one to go on. Returns how many blocks' own shards went.

    A shard that was used or written again since the survey stays. Raises NodeError if the own node
    does not answer.
    """
    if not len(survey):
        return 0
    rows = np.arange(len(survey))
    versions = survey.sightings.versions[rows, survey.own_shard]
    used_until_s = newest_use(survey.sightings, versions)
    await _withdraw_from_peers(context, survey, versions, used_until_s)
    items = np.zeros(len(survey), wire.EVICT_ITEM)
    items["location"] = survey.blocks.locations
    items["generation"] = survey.blocks.headers["generation"]
    items["used_until_s"] = used_until_s
    items["reason"] = wire.EvictReason.ORPHANED
    outcomes = await context.link.ask_records(
        survey.blocks.target,
        wire.Op.EVICT,
        np.dtype("u1"),
        body=items.tobytes(),
        count=len(items),
    )
    evicted = outcomes == wire.EvictOutcome.EVICTED
    count = int(evicted.sum())
    slot_bytes = survey.blocks.headers["payload_bytes"][evicted].astype(np.int64) + HEADER_BYTES
    context.counters.orphaned_blocks += count
    context.counters.evicted["orphaned"] += count
    context.counters.evicted_bytes += int(slot_bytes.sum())
    log.info(
        "unreadable blocks removed count=%d first=%s",
        count,
        short_key(survey.blocks.headers["key"][0].tobytes()),
    )
    return count


async def _withdraw_from_peers(
    context: WorkerContext,
    survey: Survey,
    versions: NDArray[np.uint64],
    used_until_s: NDArray[np.uint32],
) -> None:
    is_there = survey.sightings.versions == versions[:, None]
    is_there[np.arange(len(survey)), survey.own_shard] = False
    rows, shards = np.nonzero(is_there)
    places = survey.places[rows, shards]
    items = np.zeros(len(rows), wire.WITHDRAW_ITEM)
    items["key"] = survey.blocks.headers["key"][rows]
    items["block_xxh3"] = versions[rows]
    items["used_until_s"] = used_until_s[rows]
    items["reason"] = wire.EvictReason.ORPHANED
    async with asyncio.TaskGroup() as group:
        for number in np.unique(places).tolist():
            name = context.link.map.targets[number].name
            group.create_task(_withdraw(context, name, items[places == number]))


async def _withdraw(context: WorkerContext, target: str, items: NDArray[np.void]) -> None:
    try:
        outcomes = await context.link.ask_records(
            target,
            wire.Op.WITHDRAW,
            np.dtype("u1"),
            body=items.tobytes(),
            count=len(items),
        )
    except NodeError as error:
        context.counters.withdrawals_failed += len(items)
        log.info("unreadable shards not withdrawn: %s", error)
        return
    gone = int((outcomes == wire.EvictOutcome.EVICTED).sum())
    context.counters.withdrawn += gone
    context.counters.withdrawals_refused += int((outcomes >= wire.EvictOutcome.USED).sum())
