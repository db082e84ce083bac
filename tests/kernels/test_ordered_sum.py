"""Sums over few terms: one order, one after the other, for every shape and stride."""

import itertools

import pytest
import torch

from kernels.reference.ordered_sum import sum_in_order
from tests.kernels.row_invariance import normal


def sum_one_by_one(x: torch.Tensor, dim: int) -> torch.Tensor:
    terms = [x.select(dim, index).clone() for index in range(x.shape[dim])]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.unsqueeze(dim)


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("channels", [1, 2, 4, 7, 16, 65, 20_000])
def test_sum_adds_one_by_one_over_any_dimension(terms: int, rows: int, channels: int) -> None:
    # Terms of unlike sizes: any other order of adding gives other bits somewhere.
    x = normal(rows, terms, channels) * normal(rows, terms, channels, seed=1).exp()
    for order in itertools.permutations(range(3)):
        if channels == 20_000 and order != (0, 1, 2):
            continue
        laid_out = x.permute(order).contiguous().permute([order.index(d) for d in range(3)])
        assert torch.equal(sum_in_order(laid_out, 1), sum_one_by_one(x, 1))
        moved = laid_out.transpose(1, 2)
        assert torch.equal(sum_in_order(moved, -1), sum_one_by_one(x, 1).transpose(1, 2))


@pytest.mark.parametrize("terms", [4, 6])
def test_gradient_goes_to_every_term(terms: int) -> None:
    x = normal(3, terms).requires_grad_()
    (gradient,) = torch.autograd.grad(sum_in_order(x, -1).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
