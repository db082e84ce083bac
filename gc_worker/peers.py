"""What peers are asked and told about victims: later uses before, withdrawal after.

A fetch asks all nodes of a block's code group but one or a few, so a node may not know of a use.
But a fetch that succeeded used the shards of at least k of the k + m nodes. If a node was not among
them, at most m - 1 others were not either: whoever asks m peers meets one that knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import wire
from kvstore.errors import NodeError
from kvstore.wire import EvictOutcome

from .context import WorkerContext
from .victims import VictimGroup, make_withdrawals

log = logging.getLogger(__name__)

OWED_ITEMS_MAX = 1 << 16
"""Withdrawals that are kept for one peer that does not answer; the oldest are dropped first."""


async def find_last_uses(
    context: WorkerContext, victims: NDArray[Any], groups: Sequence[VictimGroup]
) -> NDArray[np.uint32]:
    """For each victim the latest use of its version that m peers know of, 0 if they know of none.

    Peers that are down are left out: they served no fetch, and what they know of earlier ones is
    not worth standing still for.
    """
    uses = np.zeros(len(victims), np.uint32)

    async def ask_group(group: VictimGroup) -> None:
        uses[group.rows] = await _ask_last_uses(context, victims[group.rows], group.peers)

    await asyncio.gather(*(ask_group(group) for group in groups if group.peers))
    return uses


async def _ask_last_uses(
    context: WorkerContext, victims: NDArray[Any], peers: Sequence[str]
) -> NDArray[np.uint32]:
    uses = np.zeros(len(victims), np.uint32)
    body = victims["key"].tobytes()
    wanted = context.link.map.code.m
    available = [peer for peer in peers if context.link.is_available(peer)]
    waiting = context.rng.sample(available, len(available))
    while wanted > 0 and waiting:
        asked = [waiting.pop() for _ in range(min(wanted, len(waiting)))]
        answers = await asyncio.gather(*(_locate(context, peer, body, len(uses)) for peer in asked))
        for answer in answers:
            if answer is not None:
                is_same = (answer["status"] == 1) & (answer["block_xxh3"] == victims["block_xxh3"])
                np.maximum(uses, np.where(is_same, answer["last_used_s"], 0), out=uses)
                wanted -= 1
    return uses


async def _locate(
    context: WorkerContext, target: str, body: bytes, count: int
) -> NDArray[Any] | None:
    try:
        return await context.link.ask_records(
            target, wire.Op.LOCATE, wire.LOCATION, body=body, count=count
        )
    except NodeError as error:
        context.counters.node_errors += 1
        log.debug("no last uses from target=%s: %s", target, error)
        return None


class Withdrawals:
    """Tells peers which shards went, and keeps what it could not tell for a while.

    In memory only, and bounded: the redundancy check finds the blocks of what is lost of it.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._owed: dict[str, deque[NDArray[Any]]] = {}

    @property
    def owed_items(self) -> int:
        """Withdrawals that wait for peers to come back."""
        return sum(len(items) for owed in self._owed.values() for items in owed)

    async def send(self, victims: NDArray[Any], groups: Sequence[VictimGroup]) -> None:
        """Tell all peers of each group about its victims (dtype VICTIM)."""
        items = make_withdrawals(victims)
        await asyncio.gather(
            *(self._send(peer, items[group.rows]) for group in groups for peer in group.peers)
        )

    async def send_owed(self) -> None:
        """Try again where a peer did not answer before, if it may be back."""
        for peer in [name for name in self._owed if self._context.link.is_available(name)]:
            owed = self._owed.pop(peer)
            if peer not in self._context.link.map.target_by_name:
                continue
            while owed:
                if not await self._send(peer, owed.popleft()):
                    self._owed.setdefault(peer, deque()).extend(owed)
                    break

    async def _send(self, peer: str, items: NDArray[Any]) -> bool:
        counters = self._context.counters
        if not self._context.link.is_available(peer):
            self._owe(peer, items)
            return False
        try:
            outcomes = await self._context.link.ask_records(
                peer,
                wire.Op.WITHDRAW,
                np.dtype(np.uint8),
                body=items.tobytes(),
                count=len(items),
            )
        except NodeError as error:
            counters.node_errors += 1
            log.debug("no withdrawal at target=%s: %s", peer, error)
            self._owe(peer, items)
            return False
        counters.withdrawn += int((outcomes == EvictOutcome.EVICTED).sum())
        is_kept = (outcomes == EvictOutcome.USED) | (outcomes == EvictOutcome.OTHER)
        counters.withdrawals_refused += int(is_kept.sum())
        return True

    def _owe(self, peer: str, items: NDArray[Any]) -> None:
        owed = self._owed.setdefault(peer, deque())
        owed.append(items)
        while sum(len(some) for some in owed) > OWED_ITEMS_MAX:
            self._context.counters.withdrawals_failed += len(owed.popleft())
