"""A clock that only moves when somebody sleeps, or when it is set."""

from __future__ import annotations


class VirtualTime:
    """`kvstore.node.clock.Clock` with a `sleep`; keeps how long was slept in all."""

    def __init__(self, unix_s: float = 1_700_000_000.0) -> None:
        self.now_s = 100.0
        self.unix_offset_s = unix_s - self.now_s
        self.slept_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ns(self) -> int:
        return int((self.now_s + self.unix_offset_s) * 1e9)

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s
        self.slept_s += delay_s
