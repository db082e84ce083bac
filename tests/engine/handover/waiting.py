"""Waits for something to be, with a deadline that only a fault reaches."""

import time
from collections.abc import Callable
from typing import TypeVar

FoundT = TypeVar("FoundT")


def wait_for(look: Callable[[], FoundT], deadline_s: float = 30.0) -> FoundT:
    """The first result that is true."""
    due_s = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < due_s, "it did not come"
        time.sleep(0.002)
    return found
