"""Rows in the blocks of a pool that holds other things too, and a pool that tells what is read."""

from dataclasses import dataclass, field

import torch

from kernels.paged_rows import PagedRows
from kernels.reference.index_entries import quantise_index_entries
from kernels.reference.index_scores import IndexKeys

OTHER_BLOCKS = 3


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRows(PagedRows):
    """Keeps the rows of each call of `read`."""

    reads: list[torch.Tensor] = field(default_factory=list)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        self.reads.append(rows)
        return PagedRows.read(self, rows)


def put_in_pages(
    rows: torch.Tensor, rows_per_block: int, generator: torch.Generator
) -> RecordedRows:
    """Rows (uint8 [n, bytes]) in shuffled blocks; all other bytes of the pool are NaN or junk."""
    count = -(-len(rows) // rows_per_block)
    row_bytes = rows.shape[1]
    # Blocks hold other sections behind these rows, so the pages are a strided view.
    blocks = torch.full(
        (count + OTHER_BLOCKS, rows_per_block * row_bytes + 8), 0xFF, dtype=torch.uint8
    )
    pages = blocks[:, : rows_per_block * row_bytes].view(-1, rows_per_block, row_bytes)
    ids = torch.randperm(count + OTHER_BLOCKS, generator=generator)[:count]
    paged = RecordedRows(pages, ids)
    paged.write(0, rows)
    return paged


def put_keys(keys_GJ: torch.Tensor, rows_per_block: int, generator: torch.Generator) -> IndexKeys:
    data, scales = quantise_index_entries(keys_GJ)
    return IndexKeys(
        put_in_pages(data, rows_per_block, generator),
        put_in_pages(scales, rows_per_block, generator),
    )
