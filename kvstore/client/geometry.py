"""Where the shards of a batch of blocks lie in memory.

    a block of the caller  | shard 0 | shard 1 | ... | shard f-1 | rest |
    scratch, for each block                         | shard f (rest + zeros) | ... | shard k+m-1 |

Shards that lie whole inside the block are received, encoded and decoded in place. The tail (a
shard that reaches over the block's end, if the block is not a multiple of k x 64 bytes) and the
parity live in scratch memory. `Batch` gives the address and the view of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..layout import shard_bytes as shard_bytes_of


class ShardGeometry:
    """Sizes that follow from a block's size and the code k + m.

    `whole_shards` lie inside the block; the `scratch_shards` others of each block live in
    `scratch_bytes` of scratch memory.
    """

    __slots__ = (
        "block_bytes",
        "k",
        "m",
        "scratch_bytes",
        "scratch_shards",
        "shard_bytes",
        "whole_shards",
    )

    def __init__(self, block_bytes: int, k: int, m: int) -> None:
        self.block_bytes = block_bytes
        self.k = k
        self.m = m
        self.shard_bytes = shard_bytes_of(block_bytes, k)
        self.whole_shards = block_bytes // self.shard_bytes
        self.scratch_shards = k + m - self.whole_shards
        self.scratch_bytes = self.scratch_shards * self.shard_bytes


class Batch:
    """Consecutive blocks of one span in the caller's buffers, with their scratch memory.

    `blocks`: n byte views of block_bytes each; `addresses`: uintp (n,), where they begin;
    `scratch`: at least n x geometry.scratch_bytes, at `scratch_address`. Views and addresses are
    valid only while the caller's buffers are held.
    """

    def __init__(
        self,
        geometry: ShardGeometry,
        *,
        blocks: Sequence[memoryview],
        addresses: NDArray[np.uintp],
        scratch: memoryview,
        scratch_address: int,
    ) -> None:
        self.geometry = geometry
        self.blocks = blocks
        self.shard_bytes = geometry.shard_bytes
        self._whole = geometry.whole_shards
        self._scratch = scratch
        self._addresses = addresses
        self._scratch_address = scratch_address

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def has_tails(self) -> bool:
        """Does a data shard reach over the end of its block?"""
        return self._whole < self.geometry.k

    @cached_property
    def shard_addresses(self) -> NDArray[np.uintp]:
        """Address of each shard, uintp (n, k + m). Made when first asked for: a fetch that decodes
        nothing needs none."""
        n, width = len(self.blocks), self.geometry.scratch_shards
        inside = np.arange(self._whole, dtype=np.uintp) * np.uintp(self.shard_bytes)
        behind = np.arange(n * width, dtype=np.uintp).reshape(n, width)
        return np.concatenate(
            (
                self._addresses[:, None] + inside[None, :],
                np.uintp(self._scratch_address) + behind * np.uintp(self.shard_bytes),
            ),
            axis=1,
        )

    def shard_view(self, block: int, shard: int) -> memoryview:
        """The bytes of one shard, where it lies."""
        return self.shard_views(shard, block, block + 1)[0]

    def shard_views(self, shard: int, first: int, end: int) -> list[memoryview]:
        """The bytes of shard `shard` of the blocks `first` to `end`."""
        size = self.shard_bytes
        if shard < self._whole:
            start, stop = shard * size, (shard + 1) * size
            return [block[start:stop] for block in self.blocks[first:end]]
        stride = self.geometry.scratch_bytes
        start = (shard - self._whole) * size + first * stride
        places = range(start, start + (end - first) * stride, stride)
        return [self._scratch[at : at + size] for at in places]

    def spread_tails(self) -> None:
        """Copies the rest of each block into its tail shards, zeros behind it: before encoding."""
        for block, view in enumerate(self.blocks):
            rest = view[self._whole * self.shard_bytes :]
            for shard in range(self._whole, self.geometry.k):
                tail = self.shard_view(block, shard)
                part = rest[: len(tail)]
                tail[: len(part)] = part
                tail[len(part) :] = bytes(len(tail) - len(part))
                rest = rest[len(part) :]

    def gather_tail(self, block: int) -> None:
        """Copies one block's rest out of its tail shards: after all of them were verified."""
        at = self._whole * self.shard_bytes
        for shard in range(self._whole, self.geometry.k):
            part = self.blocks[block][at : at + self.shard_bytes]
            part[:] = self.shard_view(block, shard)[: len(part)]
            at += len(part)
