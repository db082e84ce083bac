"""The memory that KV cache lives in: a fixed number of reference-counted blocks of 128 tokens.

Each block is one contiguous run of exactly the bytes that a store keeps, so in the memory of the
host a fetch can write into the pool, and a save read from it, with no copy between; to and from the
memory of a GPU `engine.kv` moves them. The pool knows nothing of tokens, keys, requests or what the
bytes mean. It can be told that the bytes of a block may be wanted again: such ones are
handed out last, the one that has been free longest first, and may be taken back until then.
"""

from collections.abc import Callable, Iterable
from threading import Lock

import numpy as np
import torch

from .errors import BlockPoolExhausted, InvalidRequest

CACHE_LINE_BYTES = 64

HOST = torch.device("cpu")


def notify_nobody() -> None:
    """Nobody waits for blocks."""


class BlockPool:
    """`capacity_blocks` blocks of `block_bytes` each. May be used by several threads at once.

    `memory` is the pool as a tensor: uint8 [block, byte], on `device`. A byte that was never
    written is zero, so padding is too. The host's memory is taken from the system as blocks are
    first written, a GPU's at once. `on_free` is called after blocks have become free, by the thread
    that released them.

    Raises InvalidRequest for a size that is none, or that the device cannot give.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        capacity_blocks: int,
        device: torch.device | str = HOST,
    ) -> None:
        if block_bytes < 1:
            raise InvalidRequest("block bytes", given=block_bytes, expected="1 or more")
        if capacity_blocks < 1:
            raise InvalidRequest("pool blocks", given=capacity_blocks, expected="1 or more")
        self.block_bytes = block_bytes
        self.capacity_blocks = capacity_blocks
        try:
            self.memory = _zero_blocks(capacity_blocks, block_bytes, torch.device(device))
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise InvalidRequest(
                "memory of the block pool",
                given=f"{capacity_blocks} blocks of {block_bytes} bytes",
                expected="what this machine can give",
            ) from error
        self.device = self.memory.device
        self._bytes = self.memory.numpy() if self.is_host else None
        self.on_free: Callable[[], None] = notify_nobody
        self._references = [0] * capacity_blocks
        self._allocations = [0] * capacity_blocks
        self._is_kept = [False] * capacity_blocks
        # The end of the list is taken first: a block just freed is the one still in the CPU cache.
        self._free = list(reversed(range(capacity_blocks)))
        # Free blocks whose bytes may be wanted again, in the order in which they became free.
        self._free_kept: dict[int, None] = {}
        self._freed_blocks = 0
        self._lock = Lock()

    @property
    def is_host(self) -> bool:
        """Whether the CPU can read and write the blocks."""
        return self.device.type == "cpu"

    def require_host(self, what: str) -> None:
        """Raises InvalidRequest if `what` asks for the memory of the host and it is another's."""
        if not self.is_host:
            raise InvalidRequest(what, given=f"a pool on {self.device}", expected="one on the host")

    @property
    def free_blocks(self) -> int:
        with self._lock:
            return self._count_free()

    @property
    def freed_blocks(self) -> int:
        """How often a block became free, ever: as long as this stays, no room was made."""
        return self._freed_blocks

    def allocate(self, count: int) -> list[int]:
        """Ids of `count` blocks with one reference each; their bytes are whatever was there.

        Raises BlockPoolExhausted, and allocates nothing, if fewer are free.
        """
        assert count >= 0, count
        with self._lock:
            if count > self._count_free():
                raise BlockPoolExhausted(
                    asked_blocks=count,
                    free_blocks=self._count_free(),
                    capacity_blocks=self.capacity_blocks,
                )
            return [self._take_free() for _ in range(count)]

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; all must be in use."""
        with self._lock:
            for block_id in block_ids:
                assert self._references[block_id] > 0, f"block {block_id} is free"
                self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one reference from each block; those without any left are free again."""
        with self._lock:
            freed_before = self._freed_blocks
            for block_id in block_ids:
                assert self._references[block_id] > 0, f"block {block_id} is free"
                self._references[block_id] -= 1
                if self._references[block_id] == 0:
                    self._put_free(block_id)
            has_freed = self._freed_blocks != freed_before
        if has_freed:
            self.on_free()

    def count_last(self, block_ids: Iterable[int]) -> int:
        """How many of these `release` would set free: nobody else has a reference to them."""
        with self._lock:
            return sum(self._references[block_id] == 1 for block_id in block_ids)

    def keep(self, block_id: int) -> int:
        """The block's bytes, which do not change any more, may be wanted again after it is free.

        Returns what `take_kept` asks for. The block must be in use.
        """
        with self._lock:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._is_kept[block_id] = True
            return self._allocations[block_id]

    def take_kept(self, block_id: int, kept_as: int) -> bool:
        """Add a reference to a block that may be free, if it has not been handed out anew since
        `keep` returned `kept_as`; False if it has."""
        with self._lock:
            if self._allocations[block_id] != kept_as:
                return False
            if self._references[block_id] == 0:
                del self._free_kept[block_id]
            self._references[block_id] += 1
            return True

    def has_kept(self, block_id: int, kept_as: int) -> bool:
        """Whether `take_kept` would add a reference."""
        return self._allocations[block_id] == kept_as

    def is_free(self, block_id: int) -> bool:
        return self._references[block_id] == 0

    def buffer(self, block_id: int) -> memoryview:
        """The block's own bytes, writable. Valid while the caller holds a reference. Only of a pool
        in the memory of the host."""
        assert self._references[block_id] > 0, f"block {block_id} is free"
        assert self._bytes is not None, f"block {block_id} is on {self.device}"
        return memoryview(self._bytes[block_id])

    def _count_free(self) -> int:
        return len(self._free) + len(self._free_kept)

    def _take_free(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = next(iter(self._free_kept))
            del self._free_kept[block_id]
            self._is_kept[block_id] = False
        self._allocations[block_id] += 1
        self._references[block_id] = 1
        return block_id

    def _put_free(self, block_id: int) -> None:
        self._freed_blocks += 1
        if self._is_kept[block_id]:
            self._free_kept[block_id] = None
        else:
            self._free.append(block_id)


def _zero_blocks(blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros that begin at a cache line: a GPU's begin at 512 bytes. For the host numpy asks the
    system for cleared pages, where torch would clear them."""
    if device.type != "cpu":
        return torch.zeros((blocks, block_bytes), dtype=torch.uint8, device=device)
    memory = np.zeros(blocks * block_bytes + CACHE_LINE_BYTES - 1, dtype=np.uint8)
    first = -memory.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(memory[first : first + blocks * block_bytes]).view(blocks, -1)
