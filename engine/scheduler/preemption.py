"""Who gives way when the pool is short of blocks. Pure.

The order is total and its top never gives way: the longest answer always goes on, so no two
sequences evict each other in turn. What is lost is the least: the shortest answer is soon had
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """`order`: place in the line of requests, lower is earlier."""

    answer_tokens: int
    order: int

    @property
    def strength(self) -> tuple[int, int]:
        return self.answer_tokens, -self.order


def choose_victim(standings: Sequence[Standing]) -> int | None:
    """Index of the one to preempt: the shortest answer, of equals the latest request.

    None if there is only one, or none.
    """
    if len(standings) < 2:
        return None
    return min(range(len(standings)), key=lambda index: standings[index].strength)
