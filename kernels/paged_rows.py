"""Rows of a fixed number of bytes that lie in the blocks of a pool."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """Row g of a sequence is row g mod R of the pool's block `block_ids[g // R]`.

    `pages`: uint8 [pool blocks, R, row bytes], a view into the pool, strided or not. `block_ids`:
    int64 [blocks of the sequence].
    """

    pages: torch.Tensor
    block_ids: torch.Tensor

    @property
    def rows_per_block(self) -> int:
        return self.pages.shape[1]

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Bytes [*rows.shape, row bytes] of rows (int64, each 0 or more)."""
        return self.pages[self.block_ids[rows // self.rows_per_block], rows % self.rows_per_block]

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Put `rows` (uint8 [n, row bytes]) at rows first .. first + n - 1."""
        index = torch.arange(first, first + len(rows), device=rows.device)
        block_ids = self.block_ids[index // self.rows_per_block]
        self.pages[block_ids, index % self.rows_per_block] = rows
