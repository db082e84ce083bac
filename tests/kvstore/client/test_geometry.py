"""Where shards lie: inside the block, or in scratch memory behind its end."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.client.geometry import Batch, ShardGeometry


class Memory:
    """A batch in memory of its own, scratch filled with a pattern that is no zero."""

    def __init__(self, geometry: ShardGeometry, count: int) -> None:
        rng = np.random.default_rng(1)
        shape = (count, geometry.block_bytes)
        self.blocks: NDArray[np.uint8] = rng.integers(1, 256, shape, np.uint8)
        self.scratch = np.full(max(count * geometry.scratch_bytes, 1), 0xEE, np.uint8)
        self.batch = Batch(
            geometry,
            blocks=[block.data for block in self.blocks],
            addresses=np.array([block.ctypes.data for block in self.blocks], np.uintp),
            scratch=self.scratch.data,
            scratch_address=self.scratch.ctypes.data,
        )


@pytest.mark.parametrize(
    ("block_bytes", "k", "shard_bytes", "whole", "in_scratch"),
    [
        (12_800, 10, 1280, 10, 2),  # a multiple of k x 64: no tail
        (12_345, 10, 1280, 9, 3),  # the last data shard reaches over the end
        (1024, 10, 128, 8, 4),  # the ninth begins at the very end, so it and the tenth are zeros
        (1025, 12, 128, 8, 6),  # four data shards in scratch, one byte in the first
        (1024, 1, 1024, 1, 2),
        (1025, 1, 1088, 0, 3),  # a block of one shard that is shorter than it
    ],
)
def test_sizes_follow_from_the_block_and_the_code(
    block_bytes: int, k: int, shard_bytes: int, whole: int, in_scratch: int
) -> None:
    geometry = ShardGeometry(block_bytes, k, 2)
    assert geometry.shard_bytes == shard_bytes
    assert geometry.whole_shards == whole
    assert geometry.scratch_shards == in_scratch
    assert geometry.scratch_bytes == in_scratch * shard_bytes


@settings(max_examples=60)
@given(st.integers(1024, 9000), st.integers(1, 16), st.integers(0, 4), st.integers(1, 3))
def test_tails_are_spread_with_zeros_behind_them_and_gathered_back(
    block_bytes: int, k: int, m: int, count: int
) -> None:
    geometry = ShardGeometry(block_bytes, k, m)
    memory = Memory(geometry, count)
    batch, before = memory.batch, memory.blocks.copy()
    batch.spread_tails()
    for row in range(count):
        data = b"".join(batch.shard_view(row, shard) for shard in range(k))
        assert data == before[row].tobytes() + bytes(k * geometry.shard_bytes - block_bytes)
    rest = memory.blocks[:, geometry.whole_shards * geometry.shard_bytes :]
    rest[:] = 0
    for row in range(count):
        batch.gather_tail(row)
    assert np.array_equal(memory.blocks, before)


@settings(max_examples=40)
@given(st.integers(1024, 9000), st.integers(1, 16), st.integers(0, 4), st.integers(1, 3))
def test_views_and_addresses_name_the_same_bytes_and_no_two_shards_overlap(
    block_bytes: int, k: int, m: int, count: int
) -> None:
    memory = Memory(ShardGeometry(block_bytes, k, m), count)
    batch = memory.batch
    ranges = []
    for shard in range(k + m):
        views = batch.shard_views(shard, 0, count)
        assert [len(view) for view in views] == [batch.shard_bytes] * count
        for row, view in enumerate(views):
            address = np.frombuffer(view, np.uint8).ctypes.data
            assert address == batch.shard_addresses[row, shard]
            ranges.append((address, address + batch.shard_bytes))
    ranges.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


def test_a_run_of_blocks_has_the_views_of_each_of_them() -> None:
    batch = Memory(ShardGeometry(12_345, 10, 2), 5).batch
    for shard in (0, 9, 11):
        views = batch.shard_views(shard, 1, 4)
        for view, row in zip(views, range(1, 4), strict=True):
            view[:] = bytes([row]) * len(view)
            assert batch.shard_view(row, shard) == view
