"""The code itself, with whatever back end this process uses."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Sequence
from itertools import combinations
from multiprocessing.shared_memory import SharedMemory
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from erasure.buffers import addresses_of, shard_addresses
from erasure.code import DECODE_TABLES_MAX, SHARDS_MAX, Code
from erasure.errors import (
    AddressTableError,
    BufferAccessError,
    BufferCountError,
    BufferLengthError,
    BufferOverlapError,
    CodeShapeError,
    ShardLengthError,
    ShardSelectionError,
)
from erasure.matrix import multiply
from tests.erasure import schoolbook

# What the annotations forbid and the checks must catch.
Misfit: TypeAlias = Any


def stripe(code: Code, blocks: int, shard_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random blocks with their parity: uint8 (blocks, k + m, shard_bytes)."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (blocks, code.k * shard_bytes), dtype=np.uint8)
    parity = np.full((blocks, code.m * shard_bytes), 0xEE, np.uint8)
    code.encode(data, parity, shard_bytes=shard_bytes)
    return np.concatenate([data, parity], axis=1).reshape(blocks, code.k + code.m, shard_bytes)


def reconstructed(
    code: Code, shards: NDArray[np.uint8], missing: Sequence[int], available: Sequence[int]
) -> NDArray[np.uint8]:
    """What `reconstruct` makes of the available shards: (blocks, len(missing), shard_bytes)."""
    blocks, _, shard_bytes = shards.shape
    targets = np.full((blocks, len(missing), shard_bytes), 0xDD, np.uint8)
    sources = [[block[j] for j in available] for block in shards]
    code.reconstruct(missing, available, sources, list(targets), shard_bytes=shard_bytes)
    return targets


# -- what it computes ------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 31), (2, 1), (4, 2), (10, 2), (20, 12)])
@pytest.mark.parametrize("shard_bytes", [1, 7, 64, 65])
def test_parity_equals_the_schoolbook(k: int, m: int, shard_bytes: int) -> None:
    shards = stripe(Code(k, m), 1, shard_bytes)[0]
    data = [shard.tobytes() for shard in shards[:k]]
    assert [shard.tobytes() for shard in shards[k:]] == schoolbook.encode(data, m)


def test_all_66_double_losses_of_10_plus_2_come_back() -> None:
    code = Code(10, 2)
    shards = stripe(code, 2, 11_392)
    for lost in combinations(range(12), 2):
        left = [j for j in range(12) if j not in lost]
        assert np.array_equal(reconstructed(code, shards, lost, left), shards[:, lost]), lost


def test_all_single_losses_of_10_plus_2_come_back_from_any_10_of_the_11_left() -> None:
    code = Code(10, 2)
    shards = stripe(code, 1, 129)
    for lost, unused in ((a, b) for a in range(12) for b in range(12) if a != b):
        left = [j for j in range(12) if j not in (lost, unused)]
        assert np.array_equal(reconstructed(code, shards, [lost], left), shards[:, [lost]])


codes = st.integers(1, SHARDS_MAX).flatmap(
    lambda k: st.tuples(st.just(k), st.integers(0, SHARDS_MAX - k))
)


@given(codes, st.integers(0, 3), st.integers(1, 700), st.integers(0, 2**32), st.randoms())
def test_any_shards_come_back_from_any_k_others(
    shape: tuple[int, int], blocks: int, shard_bytes: int, seed: int, rng: random.Random
) -> None:
    k, m = shape
    code = Code(k, m)
    shards = stripe(code, blocks, shard_bytes, seed)
    order = rng.sample(range(k + m), k + m)
    available, rest = order[:k], order[k:]
    missing = rest[: rng.randint(0, m)]
    made = reconstructed(code, shards, missing, available)
    assert np.array_equal(made, shards[:, missing])


@settings(max_examples=40)
@given(st.integers(1, 300), st.lists(st.integers(0, 70), min_size=12, max_size=12))
def test_shards_may_lie_at_any_address(shard_bytes: int, gaps: list[int]) -> None:
    code = Code(10, 2)
    shards = stripe(code, 1, shard_bytes)[0]
    room = np.full(sum(gaps) + 12 * shard_bytes + 1, 0xBB, np.uint8)
    starts = np.cumsum([gap + shard_bytes for gap in gaps]) - shard_bytes
    left = list(range(2, 12))
    for j in left:
        room[starts[j] : starts[j] + shard_bytes] = shards[j]
    expected = room.copy()
    for j in (0, 1):
        expected[starts[j] : starts[j] + shard_bytes] = shards[j]
    table = (room.ctypes.data + starts).astype(np.uintp)[None, :]
    code.reconstruct_at([0, 1], left, table[:, 2:], table[:, :2], shard_bytes=shard_bytes)
    assert np.array_equal(room, expected)


def test_parity_of_the_1_plus_1_code_is_a_copy() -> None:
    shards = stripe(Code(1, 1), 3, 333)
    assert np.array_equal(shards[:, 0], shards[:, 1])


def test_order_of_missing_and_available_does_not_matter() -> None:
    code = Code(6, 3)
    shards = stripe(code, 2, 100)
    rng = random.Random(4)
    for _ in range(20):
        missing, available = rng.sample([0, 4, 7], 3), rng.sample([1, 2, 3, 5, 6, 8], 6)
        made = reconstructed(code, shards, missing, available)
        assert np.array_equal(made, shards[:, missing])
    assert code.decode_table_count == 1


def test_long_batch_equals_its_blocks_one_by_one() -> None:
    code = Code(10, 2)
    batch = stripe(code, 300, 70)
    for block in batch[::37]:
        parity = bytearray(140)
        code.encode([block[:10].tobytes()], [parity], shard_bytes=70)
        assert parity == block[10:].tobytes()


# -- buffers -------------------------------------------------------------------------------


REGIONS: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "numpy": lambda size: np.zeros(size, np.uint8),
    "mmap": lambda size: mmap.mmap(-1, size),
}


def encode_and_reconstruct_inside(region: memoryview) -> None:
    """Encode a 4+2 block that lies in a region, lose two shards of it, and have them back."""
    code, shard_bytes = Code(4, 2), 1_031
    expected = stripe(code, 1, shard_bytes)[0].tobytes()
    places = [region[j * shard_bytes : (j + 1) * shard_bytes] for j in range(6)]
    region[: 4 * shard_bytes] = expected[: 4 * shard_bytes]
    code.encode([region[: 4 * shard_bytes]], [region[4 * shard_bytes :]], shard_bytes=shard_bytes)
    assert region == expected
    lost, left = [0, 3], [1, 2, 4, 5]
    for j in lost:
        places[j][:] = bytes(shard_bytes)
    sources, targets = [places[j] for j in left], [places[j] for j in lost]
    code.reconstruct(lost, left, [sources], [targets], shard_bytes=shard_bytes)
    assert region == expected


@pytest.mark.parametrize("kind", REGIONS)
def test_code_works_in_place_on_any_writable_buffer(kind: str) -> None:
    encode_and_reconstruct_inside(memoryview(REGIONS[kind](6 * 1_031)))


def test_code_works_in_place_on_shared_memory() -> None:
    # Closing it would fail if a buffer were still held.
    shared = SharedMemory(create=True, size=6 * 1_031)
    assert shared.buf is not None
    try:
        with shared.buf[: 6 * 1_031] as region:
            encode_and_reconstruct_inside(region)
    finally:
        shared.close()
        shared.unlink()


def test_encode_reads_bytes() -> None:
    code = Code(4, 2)
    expected = stripe(code, 1, 77)[0]
    parity = bytearray(2 * 77)
    code.encode([expected[:4].tobytes()], [parity], shard_bytes=77)
    assert parity == expected[4:].tobytes()


def test_bytes_beyond_the_shards_stay_as_they_are() -> None:
    code = Code(2, 1)
    parity = bytearray(b"\xaa" * 10)
    code.encode([bytes(20)], [parity], shard_bytes=7)
    assert parity == bytes(7) + b"\xaa" * 3


def test_buffers_are_free_again_after_the_call() -> None:
    code = Code(2, 1)
    block, parity = bytearray(range(20)), bytearray(10)
    code.encode([block], [parity], shard_bytes=10)
    block.append(1)
    parity.append(1)
    assert (len(block), len(parity)) == (21, 11)


def test_blocks_may_share_memory_that_is_only_read() -> None:
    code = Code(2, 1)
    block = bytes(range(20))
    parity = [bytearray(10), bytearray(10)]
    code.encode([block, block], parity, shard_bytes=10)
    assert parity[0] == parity[1] != bytearray(10)


# -- address tables ------------------------------------------------------------------------


def test_address_tables_need_not_be_contiguous() -> None:
    code, shard_bytes = Code(3, 2), 50
    shards = stripe(code, 4, shard_bytes)
    flat = shards.reshape(4, -1)
    with addresses_of(flat, writable=True) as held:
        table = shard_addresses(held.addresses, 5, shard_bytes=shard_bytes)
        expected = shards.copy()
        shards[:, 3:] = 0
        code.encode_at(table[:, :3], table[:, 3:], shard_bytes=shard_bytes)
        assert np.array_equal(shards, expected)
        shards[:, [0, 4]] = 0
        code.reconstruct_at(
            [0, 4], [1, 2, 3], table[:, 1:4], table[:, ::4], shard_bytes=shard_bytes
        )
        assert np.array_equal(shards, expected)


def test_address_tables_out_of_shape_are_named() -> None:
    code = Code(3, 2)
    good, made = np.ones((4, 3), np.uintp), np.ones((4, 2), np.uintp)
    with pytest.raises(AddressTableError, match=r"data_addresses: given uint64 of shape \(4, 2\)"):
        code.encode_at(made, made, shard_bytes=1)
    with pytest.raises(AddressTableError, match=r"parity_addresses.*expected.*\(4, 2\)"):
        code.encode_at(good, made[:3], shard_bytes=1)
    with pytest.raises(AddressTableError, match="source_addresses"):
        code.reconstruct_at([0], [1, 2, 3], made, made, shard_bytes=1)
    with pytest.raises(AddressTableError, match=r"target_addresses.*expected.*\(4, 1\)"):
        code.reconstruct_at([0], [1, 2, 3], good, made, shard_bytes=1)
    with pytest.raises(AddressTableError, match="null address"):
        code.encode_at(good * 0, made, shard_bytes=1)


# -- nothing to do -------------------------------------------------------------------------


def test_nothing_happens_when_there_are_no_blocks() -> None:
    code = Code(10, 2)
    code.encode([], [], shard_bytes=64)
    code.reconstruct([0], range(1, 11), [], [], shard_bytes=64)
    empty = np.zeros((0, 10), np.uintp)
    code.encode_at(empty, np.zeros((0, 2), np.uintp), shard_bytes=64)
    code.reconstruct_at([0], range(1, 11), empty, np.zeros((0, 1), np.uintp), shard_bytes=64)


def test_nothing_happens_when_there_is_no_parity() -> None:
    code = Code(3, 0)
    data = np.arange(60, dtype=np.uint8).reshape(2, 30)
    code.encode(data, [b"", b""], shard_bytes=10)
    assert data.ravel().tolist() == list(range(60))
    code.encode_at(np.ones((2, 3), np.uintp), np.ones((2, 0), np.uintp), shard_bytes=10)


def test_nothing_happens_when_nothing_is_missing() -> None:
    code = Code(2, 1)
    shards = np.arange(4, dtype=np.uint8).reshape(1, 2, 2)
    code.reconstruct([], [0, 2], list(shards), [[]], shard_bytes=2)
    # No address is looked at: these are none.
    code.reconstruct_at(
        [], [0, 2], np.ones((1, 2), np.uintp), np.ones((1, 0), np.uintp), shard_bytes=2
    )
    assert shards.tolist() == [[[0, 1], [2, 3]]]


def test_coefficients_are_those_that_reconstruct_multiplies_with() -> None:
    code, missing, available = Code(4, 2), [5, 1], [4, 0, 3, 2]
    rows = code.coefficients(missing, available)
    data = np.arange(4 * 16, dtype=np.uint8).reshape(4, 16)
    parity = np.zeros((2, 16), np.uint8)
    code.encode(data[None], parity[None], shard_bytes=16)
    shards = np.concatenate([data, parity])
    assert rows.shape == (2, 4)
    assert np.array_equal(multiply(rows, shards[available]), shards[missing])


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "m"), [(0, 2), (-1, 2), (1, -1), (33, 0), (31, 2), (1, 32), (2.0, 1), ("4", 2), (4, None)]
)
def test_code_is_refused_when_its_shape_is_impossible(k: Misfit, m: Misfit) -> None:
    with pytest.raises(CodeShapeError, match=r"expected ints with 1 <= k, 0 <= m, k \+ m <= 32"):
        Code(k, m)


@pytest.mark.parametrize(
    ("missing", "available", "message"),
    [
        ([0], [1], "available: given .*, expected exactly 3"),
        ([0], [1, 2, 3, 4], "available: given .*, expected exactly 3"),
        ([0], [1, 2, 2], "available: given .*, expected different shard indices from 0 to 4"),
        ([0], [1, 2, 5], "available: given .*, expected different shard indices from 0 to 4"),
        ([0], [-1, 2, 3], "available: given .*, expected different shard indices from 0 to 4"),
        ([5], [1, 2, 3], "missing: given .*, expected different shard indices from 0 to 4"),
        ([0, 0], [1, 2, 3], "missing: given .*, expected different shard indices"),
        ([0, 1], [1, 2, 3], r"missing: .*none of the available ones, but \[1\] are"),
        ([0.0], [1, 2, 3], "missing: given .*, expected a sequence of shard indices"),
        ([0], ["1", 2, 3], "available: given .*, expected a sequence of shard indices"),
        ([0], 3, "available: given 3, expected a sequence of shard indices"),
    ],
)
def test_reconstruct_names_the_selection_when_it_is_impossible(
    missing: Misfit, available: Misfit, message: str
) -> None:
    code = Code(3, 2)
    table = np.ones((1, 3), np.uintp)
    for _ in range(2):  # a refused selection must not be remembered as a good one
        with pytest.raises(ShardSelectionError, match=message):
            code.reconstruct_at(missing, available, table, table[:, :1], shard_bytes=1)
        with pytest.raises(ShardSelectionError, match=message):
            code.reconstruct(missing, available, [[b"1"] * 3], [[bytearray(1)]], shard_bytes=1)
        with pytest.raises(ShardSelectionError, match=message):
            code.coefficients(missing, available)
    assert code.decode_table_count == 0


def test_numbers_of_buffers_that_do_not_fit_are_named() -> None:
    code = Code(2, 1)
    block, place = bytes(20), bytearray(10)
    with pytest.raises(BufferCountError, match="parity: given 2 buffers, expected 1, as blocks"):
        code.encode([block], [place, bytearray(10)], shard_bytes=10)
    with pytest.raises(BufferCountError, match="targets: given 2 blocks, expected 1"):
        code.reconstruct([0], [1, 2], [[block, block]], [[place], [place]], shard_bytes=10)
    with pytest.raises(BufferCountError, match=r"sources\[1\]: given 1 buffers, expected 2"):
        code.reconstruct([0], [1, 2], [[block, block], [block]], [[place], [place]], shard_bytes=10)
    with pytest.raises(BufferCountError, match=r"targets\[0\]: given 2 buffers, expected 1"):
        code.reconstruct([0], [1, 2], [[block, block]], [[place, place]], shard_bytes=10)


def test_buffers_that_do_not_serve_are_named_with_block_and_shard() -> None:
    code = Code(2, 1)
    block, place = bytes(20), bytearray(10)
    with pytest.raises(BufferLengthError, match=r"blocks\[1\].*given 19 bytes.*at least 20"):
        code.encode([block, block[1:]], [place, bytearray(10)], shard_bytes=10)
    with pytest.raises(BufferLengthError, match=r"parity\[0\].*given 9 bytes.*at least 10"):
        code.encode([block], [bytearray(9)], shard_bytes=10)
    with pytest.raises(BufferAccessError, match=r"parity\[0\].*given bytes.*writable"):
        code.encode([block], [bytes(10)], shard_bytes=10)
    with pytest.raises(BufferAccessError, match=r"blocks\[0\].*given memoryview.*contiguous"):
        code.encode([memoryview(bytes(40))[::2]], [place], shard_bytes=10)
    with pytest.raises(BufferLengthError, match=r"sources\[1\]\[0\]"):
        code.reconstruct(
            [0],
            [1, 2],
            [[block, block], [b"short", block]],
            [[place], [bytearray(10)]],
            shard_bytes=10,
        )
    with pytest.raises(BufferAccessError, match=r"targets\[1\]\[0\]"):
        code.reconstruct([0], [1, 2], [[block, block]] * 2, [[place], [bytes(10)]], shard_bytes=10)


def test_targets_that_overlap_are_refused_before_anything_is_written() -> None:
    code = Code(2, 2)
    region = bytearray(range(60))
    view, before = memoryview(region), bytes(region)
    with pytest.raises(BufferOverlapError, match="source 0"):
        code.encode([view[:20]], [view[19:39]], shard_bytes=10)
    with pytest.raises(BufferOverlapError, match="targets overlap each other"):
        code.encode([bytes(20), bytes(20)], [view[:20], view[10:30]], shard_bytes=10)
    with pytest.raises(BufferOverlapError, match="source 1"):
        code.reconstruct([0], [1, 2], [[view[20:30], view[5:15]]], [[view[:10]]], shard_bytes=10)
    assert region == before
    # Neighbours are not overlaps.
    code.encode([view[:20]], [view[20:40]], shard_bytes=10)


@pytest.mark.parametrize("shard_bytes", [0, -64, 1.5, None])
def test_shard_length_that_is_no_positive_int_is_named(shard_bytes: Misfit) -> None:
    code = Code(2, 1)
    table = np.ones((1, 3), np.uintp)
    calls: list[Callable[[], None]] = [
        lambda: code.encode([], [], shard_bytes=shard_bytes),
        lambda: code.encode_at(table[:, :2], table[:, :1], shard_bytes=shard_bytes),
        lambda: code.reconstruct([0], [1, 2], [], [], shard_bytes=shard_bytes),
        lambda: code.reconstruct_at(
            [0], [1, 2], table[:, :2], table[:, :1], shard_bytes=shard_bytes
        ),
    ]
    for call in calls:
        with pytest.raises(ShardLengthError, match="expected a positive int"):
            call()


# -- decode tables -----------------------------------------------------------------------------


def test_decode_tables_are_made_once_a_pattern() -> None:
    code = Code(10, 2)
    shards = stripe(code, 1, 64)
    for _ in range(3):
        for lost in combinations(range(12), 2):
            reconstructed(code, shards, lost, [j for j in range(12) if j not in lost])
    assert code.decode_table_count == 66


def test_decode_tables_are_bounded_and_right_when_made_again() -> None:
    code = Code(8, 4)
    shards = stripe(code, 1, 16)
    patterns = list(combinations(range(12), 4))
    assert len(patterns) > DECODE_TABLES_MAX
    for lost in [*patterns, *patterns[:5]]:
        left = [j for j in range(12) if j not in lost]
        assert np.array_equal(reconstructed(code, shards, lost, left), shards[:, lost])
        assert code.decode_table_count <= DECODE_TABLES_MAX
    assert code.decode_table_count == DECODE_TABLES_MAX


def test_code_serves_many_threads_at_once() -> None:
    code = Code(10, 2)
    shards = stripe(code, 3, 4_096)
    failures: list[tuple[int, ...]] = []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        patterns = list(combinations(range(12), 2))
        random.Random(seed).shuffle(patterns)
        barrier.wait(timeout=30)
        for lost in patterns:
            left = [j for j in range(12) if j not in lost]
            if not np.array_equal(reconstructed(code, shards, lost, left), shards[:, lost]):
                failures.append(lost)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_code_tells_its_shape_and_back_end() -> None:
    code = Code(10, 2)
    assert (code.k, code.m) == (10, 2)
    assert repr(code) == f"Code(10, 2, {code.multiplier.name})"
