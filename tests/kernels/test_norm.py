"""Root mean square normalisation: the formula in float64, and rows that do not see each other."""

import pytest
import torch

from kernels.reference.norm import rms_norm
from tests.kernels.row_invariance import check_row_invariance, normal

CHANNELS = [1, 5, 16, 33, 64, 512, 5_120, 20_480, 40_001]
"""The last is a row that several threads would share, were it summed in one piece."""


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("eps", [1e-20, 1e-6])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e6])
def test_rows_are_divided_by_their_root_mean_square(
    channels: int, eps: float, spread: float
) -> None:
    x, weight = normal(3, channels, spread=spread), normal(channels, seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    assert torch.allclose(rms_norm(x, None, eps).double(), exact, rtol=1e-6, atol=0)
    weighted = rms_norm(x, weight, eps).double()
    assert torch.allclose(weighted, exact * weight.double(), rtol=1e-6, atol=0)


def test_row_of_zeros_stays_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-20), torch.zeros(2, 64))


@pytest.mark.parametrize("channels", CHANNELS)
def test_bits_of_a_row_do_not_depend_on_the_others(channels: int) -> None:
    x, weight = normal(11, channels), normal(channels, seed=1)
    check_row_invariance(lambda rows: rms_norm(x[rows], weight, 1e-20), 11)


def test_bits_do_not_depend_on_strides() -> None:
    x = normal(6, 4, 64)
    expected = rms_norm(x, None, 1e-20)
    assert torch.equal(rms_norm(x.transpose(0, 1), None, 1e-20).transpose(0, 1), expected)
    channels_apart = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(rms_norm(channels_apart, None, 1e-20), expected)
    assert torch.equal(rms_norm(x[3, 1], None, 1e-20), expected[3, 1])


def test_gradient_is_that_of_float64() -> None:
    x, weight = normal(3, 64), normal(64, seed=1)
    single, double = x.clone().requires_grad_(), x.double().requires_grad_()
    direction = normal(3, 64, seed=2)
    (gradient,) = torch.autograd.grad((rms_norm(single, weight, 1e-6) * direction).sum(), single)
    exact = double / (double.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    (expected,) = torch.autograd.grad((exact * direction.double()).sum(), double)
    assert torch.allclose(gradient.double(), expected, rtol=1e-5, atol=1e-6)
