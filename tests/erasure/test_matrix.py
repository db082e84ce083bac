"""The field, the Cauchy matrix, and inversion."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erasure.errors import SingularMatrixError
from erasure.matrix import (
    cauchy_generator,
    inverse_table,
    invert,
    multiplication_table,
    multiply,
    reconstruction_rows,
)
from tests.erasure import schoolbook


def test_multiplication_table_equals_schoolbook_products() -> None:
    table = multiplication_table()
    assert table.shape == (256, 256)
    for left in range(256):
        assert table[left].tolist() == [schoolbook.multiply(left, right) for right in range(256)]


def test_inverse_table_equals_schoolbook_inverses() -> None:
    assert inverse_table()[1:].tolist() == [schoolbook.inverse(value) for value in range(1, 256)]


def test_tables_refuse_to_be_changed() -> None:
    for table in (multiplication_table(), inverse_table()):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1


@pytest.mark.parametrize(("k", "m"), [(k, m) for k in range(1, 33) for m in {0, 1, 32 - k}])
def test_generator_is_the_unit_matrix_above_cauchy_rows(k: int, m: int) -> None:
    generator = cauchy_generator(k, m)
    assert generator.shape == (k + m, k)
    assert np.array_equal(generator[:k], np.eye(k, dtype=np.uint8))
    assert generator[k:].tolist() == schoolbook.parity_rows(k, m)


def test_any_10_rows_of_the_10_plus_2_generator_can_be_inverted() -> None:
    generator = cauchy_generator(10, 2)
    patterns = list(combinations(range(12), 10))
    assert len(patterns) == 66
    for rows in patterns:
        chosen = generator[list(rows)]
        assert np.array_equal(multiply(invert(chosen), chosen), np.eye(10, dtype=np.uint8))


@given(st.integers(1, 32), st.randoms(use_true_random=False))
def test_inverse_times_matrix_is_the_unit_matrix_for_any_k_rows(k: int, rng: random.Random) -> None:
    generator = cauchy_generator(k, 32 - k)
    chosen = generator[rng.sample(range(32), k)]
    inverse = invert(chosen)
    unit = np.eye(k, dtype=np.uint8)
    assert np.array_equal(multiply(inverse, chosen), unit)
    assert np.array_equal(multiply(chosen, inverse), unit)


def test_invert_leaves_its_argument_as_it_was() -> None:
    matrix = cauchy_generator(4, 4)[4:]
    before = matrix.copy()
    invert(matrix)
    assert np.array_equal(matrix, before)


def test_invert_finds_a_pivot_below_when_the_diagonal_is_zero() -> None:
    matrix = np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]], np.uint8)
    assert np.array_equal(invert(matrix), matrix.T)


@pytest.mark.parametrize("rows", [[[0]], [[1, 2], [1, 2]], [[1, 2, 3], [0, 0, 0], [4, 5, 6]]])
def test_invert_names_the_column_when_there_is_no_inverse(rows: list[list[int]]) -> None:
    with pytest.raises(SingularMatrixError, match="no pivot in column"):
        invert(np.array(rows, np.uint8))


def test_reconstruction_rows_are_unit_rows_when_a_shard_could_be_copied() -> None:
    generator = cauchy_generator(4, 2)
    rows = reconstruction_rows(generator, [0, 1, 2, 3], [3, 1, 0, 2])
    assert rows.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
