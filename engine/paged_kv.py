"""One sequence's KV cache, scattered over the blocks of a pool: write a few tokens, read them all.

The model's view of the pool. Which blocks a sequence has is decided by whoever allocates them.
"""

import torch

from kvstore.layout import BLOCK_TOKENS

from .block_pool import BlockPool
from .layout import KVGeometry


def kv_view(pool: BlockPool, geometry: KVGeometry) -> torch.Tensor:
    """The pool as numbers: bfloat16 [block, layer, K or V, kv head, token, dim], a view."""
    assert pool.block_bytes == geometry.block_bytes, (pool.block_bytes, geometry)
    return pool.memory.view(torch.bfloat16).view(
        pool.capacity_blocks, geometry.layers, 2, geometry.kv_heads, BLOCK_TOKENS, geometry.head_dim
    )


class GatherBuffer:
    """Memory in which blocks of one layer are brought together for attention.

    One is enough for an engine that runs one sequence at a time. It is used again for every layer,
    so it stays in the CPU cache; a fresh allocation each time costs more than the copy.
    """

    def __init__(self, geometry: KVGeometry, *, blocks_max: int) -> None:
        rows = 2 * geometry.kv_heads * blocks_max
        row_numbers = BLOCK_TOKENS * geometry.head_dim
        self.geometry = geometry
        self.blocks_max = blocks_max
        self.rows = torch.empty(rows, row_numbers, dtype=torch.bfloat16)
        # float32 compute needs a second buffer; its pages are never touched otherwise.
        self.float_rows = torch.empty(rows, row_numbers, dtype=torch.float32)


class PagedKV:
    """KV cache of one sequence whose block i lies in pool block `block_ids[i]`.

    Reads always gather, even if the blocks happen to be neighbours: shapes and strides that depend
    on where blocks lie would let the same prompt take different paths through the kernels.
    """

    def __init__(self, pool: BlockPool, block_ids: list[int], buffer: GatherBuffer) -> None:
        assert len(block_ids) <= buffer.blocks_max, (len(block_ids), buffer.blocks_max)
        geometry = buffer.geometry
        self._geometry = geometry
        self._kv = kv_view(pool, geometry)
        self._rows = self._kv.view(-1, BLOCK_TOKENS * geometry.head_dim)
        self._block_ids = block_ids
        self._buffer = buffer
        # Row of the pool that holds [K or V][kv head][block of the sequence], layer 0.
        self._layer_rows = 2 * geometry.kv_heads
        block_rows = torch.tensor(block_ids) * (geometry.layers * self._layer_rows)
        self._row_index = torch.arange(self._layer_rows).unsqueeze(1) + block_rows

    def write(self, layer: int, start: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Store K and V of T tokens of one block from position `start` on, rounded to bfloat16."""
        block, offset = divmod(start, BLOCK_TOKENS)
        end = offset + len(k_TKD)
        assert end <= BLOCK_TOKENS, (
            f"tokens {start} to {start + len(k_TKD) - 1} cross a block border"
        )
        target = self._kv[self._block_ids[block], layer]
        target[0, :, offset:end].copy_(k_TKD.transpose(0, 1))
        target[1, :, offset:end].copy_(v_TKD.transpose(0, 1))

    def read(self, layer: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of positions 0 .. end - 1, each [K, N, D]; valid until the next read."""
        blocks = -(-end // BLOCK_TOKENS)
        index = (self._row_index[:, :blocks] + layer * self._layer_rows).reshape(-1)
        gathered = self._buffer.rows[: len(index)]
        torch.index_select(self._rows, 0, index, out=gathered)
        if dtype != torch.bfloat16:
            gathered = self._buffer.float_rows[: len(index)].copy_(gathered)
        shape = (2, self._geometry.kv_heads, blocks * BLOCK_TOKENS, self._geometry.head_dim)
        k_KND, v_KND = gathered.view(shape)[:, :, :end].unbind(0)
        return k_KND, v_KND


def open_block_of(pool: BlockPool, geometry: KVGeometry, block_id: int, tokens: int) -> bytes:
    """The bytes of a block with `tokens` tokens in it, zero where none of theirs stand."""
    copy = torch.zeros_like(kv_view(pool, geometry)[block_id])
    copy[..., :tokens, :] = kv_view(pool, geometry)[block_id, ..., :tokens, :]
    return copy.view(torch.uint8).numpy().tobytes()
