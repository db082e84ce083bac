"""How long the tests wait for what must come.

A machine that runs tests stands still for seconds at a time: whatever ends a wait for the sake of a
test that fails, and not because it is what is tested, is long. Not for faults under test: those
have deadlines of their own, which a slow machine makes longer and never shorter.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE_S = 40.0
"""Only a test that fails waits so long; less than the time that a whole test has."""
OPERATION_S = 25.0
"""Deadline of an operation whose deadline is not what is tested."""
WELL_BEFORE_S = OPERATION_S - 10.0
"""What does not wait for its OPERATION_S takes a moment, and this on a machine that stood still."""
POLL_S = 0.005


def wait_until(is_so: Callable[[], object]) -> None:
    """Waits for what other threads and processes bring about."""
    due_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < due_s, "it did not come about"
        time.sleep(POLL_S)


async def until(is_so: Callable[[], object]) -> None:
    """Waits for what others bring about, in this loop or elsewhere."""
    due_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < due_s, "it did not come about"
        await asyncio.sleep(POLL_S)


def make_patient(*clients: type) -> None:
    """Their operations that are told no deadline get OPERATION_S instead of a second or two.

    `finish_writes` stays as it is: clients call it when they are closed, also beside nodes that
    stand still.
    """
    for client in clients:
        found = [
            defaults
            for name, operation in inspect.getmembers(client, inspect.isfunction)
            if "deadline_s" in (defaults := operation.__kwdefaults__ or {})
            and name != "finish_writes"
        ]
        assert found, client
        for defaults in found:
            defaults["deadline_s"] = OPERATION_S
