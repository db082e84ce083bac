"""Pools of more bytes than 32 bits count, also in words: a card has room for hundreds of thousands
of blocks."""

import re
from random import Random

import pytest
import torch

from kernels.gpu import block_sections, gf256, xxh3
from kernels.gpu.compiler import Program, lower_to_cuda
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES
from tests.kernels.gpu.test_gf256 import make_case

BLOCK_BYTES, SHARD_BYTES = 113_920, 11_392
SECTION_BYTES, OFFSET = 22_784, 45_568
LARGE_BLOCKS = 190_000
"""21.6 GB: more than 2^31 words of 8 bytes."""

BLOCK_TIMES_BYTES = re.compile(
    r"\(\(int64_t\)(row|block_ids\[.*?\])\) \* \(int64_t\)\d"  # combine, hash
    r"|block_id\[\w+\] \* \(int64_t\)\d"  # copy: an array of int64
)
"""The number of a block, times what a block has."""

ROWS_OF = {
    "copy": (block_sections.make_program(True, 16, SECTION_BYTES, BLOCK_BYTES, "int32", 4), "pool"),
    "gather": (
        block_sections.make_program(False, 16, SECTION_BYTES, BLOCK_BYTES, "int32", 4),
        "pool",
    ),
    "combine": (gf256.combine_program(10, 2, SHARD_BYTES), "pool"),
    "hash": (xxh3.hash_program(SHARD_BYTES, 10, 2), "rows"),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ROWS_OF)
def test_places_in_a_pool_are_counted_in_64_bits(name: str, architecture: str) -> None:
    program: Program
    program, pool = ROWS_OF[name]
    source = lower_to_cuda(program, architecture)
    body = source[source.index("__global__ void __launch_bounds__") :]
    places = re.findall(rf"\({pool} \+ (.*?)\)\)?(?: =|;)", body)
    assert places
    assert [place for place in places if not BLOCK_TIMES_BYTES.search(place)] == []


@pytest.fixture
def large_pool() -> torch.Tensor:
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < (LARGE_BLOCKS + 1000) * BLOCK_BYTES:
        pytest.skip(f"{free_bytes} bytes of the GPU are free, too few for a large pool")
    return torch.empty((LARGE_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_sections_at_the_far_end_of_a_large_pool_are_copied(large_pool: torch.Tensor) -> None:
    ids = torch.tensor([LARGE_BLOCKS - 1, LARGE_BLOCKS - 3], dtype=torch.int32, device="cuda")
    large_pool[-4:] = 0
    rows = torch.randint(0, 256, (2, SECTION_BYTES), dtype=torch.uint8, device="cuda")
    block_sections.scatter_block_sections(rows, large_pool, ids, OFFSET)
    found = torch.zeros_like(rows)
    block_sections.gather_block_sections(large_pool, ids, OFFSET, found)
    assert torch.equal(found, rows)
    for block, row in ((-1, rows[0]), (-2, None), (-3, rows[1]), (-4, None)):
        expected = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        if row is not None:
            expected[OFFSET : OFFSET + SECTION_BYTES] = row
        assert torch.equal(large_pool[block], expected), block


@pytest.mark.gpu
def test_shards_at_the_far_end_of_a_large_pool_are_made_and_hashed(
    large_pool: torch.Tensor, rng: Random
) -> None:
    case = make_case([(3,), (0, 9)], rng, 10, 2, SHARD_BYTES)
    pool, parity, ids, recipes = (tensor.cuda() for tensor in case.arguments)
    first = LARGE_BLOCKS - len(pool)
    large_pool[first:] = pool
    there = parity.clone()
    gf256.combine_shards(large_pool, there, ids + first, recipes)
    case.check(large_pool[first:].cpu(), there.cpu())
    shards = torch.tensor([[3, -1], [0, 9]], dtype=torch.int32, device="cuda")
    gf256.combine_shards(pool, parity, ids, recipes)
    here = xxh3.hash_shards(pool, ids, shards, SHARD_BYTES)
    assert torch.equal(xxh3.hash_shards(large_pool, ids + first, shards, SHARD_BYTES), here)
