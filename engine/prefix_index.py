"""Which block of the pool holds which block of tokens: requests that begin alike share them.

A block stays known after its last request has ended, until the pool hands it out anew. Not for
where blocks are stored outside the pool, and not thread-safe: it belongs to the engine's thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from .block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class _Kept:
    block_id: int
    kept_as: int
    is_cold: bool


class PrefixIndex:
    """Complete blocks of a pool by their keys; at most one entry for each block of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[bytes, _Kept] = {}
        self._keys: dict[int, bytes] = {}
        self.additions = 0
        """How often a block has become known that was not."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: bytes, block_id: int, *, is_cold: bool = False) -> None:
        """A block that is in use has become complete. A key that is known stays where it is.
        `is_cold`: its bytes are known to be those of a cold run."""
        known = self._kept.get(key)
        if known is not None and self._pool.has_kept(known.block_id, known.kept_as):
            return
        if known is not None:
            del self._keys[known.block_id]
        before = self._keys.get(block_id)
        if before is not None:
            del self._kept[before]
        self.additions += 1
        self._kept[key] = _Kept(block_id, self._pool.keep(block_id), is_cold)
        self._keys[block_id] = key

    def has(self, key: bytes) -> bool:
        """Whether the block of a key is in the pool."""
        kept = self._kept.get(key)
        return kept is not None and self._pool.has_kept(kept.block_id, kept.kept_as)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are in the pool."""
        return sum(1 for _ in takewhile(self.has, keys))

    def count_cold(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are in the pool with the bytes of a cold run."""
        return sum(1 for _ in takewhile(self._has_cold, keys))

    def count_free(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks of `keys`, all of which are in the pool, nobody uses now."""
        return sum(self._pool.is_free(self._kept[key].block_id) for key in keys)

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of all `keys`, which `count` has just found, with a reference to each."""
        block_ids = []
        for key in keys:
            kept = self._kept[key]
            is_taken = self._pool.take_kept(kept.block_id, kept.kept_as)
            assert is_taken, f"block {kept.block_id} was handed out anew"
            block_ids.append(kept.block_id)
        return block_ids

    def _has_cold(self, key: bytes) -> bool:
        return self.has(key) and self._kept[key].is_cold
