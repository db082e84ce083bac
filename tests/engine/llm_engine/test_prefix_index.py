"""Blocks are found by their keys until the pool hands them out anew; windows within a bound."""

import torch

from engine.block_pool import BlockPool
from engine.prefix_index import PrefixIndex
from engine.window_record import WindowRecord
from engine.window_snapshots import WindowSnapshots

A, B, C = b"a", b"b", b"c"


def test_block_is_found_while_it_is_used_and_after() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=3)
    index = PrefixIndex(pool)
    block_ids = pool.allocate(2)
    for key, block_id in zip((A, B), block_ids, strict=True):
        index.add(key, block_id)
    assert index.count([A, B, C]) == 2
    assert index.count_free([A, B]) == 0
    pool.release(block_ids[1:])
    assert index.count_free([A, B]) == 1
    assert index.take([A, B]) == block_ids
    assert pool.free_blocks == 1


def test_chain_is_found_up_to_its_first_gap() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=3)
    index = PrefixIndex(pool)
    first, second = pool.allocate(2)
    index.add(A, first)
    index.add(C, second)
    assert index.count([A, B, C]) == 1


def test_block_that_was_handed_out_anew_is_not_found() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=1)
    index = PrefixIndex(pool)
    for key in (A, B, A):
        (block_id,) = pool.allocate(1)
        assert index.count([A]) == index.count([B]) == 0
        index.add(key, block_id)
        assert index.count([key]) == 1
        pool.release([block_id])
    assert len(index) == 1


def test_key_stays_with_its_first_block_while_that_is_there() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=2)
    index = PrefixIndex(pool)
    first, second = pool.allocate(2)
    index.add(A, first)
    index.add(A, second)
    assert index.take([A]) == [first]
    pool.release([first, first])
    # The other one was not kept, so it goes first; then the one that was.
    pool.release([second])
    assert pool.allocate(2) == [second, first]
    index.add(A, second)
    assert index.take([A]) == [second]


def test_snapshot_that_was_used_longest_ago_goes_first() -> None:
    snapshots = WindowSnapshots(2)
    records = {key: WindowRecord(torch.zeros(1, dtype=torch.uint8)) for key in (A, B, C)}
    snapshots.put(A, records[A])
    snapshots.put(B, records[B])
    assert snapshots.get(A) is records[A]
    snapshots.put(C, records[C])
    assert (A in snapshots, B in snapshots, len(snapshots)) == (True, False, 2)
    assert snapshots.get(B) is None
