"""The pool hands out each block once, counts references, and shares bytes without a copy."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.errors import BlockPoolExhausted, InvalidRequest
from engine.layout import KVGeometry
from engine.paged_kv import kv_view

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=16)
CAPACITY_BLOCKS = 5


def test_pool_block_is_one_writable_run_of_the_exact_bytes() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=2)
    (block_id,) = pool.allocate(1)
    buffer = pool.buffer(block_id)
    assert (buffer.nbytes, buffer.format, buffer.ndim) == (GEOMETRY.block_bytes, "B", 1)
    assert buffer.contiguous
    assert not buffer.readonly


def test_pool_buffer_and_tensor_are_the_same_memory() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=3)
    block_ids = pool.allocate(3)
    for block_id in block_ids:
        pool.buffer(block_id)[:] = bytes(GEOMETRY.block_bytes)
    kv = kv_view(pool, GEOMETRY)
    # 0x3F80 is 1.0 in bfloat16, the low byte first.
    pool.buffer(block_ids[1])[-2:] = b"\x80\x3f"
    assert kv[block_ids[1], -1, -1, -1, -1, -1].item() == 1.0
    assert kv.float().sum().item() == 1.0
    kv[block_ids[2], 0, 0, 0, 0, 0] = -2.0
    assert bytes(pool.buffer(block_ids[2])[:2]) == b"\x00\xc0"
    assert kv.dtype == torch.bfloat16


def test_pool_allocates_nothing_when_too_few_blocks_are_free() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=3)
    pool.allocate(2)
    with pytest.raises(BlockPoolExhausted, match="asked for 2 blocks, 1 of 3 free"):
        pool.allocate(2)
    assert pool.free_blocks == 1


def test_pool_keeps_a_block_until_its_last_reference_is_released() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=1)
    block_ids = pool.allocate(1)
    pool.retain(block_ids)
    pool.release(block_ids)
    assert pool.free_blocks == 0
    pool.release(block_ids)
    assert pool.free_blocks == 1


@pytest.mark.parametrize("operation", ["retain", "release"])
def test_pool_refuses_references_to_a_free_block(operation: str) -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=1)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="is free"):
        getattr(pool, operation)(block_ids)


@pytest.mark.parametrize(
    ("block_bytes", "capacity_blocks", "message"),
    [
        (64, 0, "pool blocks: given 0, expected 1 or more"),
        (0, 1, "block bytes: given 0, expected 1 or more"),
        (1 << 20, 1 << 40, "memory of the block pool: given"),
    ],
)
def test_pool_refuses_a_size_that_it_cannot_have(
    block_bytes: int, capacity_blocks: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BlockPool(block_bytes=block_bytes, capacity_blocks=capacity_blocks)


def test_pool_bytes_are_zero_until_they_are_written_and_begin_at_a_cache_line() -> None:
    pool = BlockPool(block_bytes=100, capacity_blocks=300)
    assert pool.memory.shape == (300, 100)
    assert pool.memory.dtype == torch.uint8
    assert not pool.memory.any()
    assert pool.memory.data_ptr() % 64 == 0


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 7))))
def test_pool_agrees_with_a_count_of_references(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=CAPACITY_BLOCKS)
    references: dict[int, int] = {}
    for operation, number in steps:
        if operation == "allocate" and number <= CAPACITY_BLOCKS - len(references):
            block_ids = pool.allocate(number)
            assert len(set(block_ids)) == number
            assert references.keys().isdisjoint(block_ids)
            references |= dict.fromkeys(block_ids, 1)
        elif operation != "allocate" and references:
            block_id = sorted(references)[number % len(references)]
            getattr(pool, operation)([block_id])
            references[block_id] += 1 if operation == "retain" else -1
            references = {key: count for key, count in references.items() if count}
        assert pool.free_blocks == CAPACITY_BLOCKS - len(references)


def test_pool_gives_no_block_to_two_threads() -> None:
    pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=8)

    def use(worker: int) -> int:
        clashes = 0
        for _ in range(300):
            block_ids = pool.allocate(2)
            for block_id in block_ids:
                pool.buffer(block_id)[0] = worker
            clashes += any(pool.buffer(block_id)[0] != worker for block_id in block_ids)
            pool.release(block_ids)
        return clashes

    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(use, range(1, 5))) == [0, 0, 0, 0]
    assert pool.free_blocks == 8


def test_pool_hands_out_kept_blocks_last_and_the_longest_free_one_first() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=4)
    block_ids = pool.allocate(3)
    for block_id in block_ids:
        pool.keep(block_id)
    pool.release(reversed(block_ids))
    assert pool.allocate(4)[1:] == list(reversed(block_ids))


def test_pool_gives_a_kept_block_back_until_it_is_handed_out_anew() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=1)
    (block_id,) = pool.allocate(1)
    kept_as = pool.keep(block_id)
    pool.release([block_id])
    assert pool.is_free(block_id)
    assert pool.take_kept(block_id, kept_as)
    assert pool.take_kept(block_id, kept_as)
    assert (pool.free_blocks, pool.is_free(block_id)) == (0, False)
    pool.release([block_id, block_id])
    pool.allocate(1)
    assert not pool.has_kept(block_id, kept_as)
    assert not pool.take_kept(block_id, kept_as)


def test_pool_tells_when_blocks_become_free() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=2)
    told = []
    pool.on_free = lambda: told.append(pool.free_blocks)
    block_ids = pool.allocate(2)
    pool.retain(block_ids[:1])
    pool.release(block_ids[:1])
    assert told == []
    pool.release(block_ids)
    assert told == [2]
    assert pool.freed_blocks == 2
