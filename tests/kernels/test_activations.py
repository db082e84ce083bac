"""Activations: near the exact function, and the same bits wherever a number lies in memory."""

from collections.abc import Callable

import pytest
import torch

from kernels.reference.activations import sigmoid, silu, softplus
from tests.kernels.row_invariance import normal

Function = Callable[[torch.Tensor], torch.Tensor]
EXACT: dict[str, tuple[Function, Function]] = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, torch.nn.functional.silu),
    "softplus": (softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
}
VALUES = torch.cat([normal(1_000, spread=6), torch.linspace(-90, 90, 181), torch.tensor([-0.0])])


@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_of_float64(name: str) -> None:
    function, exact = EXACT[name]
    expected = exact(VALUES.double())
    # The exponent of a far negative number is rounded: its error grows with the number.
    tolerance = expected.abs() * (VALUES.double().abs() + 4) * 2**-24
    assert ((function(VALUES) - expected).abs() <= tolerance + 1e-38).all()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 15, 17, 31, 33, 100])
def test_bits_do_not_depend_on_the_place(name: str, size: int) -> None:
    function, _ = EXACT[name]
    expected = function(VALUES)
    pieces = torch.cat([function(piece.clone()) for piece in torch.split(VALUES, size)])
    assert torch.equal(pieces, expected)
    apart = torch.stack([VALUES] * 3, dim=1)[:, 1]
    assert torch.equal(function(apart), expected)


@pytest.mark.parametrize("name", EXACT)
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    function, _ = EXACT[name]
    # So many that threads share them, and not to a whole number of vectors.
    values = VALUES.repeat(90)[:99_999]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = function(values)
        torch.set_num_threads(2)
        assert torch.equal(function(values), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_finite_and_those_of_float64(name: str) -> None:
    function, exact = EXACT[name]
    values = torch.tensor([-200.0, -90.0, -3.0, -1e-3, 0.0, 0.5, 20.0, 90.0, 200.0])
    single, double = values.clone().requires_grad_(), values.double().requires_grad_()
    (gradient,) = torch.autograd.grad(function(single).sum(), single)
    (expected,) = torch.autograd.grad(exact(double).sum(), double)
    assert torch.allclose(gradient.double(), expected, rtol=1e-5, atol=1e-30)
