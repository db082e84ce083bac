"""The checksum of a section as it stands in a pool, whatever memory that is in."""

from xxhash import xxh3_64

from .block_list import BlockList
from .mover import SectionMover, wait_to_end

LOOK_BYTES = 1 << 20
"""So much is read back at a time: it stays in the cache of the CPU."""


def section_xxh3(mover: SectionMover, width: int, section: int, blocks: BlockList) -> int:
    """xxh3-64 of a section, `width` bytes a block, of the pool's blocks, block after block. Raises
    as the mover's transfers do."""
    digest = xxh3_64()
    step = max(1, LOOK_BYTES // width)
    scratch = memoryview(bytearray(min(step, len(blocks)) * width))
    for first in range(0, len(blocks), step):
        part = blocks.cut(first, min(first + step, len(blocks)))
        seen = scratch[: len(part) * width]
        wait_to_end(mover.from_pool(seen, section, part))
        digest.update(seen)
    return digest.intdigest()
