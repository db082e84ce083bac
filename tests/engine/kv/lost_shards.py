"""A run in plain memory whose blocks have lost shards, as a fetch leaves it to its reader."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest

from erasure.code import Code
from kvstore import wire
from kvstore.arena.losses import clear_losses, loss_of, read_losses, write_loss
from kvstore.arena.region import RunMemory
from kvstore.arena.run_layout import RunCode, RunLayout
from kvstore.client import BlockLayout, BlockLoss, Namespace
from kvstore.layout import BLOCK_TOKENS, shard_bytes

FILL = 0xEE


def data_losses(k: int, m: int) -> list[tuple[int, ...]]:
    """All ways to lose shards that leave something to rebuild: one or two of them, data among
    them."""
    singles, doubles = combinations(range(k + m), 1), combinations(range(k + m), 2)
    return [lost for lost in [*singles, *doubles] if lost[0] < k and len(lost) <= m]


class LostRun:
    """What of an `ArenaRun` a rebuilder uses; block i has lost `losses[i]`."""

    def __init__(
        self, layout: BlockLayout, losses: Sequence[tuple[int, ...]], rng: Random, *, k: int, m: int
    ) -> None:
        namespace = Namespace(model="m", weights="w", tokenizer="t", layout=layout)
        tokens = [rng.randrange(1 << 16) for _ in range(len(losses) * BLOCK_TOKENS)]
        self.keys: Sequence[bytes] = namespace.block_keys(tokens)
        self.layout = RunLayout(layout, len(losses), RunCode(k, m))
        self._area = np.full(self.layout.run_bytes, FILL, np.uint8)
        self.memory = RunMemory(self.layout, self._area.data, self._area.ctypes.data)
        self.contents: list[bytes] = []
        self.blocks = len(losses)
        clear_losses(self.memory)
        for block, lost in enumerate(losses):
            self._put(block, lost, rng.randbytes(layout.block_bytes))

    @property
    def blocks_lost(self) -> list[BlockLoss]:
        return self.losses(0, self.layout.blocks)

    def losses(self, first: int, end: int) -> list[BlockLoss]:
        return read_losses(self.memory, first, end)

    def section(self, section: int) -> memoryview:
        return self.memory.section(section)

    def parity(self, first: int, end: int) -> memoryview:
        return self.memory.parity(first, end)

    def wait_ready(self, section: int, blocks: int, deadline_s: float) -> int:
        return blocks

    def ready_blocks(self, section: int) -> int:
        return self.layout.blocks

    def _put(self, block: int, lost: tuple[int, ...], data: bytes) -> None:
        code = self.layout.code
        assert code is not None
        k, m = code
        size = shard_bytes(len(data), k)
        shards = np.zeros((k + m, size), np.uint8)
        shards[:k].reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
        Code(k, m).encode(shards[None, :k], shards[None, k:], shard_bytes=size)
        hashes = [xxh3_64_intdigest(row.data) for row in shards]
        version = wire.combine_checksums([self.keys[block]], [[one] for one in hashes[:k]])[0]
        self.contents.append(data)
        there = [shard for shard in range(k + m) if shard not in lost][:k]
        if any(shard < k for shard in lost):
            write_loss(self.memory, loss_of(block, there, hashes[:k], version))
        for shard in lost:
            shards[shard] = FILL
        self.parity(block, block + 1)[:] = shards[k:].tobytes()
        self._put_sections(block, shards[:k].tobytes())

    def _put_sections(self, block: int, data: bytes) -> None:
        at = 0
        for index, section in enumerate(self.layout.layout.sections):
            self.memory.part(index, block)[:] = data[at : at + section.bytes]
            at += section.bytes
