"""Waits for what a device or a NIC does: CUDA's own wait has no deadline, and NIXL has none at all.
Not for what another thread tells, which a condition is for."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

POLL_FIRST_S, POLL_MAX_S = 0.0001, 0.0016
"""Between two looks, twice as long after each: every look takes the interpreter from the
forward."""


def poll(is_over: Callable[[], bool], deadline_s: float, *, poll_max_s: float = POLL_MAX_S) -> bool:
    """Look until it is over; False when the pauses that were asked for come to `deadline_s`. That
    counts looks, not time: in a process that stands still, or is busy, a pause lasts longer than
    it was asked for, and nothing is given up for that."""
    pause, poll_s, waited_s = Event(), POLL_FIRST_S, 0.0
    while not is_over():
        if waited_s >= deadline_s:
            return False
        pause.wait(poll_s)
        waited_s += poll_s
        poll_s = min(2 * poll_s, poll_max_s)
    return True
