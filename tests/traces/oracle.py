"""What a cache should hit: exact LRU with a time to live and a capacity, written for clarity only.

Independent of the code under test: a dict, a heap and the rules of the design. A block is used when
a request fetches or saves it; it is gone when it was last used more than `ttl_s` ago; when there is
no room, the block that was used longest ago goes, the deepest first among equally old ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from .requests import Request


@dataclass(frozen=True, slots=True)
class HitCount:
    """Tokens of full blocks that were hit, of all tokens asked for."""

    hit_tokens: int
    input_tokens: int
    block_accesses: int

    @property
    def percent(self) -> float:
        return 100.0 * self.hit_tokens / self.input_tokens


class OracleCache:
    """Blocks by key, each with the time of its last use and its place in the chain."""

    def __init__(self, *, capacity_blocks: float = math.inf, ttl_s: float = math.inf) -> None:
        self._capacity_blocks = capacity_blocks
        self._ttl_s = ttl_s
        self._used_at_s: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        """(last use, -depth, key); entries of an older use than the dict's are stale."""

    def request(self, blocks: tuple[int, ...], now_s: float) -> int:
        """Hit what is here of the leading blocks, then hold all of them. Returns blocks hit."""
        self._expire(now_s)
        hits = 0
        while hits < len(blocks) and blocks[hits] in self._used_at_s:
            hits += 1
        for depth, key in enumerate(blocks):
            self._used_at_s[key] = now_s
            heapq.heappush(self._heap, (now_s, -depth, key))
        while len(self._used_at_s) > self._capacity_blocks:
            self._drop_oldest()
        return hits

    def _expire(self, now_s: float) -> None:
        while self._heap and now_s - self._heap[0][0] > self._ttl_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        used_at_s, _, key = heapq.heappop(self._heap)
        if self._used_at_s.get(key) == used_at_s:
            del self._used_at_s[key]


def replay(requests: Iterable[Request], cache: OracleCache) -> HitCount:
    """Ask the cache for all requests in order."""
    hit_tokens = input_tokens = accesses = 0
    for request in requests:
        hits = cache.request(request.blocks, request.at_s)
        hit_tokens += hits * request.block_tokens
        input_tokens += request.input_tokens
        accesses += len(request.blocks)
    return HitCount(hit_tokens, input_tokens, accesses)
