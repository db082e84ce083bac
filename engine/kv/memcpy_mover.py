"""Moves sections to and from a pool in the memory of the host: the calling thread copies.

The copies are numpy's, because those let other threads run meanwhile: an assignment of memoryviews
keeps the interpreter to itself until the last byte (docs/decisions/0031-swap-in-by-section.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from .mover import ENDED, ComputeMark, Transfer, check_copy, check_part

if TYPE_CHECKING:
    import torch


class MemcpyMover:
    """A `SectionMover` for a pool of the host. Raises InvalidRequest for another one."""

    name = "memcpy"
    step_bytes = 4 << 20
    """About a millisecond's work: less would wake the threads more often, more would let the
    copying thread idle while a section comes."""

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        assert pool.block_bytes == layout.block_bytes, (pool.block_bytes, layout)
        pool.require_host("memcpy of blocks")
        self._device = pool.memory.device
        self._sections: list[NDArray[np.uint8]] = []
        blocks = pool.memory.numpy()
        at = 0
        for section in layout.sections:
            self._sections.append(blocks[:, at : at + section.bytes])
            at += section.bytes

    def mark_compute(self) -> ComputeMark:
        """Nothing: what a thread of the host computes is done when its call returns."""
        return None

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """See SectionMover."""
        target = self._sections[section]
        blocks = check_part(part, target.shape[1], block_ids, len(target))
        if len(blocks):
            target[blocks.array] = np.frombuffer(part, np.uint8).reshape(len(blocks), -1)
        return ENDED

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """See SectionMover. Row by row: to gather them at once numpy would copy them twice."""
        source = self._sections[section]
        blocks = check_part(part, source.shape[1], block_ids, len(source))
        if len(blocks):
            rows = np.frombuffer(part, np.uint8).reshape(len(blocks), -1)
            for row, block_id in zip(rows, blocks, strict=True):
                row[:] = source[block_id]
        return ENDED

    def copy_in(
        self, part: memoryview, target: torch.Tensor, *, after: ComputeMark = None
    ) -> Transfer:
        """See SectionMover."""
        check_copy(part, target, self._device)
        np.copyto(target.numpy().reshape(-1), np.frombuffer(part, np.uint8))
        return ENDED

    def copy_out(
        self, source: torch.Tensor, part: memoryview, *, after: ComputeMark = None
    ) -> Transfer:
        """See SectionMover."""
        check_copy(part, source, self._device)
        np.copyto(np.frombuffer(part, np.uint8), source.numpy().reshape(-1))
        return ENDED

    def close(self) -> None:
        """Nothing is under way."""
