"""The compressed entries of sequences in the blocks of a pool, as rows to write and to read.

Which blocks a sequence has, and how many of its entries may be seen, is decided elsewhere.
"""

import torch

from engine.block_pool import BlockPool
from kernels.paged_rows import PagedRows
from kernels.reference.index_scores import IndexKeys

from .config import DeepseekV41Config
from .layout import ByteRun, OwnerOffsets, owner_offsets


class BlockCache:
    """A pool seen as entries of each owner layer. Everything it gives is a view into the pool.

    Row g of an owner of ratio r covers tokens g r .. (g + 1) r - 1 of the sequence whose block i
    lies in the pool's block `block_ids[i]` (int64 [blocks]). The pool's blocks may be padded.
    """

    def __init__(self, config: DeepseekV41Config, pool: BlockPool) -> None:
        self.owners = owner_offsets(config)
        self._main = {layer: main_pages(pool, owner) for layer, owner in self.owners.items()}
        self._index = {layer: index_pages(pool, owner) for layer, owner in self.owners.items()}

    def main_entries(self, owner: int, block_ids: torch.Tensor) -> PagedRows:
        """Main entries of an owner layer: rows uint8 of D/2 + D/16 bytes, codes, then scales."""
        return PagedRows(pages=self._main[owner], block_ids=block_ids)

    def index_keys(self, owner: int, block_ids: torch.Tensor) -> IndexKeys:
        """Index keys of an owner layer: `data` rows of J/2 bytes, `scales` rows of J/32 bytes."""
        data, scales = self._index[owner]
        return IndexKeys(
            data=PagedRows(pages=data, block_ids=block_ids),
            scales=PagedRows(pages=scales, block_ids=block_ids),
        )


def main_pages(pool: BlockPool, owner: OwnerOffsets) -> torch.Tensor:
    """Every block's main entries of one owner: uint8 [block, entry, entry bytes], a view."""
    return _pages(pool, owner.main)


def index_pages(pool: BlockPool, owner: OwnerOffsets) -> tuple[torch.Tensor, torch.Tensor]:
    """Every block's index data and index scales of one owner: uint8 [block, entry, bytes] each."""
    return _pages(pool, owner.index_data), _pages(pool, owner.index_scales)


def _pages(pool: BlockPool, run: ByteRun) -> torch.Tensor:
    assert run.end <= pool.block_bytes, (run, pool.block_bytes)
    pages = pool.memory[:, run.offset : run.end]
    return pages.view(pool.capacity_blocks, run.entries, run.row_bytes)
