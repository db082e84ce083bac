"""Transfers of a GPU: what is queued in a stream up to an event.

Which streams there are, and what is queued in them, is decided by whoever makes a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import DeviceLost, TransferStuck
from .cuda_streams import is_over, record
from .mover import ComputeMark, first_line, wait_for_compute
from .polling import poll

DEADLINE_S = 30.0
"""A transfer that has not ended for so long, from when it may begin, never will: it takes
milliseconds."""


class EventTransfer:
    """A transfer that ends when its event does. Keeps what it moves from and to alive."""

    def __init__(
        self,
        event: torch.cuda.Event,
        device: torch.device,
        *keeps: object,
        behind: Sequence[ComputeMark] = (),
    ) -> None:
        """`behind`: all that it begins behind."""
        self._event = event
        self._device = device
        self._keeps = keeps
        self._behind = behind

    @property
    def has_ended(self) -> bool:
        """See Transfer."""
        try:
            return is_over(self._event)
        except RuntimeError as error:
            # Nobody asks for an event that was not recorded: it is an error of what ran before it.
            raise DeviceLost(f"{self._device} has failed: {first_line(error)}") from error

    def wait(self) -> None:
        """See Transfer. The deadline is the transfer's own: what it stands behind has another
        one."""
        if self.has_ended:
            return
        what = f"a transfer on {self._device}"
        for mark in self._behind:
            wait_for_compute(mark, what)
        if not poll(lambda: self.has_ended, DEADLINE_S):
            raise TransferStuck(f"{what} has not ended for {DEADLINE_S:.0f} s")

    def order_compute(self) -> None:
        """See Transfer."""
        if not self.has_ended:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def all_queued(
    device: torch.device, *streams: torch.cuda.Stream, behind: Sequence[ComputeMark] = ()
) -> list[EventTransfer]:
    """What is queued in streams, as transfers. Raises DeviceLost: then none of it goes on."""
    try:
        return [EventTransfer(record(stream), device, behind=behind) for stream in streams]
    except RuntimeError as error:
        raise DeviceLost(f"{device} has failed: {first_line(error)}") from error
