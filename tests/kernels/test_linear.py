"""x W^T: near the exact product, and the same bits for a row whatever is computed with it."""

import pytest
import torch

from kernels.reference.linear import linear
from tests.kernels.row_invariance import (
    check_products_of_tiles,
    check_row_invariance,
    normal,
    tiles_of,
)

SHAPES = [(1, 1), (3, 5), (31, 33), (64, 256), (257, 40), (512, 100)]


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 21])
def test_product_is_that_of_float64(inputs: int, outputs: int, rows: int) -> None:
    x, weight = normal(rows, inputs), normal(outputs, inputs, seed=1)
    product = linear(x, weight, tiles_of(torch.arange(rows)))
    expected = x.double() @ weight.double().T
    scale = (x.double().abs() @ weight.double().abs().T).clamp(min=1e-30)
    assert product.dtype == torch.float32
    assert ((product - expected).abs() / scale).max() < inputs * 2**-24 + 2**-23


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_bits_of_a_row_do_not_depend_on_the_others(inputs: int, outputs: int) -> None:
    x, weight = normal(21, inputs), normal(outputs, inputs, seed=1)
    check_row_invariance(lambda rows: linear(x[rows], weight, tiles_of(rows)), 21)


@pytest.mark.parametrize("rows", [1, 8, 21])
def test_products_are_those_of_tiles(rows: int) -> None:
    x, weight, tiles = normal(rows, 16), normal(5, 16, seed=1), tiles_of(torch.arange(rows), 3)
    check_products_of_tiles(lambda: linear(x, weight, tiles), x, 3)


def test_bits_of_a_row_do_not_depend_on_what_the_others_hold() -> None:
    x, weight = normal(16, 64), normal(50, 64, seed=1)
    tiles = tiles_of(torch.arange(16))
    expected = linear(x, weight, tiles)[5]
    x[:5], x[6:] = float("nan"), float("inf")
    assert torch.equal(linear(x, weight, tiles)[5], expected)


def test_rows_may_lie_apart_in_memory() -> None:
    x, weight = normal(9, 3, 64), normal(50, 64, seed=1)
    tiles = tiles_of(torch.arange(9))
    assert torch.equal(linear(x[:, 1], weight, tiles), linear(x[:, 1].contiguous(), weight, tiles))


def test_no_rows_give_no_rows() -> None:
    product = linear(torch.empty(0, 64), normal(50, 64), tiles_of(torch.arange(0)))
    assert product.shape == (0, 50)
