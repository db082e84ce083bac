"""A sequence reads back what it wrote, wherever its blocks lie in the pool."""

import pytest
import torch

from engine.block_pool import BlockPool
from engine.layout import KVGeometry
from engine.paged_kv import GatherBuffer, PagedKV, kv_view

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8)


def make_kv(pool: BlockPool, block_ids: list[int]) -> PagedKV:
    return PagedKV(pool, block_ids, GatherBuffer(GEOMETRY, blocks_max=4))


def random_kv(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, GEOMETRY.layers, tokens, 2, 8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [1, 127, 128, 129, 300])
def test_paged_kv_reads_what_was_written_over_scattered_blocks(
    dtype: torch.dtype, end: int
) -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=7)
    kv = make_kv(pool, [5, 0, 3])
    written = random_kv(end, seed=end)
    for start in range(0, end, 32):
        stop = min(start + 32, end)
        for layer in range(GEOMETRY.layers):
            kv.write(layer, start, written[0, layer, start:stop], written[1, layer, start:stop])
    for layer in range(GEOMETRY.layers):
        k_KND, v_KND = kv.read(layer, end, dtype)
        for read, original in ((k_KND, written[0, layer]), (v_KND, written[1, layer])):
            assert read.dtype == dtype
            assert torch.equal(read.float(), original.bfloat16().float().transpose(0, 1))


def test_paged_kv_leaves_other_blocks_alone() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=3)
    kv = kv_view(pool, GEOMETRY)
    make_kv(pool, [1]).write(1, 4, torch.ones(3, 2, 8), torch.ones(3, 2, 8))
    assert kv[[0, 2]].float().abs().sum() == 0
    assert kv[1, 0].float().abs().sum() == 0
    assert kv[1, 1].float().sum() == 2 * 3 * 2 * 8


def test_paged_kv_refuses_a_write_across_a_block_border() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=2)
    with pytest.raises(AssertionError, match="tokens 127 to 128 cross a block border"):
        make_kv(pool, [0, 1]).write(0, 127, torch.ones(2, 2, 8), torch.ones(2, 2, 8))
