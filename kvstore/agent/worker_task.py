"""A job on its way through the agent: it waits, a worker does it, it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .jobs import FetchDone, FetchPiece, SaveDone, SavePiece

if TYPE_CHECKING:
    from .worker_slot import WorkerSlot


class WorkerTask:
    """`ended` gets what the worker reports, None if no worker did it. Then, and not before, nothing
    of the run is written any more."""

    __slots__ = (
        "blocks",
        "descriptor",
        "due_s",
        "ended",
        "is_given_up",
        "order",
        "owner",
        "slot",
        "timer",
    )

    def __init__(
        self,
        order: FetchPiece | SavePiece,
        *,
        owner: int,
        blocks: int,
        due_s: float,
        descriptor: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.order = order
        self.owner = owner
        """Number of the session that waits for it."""
        self.blocks = blocks
        self.due_s = due_s
        self.descriptor = descriptor
        self.ended: asyncio.Future[FetchDone | SaveDone | None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.slot: WorkerSlot | None = None
        self.is_given_up = False

    def end(self, report: FetchDone | SaveDone | None) -> None:
        """To be called once."""
        self.set_timer(None)
        self.ended.set_result(report)

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """The one timer of the task is another one, or none."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer
