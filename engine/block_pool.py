"""The memory that KV cache lives in: a fixed number of reference-counted blocks of 128 tokens.

Each block is one contiguous run of exactly the bytes that a store keeps, so a fetch writes into the
pool and a save reads from it with no copy between. The pool knows nothing of tokens, keys, requests
or what the bytes mean; it does not evict.
"""

from collections.abc import Iterable
from threading import Lock

import numpy as np
import torch

from .errors import BlockPoolExhausted, InvalidRequest

CACHE_LINE_BYTES = 64


class BlockPool:
    """`capacity_blocks` blocks of `block_bytes` each. May be used by several threads at once.

    `memory` is the pool as a tensor: uint8 [block, byte]. A byte that was never written is zero, so
    padding is too. Memory is taken from the system as blocks are first written.
    """

    def __init__(self, *, block_bytes: int, capacity_blocks: int) -> None:
        if block_bytes < 1:
            raise InvalidRequest("block bytes", given=block_bytes, expected="1 or more")
        if capacity_blocks < 1:
            raise InvalidRequest("pool blocks", given=capacity_blocks, expected="1 or more")
        self.block_bytes = block_bytes
        self.capacity_blocks = capacity_blocks
        self._bytes = _zero_bytes(capacity_blocks * block_bytes).reshape(capacity_blocks, -1)
        self.memory = torch.from_numpy(self._bytes)
        self._references = [0] * capacity_blocks
        # The end of the list is taken first: a block just freed is the one still in the CPU cache.
        self._free = list(reversed(range(capacity_blocks)))
        self._lock = Lock()

    @property
    def free_blocks(self) -> int:
        with self._lock:
            return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Ids of `count` blocks with one reference each; their bytes are whatever was there.

        Raises BlockPoolExhausted, and allocates nothing, if fewer are free.
        """
        assert count >= 0, count
        with self._lock:
            if count > len(self._free):
                raise BlockPoolExhausted(
                    asked_blocks=count,
                    free_blocks=len(self._free),
                    capacity_blocks=self.capacity_blocks,
                )
            block_ids = [self._free.pop() for _ in range(count)]
            for block_id in block_ids:
                self._references[block_id] = 1
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; all must be in use."""
        with self._lock:
            for block_id in block_ids:
                assert self._references[block_id] > 0, f"block {block_id} is free"
                self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one reference from each block; those without any left are free again."""
        with self._lock:
            for block_id in block_ids:
                assert self._references[block_id] > 0, f"block {block_id} is free"
                self._references[block_id] -= 1
                if self._references[block_id] == 0:
                    self._free.append(block_id)

    def buffer(self, block_id: int) -> memoryview:
        """The block's own bytes, writable. Valid while the caller holds a reference."""
        assert self._references[block_id] > 0, f"block {block_id} is free"
        return memoryview(self._bytes[block_id])


def _zero_bytes(size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros that begin at a cache line. numpy asks the system for cleared pages, torch clears."""
    memory = np.zeros(size_bytes + CACHE_LINE_BYTES - 1, dtype=np.uint8)
    first = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[first : first + size_bytes]
