"""Slot geometry, headers, and which headers count as whole."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.slot import (
    HEADER_BYTES,
    SLOT_HEADER,
    SlotGeometry,
    find_whole_headers,
    seal_headers,
)


@given(st.integers(1, 1 << 25))
def test_slot_is_a_payload_and_a_header(payload_bytes: int) -> None:
    assert SlotGeometry(payload_bytes).slot_bytes == payload_bytes + 256


def sealed(count: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    data = bytearray(count * HEADER_BYTES)
    headers = np.frombuffer(data, SLOT_HEADER)
    headers["generation"] = np.arange(1, count + 1)
    headers["key"] = np.frombuffer(random.Random(4).randbytes(32 * count), "V32")
    starts = range(0, len(data), HEADER_BYTES)
    seal_headers(headers, [memoryview(data)[at : at + 248] for at in starts])
    return headers


def test_headers_are_whole_when_sealed_and_not_when_free() -> None:
    headers = np.concatenate([sealed(3), np.zeros(2, SLOT_HEADER)])
    assert find_whole_headers(headers).tolist() == [True, True, True, False, False]


@given(position=st.integers(0, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_header_is_not_whole_when_any_byte_is_another(position: int, flip: int) -> None:
    data = bytearray(sealed(2).tobytes())
    data[position] ^= flip
    assert find_whole_headers(np.frombuffer(data, SLOT_HEADER)).tolist() == [False, True]


@given(st.integers(0, HEADER_BYTES - 1))
def test_header_is_not_whole_when_it_was_cut(kept: int) -> None:
    data = bytearray(sealed(1).tobytes())
    data[kept:] = bytes(HEADER_BYTES - kept)
    assert find_whole_headers(np.frombuffer(data, SLOT_HEADER)).tolist() == [False]
