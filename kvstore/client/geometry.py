"""Where the shards of a batch of blocks lie in memory.

Blocks are fetched into, and saved from, a `BlockMemory`: buffers of the caller, one a block (this
module), or a run of the arena (run_batch.py). A batch of it says for each shard where its bytes
are: `ShardPlaces`. A shard lies in one or more *pieces*, and pieces of all shards of a block are
encoded and decoded by *columns*: a column is the part of every shard between two cuts.

    a block of the caller  | shard 0 | shard 1 | ... | shard f-1 | rest |
    scratch, for each block                         | shard f (rest + zeros) | ... | shard k+m-1 |

In a buffer, shards that lie whole inside the block are received, encoded and decoded in place. The
tail (a shard that reaches over the block's end, if the block is not a multiple of k x 64 bytes) and
the parity live in scratch memory. There every shard is one piece, so there is one column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from ..layout import shard_bytes as shard_bytes_of


class Column(NamedTuple):
    """Bytes [offset, offset + bytes) of every shard of a batch."""

    offset: int
    bytes: int
    addresses: NDArray[np.uintp]
    """Where they lie, (blocks, k + m)."""


class ShardPlaces(ABC):
    """Where each shard of a batch of consecutive blocks lies. Valid only while the memory is held.

    Whoever fills shards in asks for `shard_views`; who computes with them for `columns`.
    """

    shard_bytes: int
    block_bytes: int

    @abstractmethod
    def __len__(self) -> int:
        """Number of blocks."""

    @abstractmethod
    def pieces_per_shard(self, shard: int) -> int:
        """In how many views a shard of one block lies, 1 or more."""

    @abstractmethod
    def shard_views(self, shard: int, first: int, end: int) -> list[memoryview]:
        """The bytes of shard `shard` of the blocks `first` to `end`: block after block, and of each
        block its pieces in order."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """All bytes of all shards: the columns follow one another from 0 to shard_bytes."""

    @property
    @abstractmethod
    def has_tails(self) -> bool:
        """Is there something for `gather_tail` to do?"""

    @abstractmethod
    def spread_tails(self) -> None:
        """Before encoding: what of the data shards does not lie in the block is made so that they
        are the block and zeros behind it."""

    @abstractmethod
    def gather_tail(self, block: int) -> None:
        """Copies into the block what lies elsewhere of its data shards: after all of them were
        verified."""

    def checksums(self, shard: int, views: Sequence[memoryview]) -> list[int]:
        """payload_xxh3 of a shard of some blocks, from the views that `shard_views` gave."""
        pieces = self.pieces_per_shard(shard)
        if pieces == 1:
            return list(map(xxh3_64_intdigest, views))
        return [checksum_of(views[at : at + pieces]) for at in range(0, len(views), pieces)]

    def write_shard(self, block: int, shard: int, data: memoryview) -> None:
        """Copies `data`, shard_bytes long, to where the shard lies."""
        for view in self.shard_views(shard, block, block + 1):
            view[:] = data[: len(view)]
            data = data[len(view) :]


class BlockMemory(Protocol):
    """Memory of consecutive blocks, of which batches are made."""

    @property
    def block_bytes(self) -> int:
        """Length of a block."""

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory that a batch needs for each block."""

    def __len__(self) -> int:
        """Number of blocks."""

    def batch(self, first: int, end: int, scratch: memoryview, address: int) -> ShardPlaces:
        """The blocks `first` to `end`, with scratch memory for them that begins at `address`."""


def checksum_of(pieces: Sequence[memoryview]) -> int:
    """payload_xxh3 of a shard that lies in pieces."""
    if len(pieces) == 1:
        return xxh3_64_intdigest(pieces[0])
    running = xxh3_64()
    for piece in pieces:
        running.update(piece)
    return running.intdigest()


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


class Batch(ShardPlaces):
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
        self.block_bytes = geometry.block_bytes
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

    @property
    def columns(self) -> Sequence[Column]:
        return (Column(0, self.shard_bytes, self.shard_addresses),)

    def pieces_per_shard(self, shard: int) -> int:
        return 1

    def shard_view(self, block: int, shard: int) -> memoryview:
        """The bytes of one shard, where it lies."""
        return self.shard_views(shard, block, block + 1)[0]

    def shard_views(self, shard: int, first: int, end: int) -> list[memoryview]:
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


class BufferMemory:
    """The caller's buffers: `views` of block_bytes each, which begin at `addresses` (uintp)."""

    def __init__(
        self,
        views: Sequence[memoryview],
        addresses: NDArray[np.uintp],
        geometry: ShardGeometry,
    ) -> None:
        self._views = views
        self._addresses = addresses
        self._geometry = geometry

    @property
    def block_bytes(self) -> int:
        return self._geometry.block_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._geometry.scratch_bytes

    def __len__(self) -> int:
        return len(self._views)

    def batch(self, first: int, end: int, scratch: memoryview, address: int) -> Batch:
        return Batch(
            self._geometry,
            blocks=self._views[first:end],
            addresses=self._addresses[first:end],
            scratch=scratch,
            scratch_address=address,
        )
