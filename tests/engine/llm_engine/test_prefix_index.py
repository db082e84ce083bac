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


def test_chain_of_cold_runs_ends_before_the_first_block_that_is_not_known_to_be_of_one() -> None:
    pool = BlockPool(block_bytes=64, capacity_blocks=3)
    index = PrefixIndex(pool)
    for key, block_id in zip((A, B, C), pool.allocate(3), strict=True):
        index.add(key, block_id, is_cold=key != B)
    assert (index.count([A, B, C]), index.count_cold([A, B, C])) == (3, 1)


def test_snapshot_of_a_cold_run_stays_before_others_of_its_key() -> None:
    snapshots = WindowSnapshots(1)
    cold, other = (WindowRecord(torch.zeros(1, dtype=torch.uint8)) for _ in range(2))
    snapshots.put(A, other)
    assert not snapshots.is_cold(A)
    snapshots.put(A, cold, is_cold=True)
    snapshots.put(A, other)
    assert snapshots.get(A) is cold
    assert snapshots.is_cold(A)
    snapshots.put(B, other)
    snapshots.put(A, other)
    assert not snapshots.is_cold(A)
