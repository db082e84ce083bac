"""Moves sections of blocks between the pool, which has block after block, and runs of the arena,
which have section after section.

The copies are numpy's, because those let other threads run meanwhile: an assignment of memoryviews
keeps the interpreter to itself until the last byte (docs/decisions/0031-swap-in-by-section.md).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from kvstore.client import ArenaRun
from kvstore.layout import BlockLayout

from .block_pool import BlockPool


class SectionCopy:
    """Copies between one pool and runs of its layout. `part` is always a section of consecutive
    blocks, block after block; the pool's blocks are those of `block_ids`, in that order."""

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        assert pool.block_bytes == layout.block_bytes, (pool.block_bytes, layout)
        self._sections: list[NDArray[np.uint8]] = []
        blocks = pool.memory.numpy()
        at = 0
        for section in layout.sections:
            self._sections.append(blocks[:, at : at + section.bytes])
            at += section.bytes

    def to_pool(self, part: memoryview, section: int, block_ids: Sequence[int]) -> None:
        """Copy a section of some blocks into the pool."""
        target = self._sections[section]
        rows = np.frombuffer(part, np.uint8).reshape(len(block_ids), target.shape[1])
        target[np.asarray(block_ids)] = rows

    def from_pool(self, part: memoryview, section: int, block_ids: Sequence[int]) -> None:
        """Copy a section of some blocks out of the pool. Row by row: to gather them at once numpy
        would copy them twice."""
        source = self._sections[section]
        rows = np.frombuffer(part, np.uint8).reshape(len(block_ids), source.shape[1])
        for row, block_id in zip(rows, block_ids, strict=True):
            row[:] = source[block_id]

    def xxh3(self, section: int, block_ids: Sequence[int]) -> int:
        """xxh3-64 of a section as it stands in the pool's blocks, block after block."""
        digest = xxh3_64()
        for block_id in block_ids:
            digest.update(self._sections[section][block_id].data)
        return digest.intdigest()


def fill_run(run: ArenaRun, record: memoryview) -> None:
    """Copy a record, the sections of one block one after the other, into a run of one block."""
    source = np.frombuffer(record, np.uint8)
    assert len(source) == run.layout.layout.block_bytes, (len(source), run)
    at = 0
    for index, section in enumerate(run.layout.layout.sections):
        target = np.frombuffer(run.section(index), np.uint8)
        np.copyto(target, source[at : at + section.bytes])
        at += section.bytes
