"""Waiting for what threads and other processes bring about."""

import time
from collections.abc import Callable

DEADLINE_S = 40.0
"""Only a test that fails waits so long."""


def wait_until(condition: Callable[[], bool]) -> None:
    due_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < due_s, "it did not come about"
        time.sleep(0.002)
