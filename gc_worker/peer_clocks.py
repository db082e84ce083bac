"""Compares the day it is here with the day it is elsewhere, before anything expires.

A clock that is wrong from the start, or for long, looks even to `clock_guard`. One wrong clock must
not empty a cluster, so blocks expire only while most peers that answer agree with it. Where none
answers there is nothing to compare with, and the own clock counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import NodeError

from .clock_guard import JUMP_S
from .context import WorkerContext

log = logging.getLogger(__name__)

PEERS_ASKED = 5
CHECK_EVERY_S = 30.0
ASK_DEADLINE_S = 2.0


def find_difference_s(own_s: float, peers_s: Sequence[float]) -> float:
    """By how much the own Unix time is ahead of the middle one of its peers'; 0 without peers.

    Of an even number the nearer of the two in the middle counts: half the peers are not most.
    """
    if not peers_s:
        return 0.0
    ahead = sorted(own_s - peer_s for peer_s in peers_s)
    low, high = ahead[(len(ahead) - 1) // 2], ahead[len(ahead) // 2]
    return low if abs(low) < abs(high) else high


@dataclass(slots=True)
class PeerClocks:
    """Asks some peers now and then. `difference_s` is what was found last."""

    context: WorkerContext
    difference_s: float = 0.0
    _checked_at_s: float | None = None

    async def agree(self) -> bool:
        """Whether most peers' clocks are within an hour of the own one, as found lately."""
        now_s = self.context.clock.monotonic_s()
        if self._checked_at_s is None or now_s - self._checked_at_s >= CHECK_EVERY_S:
            self._checked_at_s = now_s
            await self._check()
        return abs(self.difference_s) <= JUMP_S

    async def _check(self) -> None:
        context, was_even = self.context, abs(self.difference_s) <= JUMP_S
        peers = sorted(set(context.link.map.node_by_name) - {context.node})
        asked = context.rng.sample(peers, min(PEERS_ASKED, len(peers)))
        answers = await asyncio.gather(*(self._ask(peer) for peer in asked))
        own_s = context.clock.unix_ns() / 1e9
        told = [answer for answer in answers if answer is not None]
        self.difference_s = find_difference_s(own_s, told)
        if was_even and abs(self.difference_s) > JUMP_S:
            ahead_s = round(self.difference_s)
            context.events.add(context.now_s(), "clock_differs", ahead_s=ahead_s)
            log.error("this clock is %d s ahead of most peers': nothing expires", ahead_s)

    async def _ask(self, peer: str) -> float | None:
        """A peer's Unix time, None if it does not tell."""
        try:
            stat = await self.context.link.statistics(peer, deadline_s=ASK_DEADLINE_S)
        except NodeError:
            return None
        unix_s = stat.get("unix_s")
        return float(unix_s) if isinstance(unix_s, int | float) else None
