"""What every back end must do.

A back end's test file subclasses `MultiplierContract` and has a module's fixture `multiplier`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from erasure.choice import check_multiplier
from erasure.matrix import cauchy_generator, multiply
from erasure.multiplier import Multiplier

GUARD_BYTES = 80
GUARD_VALUE = 0x5A


def addresses(array: NDArray[np.uint8], offset_bytes: int = 0) -> NDArray[np.uintp]:
    """Address of the first byte of each row of a (blocks, rows, bytes) array."""
    blocks, rows, row_bytes = array.shape
    first = array.ctypes.data + offset_bytes
    end = first + blocks * rows * row_bytes
    return np.arange(first, end, row_bytes, dtype=np.uintp).reshape(blocks, rows)


def run_product(
    multiplier: Multiplier,
    coefficients: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    *,
    offset_bytes: int = GUARD_BYTES,
) -> NDArray[np.uint8]:
    """Apply a product to (blocks, columns, bytes); checks what lies before and behind targets."""
    blocks, _, shard_bytes = sources.shape
    rows = len(coefficients)
    room = np.full((blocks, rows, shard_bytes + 2 * GUARD_BYTES), GUARD_VALUE, np.uint8)
    before = sources.copy()
    multiplier.prepare(coefficients).apply_at(
        addresses(sources), addresses(room, offset_bytes), shard_bytes=shard_bytes
    )
    assert np.array_equal(sources, before)
    assert (room[:, :, :offset_bytes] == GUARD_VALUE).all()
    assert (room[:, :, offset_bytes + shard_bytes :] == GUARD_VALUE).all()
    return room[:, :, offset_bytes : offset_bytes + shard_bytes]


def expected_product(
    coefficients: NDArray[np.uint8], sources: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The same product from the field's multiplication table."""
    return np.stack([multiply(coefficients, block) for block in sources])


class MultiplierContract:
    """Tests that hold for any back end."""

    def test_product_passes_the_self_check(self, multiplier: Multiplier) -> None:
        check_multiplier(multiplier)

    @pytest.mark.parametrize("columns", [1, 2, 3, 10, 20, 31])
    @pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 31])
    def test_product_is_right_for_any_shape(
        self, multiplier: Multiplier, columns: int, rows: int
    ) -> None:
        rng = np.random.default_rng(columns * 100 + rows)
        coefficients = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        sources = rng.integers(0, 256, (2, columns, 203), dtype=np.uint8)
        made = run_product(multiplier, coefficients, sources)
        assert np.array_equal(made, expected_product(coefficients, sources))

    def test_product_is_right_for_every_length_up_to_260_bytes(
        self, multiplier: Multiplier
    ) -> None:
        coefficients = cauchy_generator(10, 3)[10:]
        for shard_bytes in range(1, 261):
            rng = np.random.default_rng(shard_bytes)
            sources = rng.integers(0, 256, (1, 10, shard_bytes), dtype=np.uint8)
            made = run_product(multiplier, coefficients, sources)
            assert np.array_equal(made, expected_product(coefficients, sources)), shard_bytes

    @pytest.mark.parametrize("shard_bytes", [11_392, 11_469, 40_000])
    def test_product_is_right_for_the_lengths_in_use(
        self, multiplier: Multiplier, shard_bytes: int
    ) -> None:
        coefficients = cauchy_generator(10, 2)[10:]
        rng = np.random.default_rng(shard_bytes)
        sources = rng.integers(0, 256, (3, 10, shard_bytes), dtype=np.uint8)
        made = run_product(multiplier, coefficients, sources)
        assert np.array_equal(made, expected_product(coefficients, sources))

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(
        st.integers(1, 12),
        st.integers(1, 8),
        st.integers(0, 4),
        st.integers(1, 400),
        st.integers(0, GUARD_BYTES),
        st.integers(0, 2**32),
    )
    def test_product_is_right_at_any_address(
        self,
        multiplier: Multiplier,
        columns: int,
        rows: int,
        blocks: int,
        shard_bytes: int,
        offset_bytes: int,
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        # Few different values, so that coefficients 0 and 1 come up often.
        coefficients = rng.integers(0, 3, (rows, columns), dtype=np.uint8)
        sources = rng.integers(0, 256, (blocks, columns, shard_bytes), dtype=np.uint8)
        made = run_product(multiplier, coefficients, sources, offset_bytes=offset_bytes)
        if blocks:
            assert np.array_equal(made, expected_product(coefficients, sources))

    def test_product_takes_no_notice_of_later_changes_to_its_coefficients(
        self, multiplier: Multiplier
    ) -> None:
        coefficients = np.array([[3, 7]], np.uint8)
        product = multiplier.prepare(coefficients)
        coefficients[:] = 0
        sources = np.arange(128, dtype=np.uint8).reshape(1, 2, 64)
        target = np.zeros((1, 1, 64), np.uint8)
        product.apply_at(addresses(sources), addresses(target), shard_bytes=64)
        expected = expected_product(np.array([[3, 7]], np.uint8), sources)
        assert np.array_equal(target, expected)

    def test_product_accepts_coefficients_that_are_not_contiguous(
        self, multiplier: Multiplier
    ) -> None:
        coefficients = cauchy_generator(6, 4)[6:][::2, ::3]
        sources = np.arange(200, dtype=np.uint8).reshape(1, 2, 100)
        made = run_product(multiplier, coefficients, sources)
        assert np.array_equal(made, expected_product(coefficients, sources))

    def test_product_reads_shards_wherever_they_lie(self, multiplier: Multiplier) -> None:
        rng = np.random.default_rng(5)
        shards = [rng.integers(0, 256, 100 + j, dtype=np.uint8) for j in range(8)]
        order = [[3, 0, 5], [7, 7, 1]]
        table = np.array([[shards[j].ctypes.data for j in row] for row in order], np.uintp)
        sources = np.stack([np.stack([shards[j][:100] for j in row]) for row in order])
        target = np.zeros((2, 2, 100), np.uint8)
        coefficients = np.array([[1, 2, 3], [0, 200, 255]], np.uint8)
        multiplier.prepare(coefficients).apply_at(table, addresses(target), shard_bytes=100)
        assert np.array_equal(target, expected_product(coefficients, sources))
