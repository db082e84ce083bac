"""Layouts as models have them and odd ones, and runs in plain memory with known bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.arena.region import RunMemory
from kvstore.arena.run_layout import RunCode, RunLayout
from kvstore.client import BlockLayout, Section
from tests.kvstore.blocks import RandomBlocks

FILL = 0xA5
"""What memory holds that nobody has written to."""


def layout_of(*sizes: int) -> BlockLayout:
    """Sections of these sizes, named by their place."""
    return BlockLayout(tuple(Section(f"s{index}", size) for index, size in enumerate(sizes)))


V41_FLASH = layout_of(22_784, 22_784, 22_784, 45_568)
"""The four owner layers of V4.1-Flash; under 10+2 every shard lies in one section."""
SMOLLM2 = layout_of(*[98_304] * 30)
"""SmolLM2-135M in bfloat16; under 10+2 a shard is three sections."""
PRIMES = tuple(p for p in range(50, 500) if all(p % q for q in range(2, p)))[:61]
ODD = layout_of(*PRIMES)
"""61 sections of prime sizes: no section begins where a shard does, and blocks have a tail."""
RAGGED = layout_of(513, 1, 511, 3000, 8320)
"""12,345 bytes: the last shard reaches over the block's end under 10+2 and under 4+2."""


class PlainRun:
    """A run in memory of its own, full of FILL; `memory` is what the client is given."""

    def __init__(self, layout: BlockLayout, blocks: int, code: RunCode | None = None) -> None:
        self.layout = RunLayout(layout, blocks, code)
        self.area: NDArray[np.uint8] = np.full(self.layout.run_bytes, FILL, np.uint8)
        self.memory = RunMemory(self.layout, self.area.data, self.area.ctypes.data)

    def put(self, first: int, blocks: list[memoryview]) -> None:
        """Writes whole blocks from block `first` of the run on."""
        for block, data in enumerate(blocks, first):
            at = 0
            for index, section in enumerate(self.layout.layout.sections):
                self.memory.part(index, block)[:] = data[at : at + section.bytes]
                at += section.bytes

    def block(self, block: int) -> bytes:
        """A block's sections, one after the other."""
        return b"".join(self.memory.part(s, block) for s in range(len(self.layout.layout.sections)))

    def untouched(self, first: int, end: int) -> bool:
        """Is everything but the blocks `first` to `end`, with their parity and what is noted of
        them, as it was in the beginning?"""
        is_written = np.zeros(len(self.area), np.bool_)
        for index, section in enumerate(self.layout.layout.sections):
            start = self.layout.place(index, first)
            is_written[start : start + (end - first) * section.bytes] = True
        if self.layout.code is not None:
            is_written[slice(*self.layout.parity_range(first, end))] = True
            is_written[self.layout.losses_offset :] = True
        return bool((self.area[~is_written] == FILL).all())


def blocks_of(layout: BlockLayout, count: int, *, seed: int, tenant: str) -> RandomBlocks:
    """A chain of random blocks of a layout."""
    return RandomBlocks(
        count, block_bytes=layout.block_bytes, seed=seed, tenant=tenant, layout=layout
    )
