"""What the engine's thread says to the event loop: in batches, in order, and without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .messages import Answer

Delivery: TypeAlias = tuple[str, Answer]
"""Id of a request, and an answer to it."""


class LoopOutbox:
    """Takes answers in any thread and gives them to `deliver` in the loop's."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Delivery]], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver

    def post(self, deliveries: Sequence[Delivery]) -> None:
        """One wake-up of the loop for all that a step of the engine gave. Without effect when the
        loop has ended."""
        if deliveries and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, deliveries)
