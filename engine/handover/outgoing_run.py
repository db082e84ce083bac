"""A leased run that is filled from its first block on, with checksums as it goes."""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64

from kvstore.client import ArenaRun

from ..kv.mover import SectionMover, move_out
from ..model_runner import Buffer


class OutgoingRun:
    """Belongs to one thread at a time. `filled`: leading blocks that are in the run."""

    def __init__(self, run: ArenaRun) -> None:
        self.filled = 0
        self.run = run
        self._layout = run.layout.layout
        self._digests = [xxh3_64() for _ in self._layout.sections]

    @property
    def blocks(self) -> int:
        """Blocks that have room."""
        return self.run.blocks

    def add_from_pool(self, mover: SectionMover, block_ids: Sequence[int]) -> None:
        """Move blocks of the pool, which are computed, behind those that are there. Raises
        TransferFailed; when this ends nothing writes to the run any more."""
        if not block_ids:
            return
        parts = [self._part(section, len(block_ids)) for section in range(len(self._digests))]
        move_out(mover, parts, block_ids)
        for digest, part in zip(self._digests, parts, strict=True):
            digest.update(part)
        self.filled += len(block_ids)

    def add_block(self, data: Buffer) -> None:
        """Copy one block behind those that are there."""
        source = np.frombuffer(data, dtype=np.uint8)
        assert len(source) == self._layout.block_bytes, (len(source), self._layout.block_bytes)
        at = 0
        for section, digest in enumerate(self._digests):
            part = self._part(section, 1)
            np.frombuffer(part, dtype=np.uint8)[:] = source[at : at + len(part)]
            digest.update(part)
            at += len(part)
        self.filled += 1

    def _part(self, section: int, blocks: int) -> memoryview:
        """Where the section of the next blocks goes."""
        width = self._layout.sections[section].bytes
        assert self.filled + blocks <= self.blocks, (self.filled, blocks, self.blocks)
        return self.run.section(section)[self.filled * width : (self.filled + blocks) * width]

    def checksums(self) -> list[int]:
        """xxh3-64 of each section of all blocks."""
        assert self.filled == self.blocks, (self.filled, self.blocks)
        return [digest.intdigest() for digest in self._digests]

    def release(self) -> None:
        """Give the run back; one that was offered is the agent's already."""
        self.run.release()
