"""Addresses of buffers: which objects serve, what is held, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erasure.buffers import (
    PY_BUFFER,
    addresses_of,
    bytes_at,
    require_disjoint,
    require_shard_bytes,
    require_table,
    shard_addresses,
)
from erasure.errors import (
    AddressTableError,
    BufferAccessError,
    BufferLengthError,
    BufferOverlapError,
    ShardLengthError,
)

CONTENT = bytes(range(100))


# What the annotations forbid and the checks must catch.
Misfit: TypeAlias = Any


def filled(buffer: mmap.mmap) -> mmap.mmap:
    buffer[:100] = CONTENT
    return buffer


WRITABLE: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(CONTENT),
    "memoryview": lambda: memoryview(bytearray(CONTENT)),
    "memoryview slice": lambda: memoryview(bytearray(b"???" + CONTENT))[3:],
    "numpy uint8": lambda: np.frombuffer(CONTENT, np.uint8).copy(),
    "numpy float32, 2-D": lambda: np.frombuffer(CONTENT, np.float32).reshape(5, 5).copy(),
    "mmap": lambda: filled(mmap.mmap(-1, 100)),
    "ctypes array": lambda: (ctypes.c_ubyte * 100).from_buffer_copy(CONTENT),
}
READABLE: dict[str, Callable[[], Any]] = {
    **WRITABLE,
    "bytes": lambda: CONTENT,
    "read-only memoryview": lambda: memoryview(CONTENT),
    "read-only numpy": lambda: np.frombuffer(CONTENT, np.uint8),
}


def test_record_has_the_size_of_a_py_buffer() -> None:
    # Five pointers or sizes, two ints, five pointers: the stable ABI of CPython, 64-bit.
    assert PY_BUFFER.itemsize == 80


@pytest.mark.parametrize("kind", READABLE)
def test_address_leads_to_the_bytes_of_the_buffer(kind: str) -> None:
    buffer = READABLE[kind]()
    with addresses_of([buffer], writable=False) as held:
        assert held.addresses.dtype == np.uintp
        assert held.lengths_bytes.tolist() == [100]
        assert bytes_at(int(held.addresses[0]), 100, writable=False).tobytes() == CONTENT


@pytest.mark.parametrize("kind", WRITABLE)
def test_write_at_the_address_shows_in_the_buffer(kind: str) -> None:
    buffer = WRITABLE[kind]()
    with addresses_of([buffer], writable=True) as held:
        bytes_at(int(held.addresses[0]), 100)[:] = 7
    assert bytes(memoryview(buffer).cast("B")) == bytes([7]) * 100


def test_addresses_follow_the_order_of_the_buffers() -> None:
    region = bytearray(1_000)
    starts = [700, 0, 30, 31]
    with addresses_of([memoryview(region)[s:] for s in starts], writable=True) as held:
        base = int(held.addresses[1])
        assert [int(address) - base for address in held.addresses] == starts
        assert held.lengths_bytes.tolist() == [1_000 - s for s in starts]


def test_rows_of_an_array_serve_as_buffers() -> None:
    array = np.zeros((4, 64), np.uint8)
    with addresses_of(array, writable=True) as held:
        assert held.addresses.tolist() == [array.ctypes.data + 64 * row for row in range(4)]


def test_no_buffers_give_no_addresses() -> None:
    with addresses_of([], writable=True) as held:
        assert held.addresses.shape == (0,)


def test_buffer_cannot_move_until_released() -> None:
    buffer = bytearray(10)
    held = addresses_of([buffer], writable=True)
    with pytest.raises(BufferError):
        buffer.append(1)
    held.release()
    held.release()
    buffer.append(1)


def test_buffer_is_let_go_when_the_hold_is_dropped_without_release() -> None:
    buffer = bytearray(10)
    held = addresses_of([buffer], writable=True)
    del held
    gc.collect()
    buffer.append(1)
    assert len(buffer) == 11


def test_hold_keeps_memory_alive_when_the_caller_drops_it() -> None:
    held = addresses_of([bytearray(b"\t" * 100_000) for _ in range(3)], writable=False)
    gc.collect()
    for address in held.addresses:
        assert (bytes_at(int(address), 100_000) == 9).all()
    held.release()


def test_shared_memory_can_be_closed_after_release() -> None:
    shared = SharedMemory(create=True, size=4_096)
    assert shared.buf is not None
    try:
        with addresses_of([shared.buf], writable=True) as held:
            bytes_at(int(held.addresses[0]), 4_096)[:] = 3
        assert shared.buf[4_095] == 3
    finally:
        shared.close()
        shared.unlink()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (7, "int"),
        ("text", "str"),
        (None, "NoneType"),
        (memoryview(bytearray(20))[::2], "memoryview"),
        (np.zeros((4, 4), np.uint8)[:, 1], "ndarray"),
        (np.zeros((4, 4), np.uint8, order="F"), "ndarray"),
    ],
    ids=["int", "str", "None", "strided memoryview", "array column", "Fortran order"],
)
@pytest.mark.parametrize("writable", [False, True])
def test_object_without_contiguous_bytes_is_named(
    wrong: Misfit, named: str, writable: bool
) -> None:
    good = bytearray(4)
    with pytest.raises(BufferAccessError, match=rf"parity\[1\] cannot be used: given {named} \("):
        addresses_of([good, wrong, good], writable=writable, name="parity")
    good.append(1)  # nothing is held after an error


@pytest.mark.parametrize("kind", sorted(set(READABLE) - set(WRITABLE)))
def test_read_only_buffer_is_named_when_it_must_be_written(kind: str) -> None:
    buffer = READABLE[kind]()
    with pytest.raises(BufferAccessError, match="expected a writable C-contiguous buffer"):
        addresses_of([buffer], writable=True)


def test_short_buffer_is_named_with_both_lengths() -> None:
    good, short = bytearray(10), bytearray(9)
    with pytest.raises(BufferLengthError) as caught:
        addresses_of([good, short, short], writable=True, min_bytes=10, name="blocks")
    assert str(caught.value) == (
        "blocks[1] is too short: given 9 bytes, expected at least 10 bytes"
    )
    good.append(1)
    short.append(1)


def test_many_refusals_leave_no_reference_behind() -> None:
    good = bytearray(10)
    count = 1_000
    for _ in range(count):
        with pytest.raises(BufferAccessError):
            addresses_of([good, 1], writable=True)  # type: ignore[list-item]
    referrers = len([holder for holder in gc.get_referrers(good) if holder is not globals()])
    assert referrers < 10


def test_shard_addresses_are_spaced_by_the_shard_length() -> None:
    table = shard_addresses(np.array([1_000, 5_000], np.uintp), 3, shard_bytes=11)
    assert table.dtype == np.uintp
    assert table.tolist() == [[1_000, 1_011, 1_022], [5_000, 5_011, 5_022]]


@pytest.mark.parametrize("wrong", [0, -1, 1.0, "64", None, np.int64(64)])
def test_shard_length_is_refused_unless_a_positive_int(wrong: Misfit) -> None:
    with pytest.raises(ShardLengthError, match="expected a positive int"):
        require_shard_bytes(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        np.ones((2, 3), np.int64),
        np.ones((2, 3), np.uint32),
        np.ones((3, 2), np.uintp),
        np.ones(6, np.uintp),
        [[1, 2, 3], [4, 5, 6]],
        np.array([[1, 2, 3], [4, 0, 6]], np.uintp),
    ],
    ids=["signed", "narrow", "transposed", "flat", "list", "null address"],
)
def test_address_table_is_refused_unless_in_shape(wrong: Misfit) -> None:
    with pytest.raises(AddressTableError, match="data_addresses: given"):
        require_table("data_addresses", wrong, blocks=2, columns=3)


def test_address_table_is_made_contiguous_and_else_left_alone() -> None:
    table = np.arange(1, 13, dtype=np.uintp).reshape(2, 6)
    assert require_table("t", table, blocks=2, columns=6) is table
    strided = require_table("t", table[:, ::2], blocks=2, columns=3)
    assert strided.flags.c_contiguous
    assert strided.tolist() == [[1, 3, 5], [7, 9, 11]]


intervals = st.lists(st.integers(0, 120), max_size=6)


@given(intervals, st.integers(1, 20), intervals, st.integers(1, 20))
def test_disjointness_is_what_sets_of_bytes_say(
    targets: list[int], target_bytes: int, sources: list[int], source_bytes: int
) -> None:
    written = [set(range(start, start + target_bytes)) for start in targets]
    read: set[int] = set().union(*(range(start, start + source_bytes) for start in sources))
    all_written: set[int] = set().union(*written)
    is_disjoint = len(all_written) == sum(map(len, written)) and not all_written & read
    arguments = (
        np.array(targets, np.uintp),
        target_bytes,
        np.array(sources, np.uintp),
        source_bytes,
    )
    if is_disjoint:
        require_disjoint(*arguments)
    else:
        with pytest.raises(BufferOverlapError):
            require_disjoint(*arguments)
