"""What the operations of one client share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .notes import NoteSender
from .recall import Recalls
from .results import ClientCounters
from .router import Router
from .scratch import ScratchPool

BATCH_BYTES = 8 << 20
"""Blocks of a batch hold about this many bytes: enough to pay for a request, small enough that
a batch is decoded while it is still in cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """Everything an operation needs of its client."""

    router: Router
    scratch: ScratchPool
    counters: ClientCounters
    notes: NoteSender
    recalls: Recalls
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float]

    def remaining_s(self, end_at_s: float) -> float:
        """Seconds until `end_at_s`, at least 0."""
        return max(end_at_s - self.clock(), 0.0)


def batch_blocks(block_bytes: int) -> int:
    """Blocks of one batch; a span border may cut it shorter."""
    return max(1, BATCH_BYTES // block_bytes)
