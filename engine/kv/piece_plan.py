"""How a section is cut into pieces on its way through staging buffers. Pure.

A piece is one DMA between the arena and a staging buffer, and a kernel between the buffer and the
pool; while one piece's kernel runs, the next one's DMA does. What is left uncovered is the kernel
at the end of a load (or at the beginning of a save).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks first .. end - 1 of a part."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingShape:
    """Sizes of the staged way; those that were best in the measurement of
    docs/decisions/0037-swap-in-on-a-gpu.md."""

    piece_bytes: int = 16 << 20
    """Of a staging buffer."""
    kernel_blocks: int | None = None
    """Blocks of threads of a kernel in the memory of the device, for some microseconds. None: one
    for each multiprocessor; with fewer the last kernel of a load is longer."""

    def count_kernel_blocks(self, multiprocessors: int) -> int:
        """Those of a kernel, on a device that has so many."""
        return multiprocessors if self.kernel_blocks is None else self.kernel_blocks


def plan_pieces(blocks: int, width: int, shape: StagingShape) -> list[Piece]:
    """Pieces of a section of `width` bytes a block, in the order in which they are to be started:
    as few as fit into a buffer, since the bus stands still for some 3 us between two."""
    step = max(1, shape.piece_bytes // width)
    return [Piece(at, min(at + step, blocks)) for at in range(0, blocks, step)]
