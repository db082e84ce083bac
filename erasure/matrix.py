"""Arithmetic in GF(2^8) with the polynomial 0x11d, our Cauchy matrix, and matrix inversion.

Matrices are small (at most 32 x 31), so clarity comes before speed here. Not for shard bytes:
multiplying those is the work of a `Multiplier`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .errors import SingularMatrixError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# x^8 + x^4 + x^3 + x^2 + 1. The element 2 generates the multiplicative group of this field.
FIELD_POLYNOMIAL = 0x11D
FIELD_SIZE = 256


@cache
def multiplication_table() -> NDArray[np.uint8]:
    """All products of the field: read-only uint8 array of shape (256, 256)."""
    powers = np.zeros(FIELD_SIZE - 1, np.uint8)
    logarithms = np.zeros(FIELD_SIZE, np.intp)
    element = 1
    for exponent in range(FIELD_SIZE - 1):
        powers[exponent] = element
        logarithms[element] = exponent
        element <<= 1
        if element >= FIELD_SIZE:
            element ^= FIELD_POLYNOMIAL
    exponents = logarithms[:, None] + logarithms[None, :]
    table: NDArray[np.uint8] = powers[exponents % (FIELD_SIZE - 1)]
    # Zero has no logarithm; its row and column are set apart.
    table[0, :] = 0
    table[:, 0] = 0
    table.flags.writeable = False
    return table


@cache
def inverse_table() -> NDArray[np.uint8]:
    """Multiplicative inverses: read-only uint8 array of shape (256,). Entry 0 is 0, unused."""
    inverses = np.zeros(FIELD_SIZE, np.uint8)
    elements, partners = np.nonzero(multiplication_table() == 1)
    inverses[elements] = partners
    inverses.flags.writeable = False
    return inverses


def multiply(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Matrix product over the field: uint8 (r, k) times (k, c) gives (r, c)."""
    products = multiplication_table()[left[:, :, None], right[None, :, :]]
    total: NDArray[np.uint8] = np.bitwise_xor.reduce(products, axis=1)
    return total


def cauchy_generator(k: int, m: int) -> NDArray[np.uint8]:
    """Generator of the systematic code: uint8 (k + m, k), the unit matrix above Cauchy rows.

    Row k + i, column j is 1 / (x_i + y_j) with x_i = k + i and y_j = j, where + is XOR
    (docs/formats/erasure-code.md). Every square part of a Cauchy matrix can be inverted, so any
    k of the k + m shards are enough. ISA-L's gf_gen_cauchy1_matrix(k + m, k) is the same matrix.
    """
    rows = np.arange(k, k + m)[:, None]
    columns = np.arange(k)[None, :]
    parity = inverse_table()[rows ^ columns]
    return np.concatenate([np.eye(k, dtype=np.uint8), parity])


def invert(matrix: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Inverse of a square matrix over the field (Gauss-Jordan elimination), uint8 (n, n).

    Raises SingularMatrixError if there is none.
    """
    size = len(matrix)
    table = multiplication_table()
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        candidates = np.flatnonzero(work[column:, column])
        if not candidates.size:
            raise SingularMatrixError(
                "matrix cannot be inverted",
                f"no pivot in column {column} of {size}",
                "linearly independent rows",
            )
        pivot = column + int(candidates[0])
        if pivot != column:
            work[[column, pivot]] = work[[pivot, column]]
        work[column] = table[inverse_table()[work[column, column]], work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= table[factors[:, None], work[column][None, :]]
    return work[:, size:].copy()


def reconstruction_rows(
    generator: NDArray[np.uint8], missing: Sequence[int], available: Sequence[int]
) -> NDArray[np.uint8]:
    """Coefficients that turn the available shards into the missing ones.

    generator: uint8 (k + m, k). available: k different shard indices. Returns uint8
    (len(missing), k) whose columns follow the order of `available`. Data and parity shards may
    stand on either side: available = G_a * data, so missing = G_m * inverse(G_a) * available.
    """
    inverse = invert(generator[list(available)])
    return multiply(generator[list(missing)], inverse)
