"""Training rounds as the cache and the checkpoint do, and gradients pass through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.models.deepseek_v41.checkpoint.tensor_schema import Storage
from kernels.reference import index_entries, main_entries, weight_formats, window_rows
from training import rounding
from training.residual_streams import sinkhorn

Rounding = Callable[[torch.Tensor], torch.Tensor]


def awkward_rows() -> torch.Tensor:
    """Values of all sizes, ties, zeros and groups that are all tiny or all huge, [N, 64]."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(200, 64, generator=generator)
    sizes = torch.tensor([1e-30, 1e-6, 1e-2, 1.0, 30.0, 2_688.0, 1e5]).repeat_interleave(200)
    ties = torch.arange(-32, 32) * 0.25
    return torch.cat([normal.repeat(7, 1) * sizes[:, None], ties[None], torch.zeros(1, 64)])


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        (rounding.round_window_rows, window_rows.round_window_rows),
        (rounding.round_main_entries, main_entries.round_main_entries),
        (rounding.round_index_entries, index_entries.round_index_entries),
    ],
)
def test_cache_rows_round_as_the_cache_keeps_them(given: Rounding, reference: Rounding) -> None:
    rows = awkward_rows().requires_grad_()
    rounded = given(rows)
    assert torch.equal(rounded, reference(rows.detach()))
    (gradient,) = torch.autograd.grad(rounded.sum(), rows)
    assert torch.equal(gradient, torch.ones_like(rows))


def test_weights_round_as_a_checkpoint_keeps_them() -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    weights = {
        "blocks": draw(64, 96),
        "more blocks": draw(32, 32),
        "experts": draw(3, 32, 64),
        "table": draw(50, 32),
        "plain": draw(7, 5),
        "float32": draw(5),
    }
    storages = {
        "blocks": Storage.FP8_BLOCKS,
        "more blocks": Storage.FP8_BLOCKS,
        "experts": Storage.FP4_ROWS,
        "table": Storage.FP8_ROWS,
        "plain": Storage.PLAIN,
        "float32": Storage.FLOAT32,
    }
    rounded = rounding.round_weights(weights, storages)

    def stored(name: str) -> torch.Tensor:
        weight = weights[name].detach()
        if storages[name] is Storage.FP8_BLOCKS:
            packed = weight_formats.quantise_fp8_blocks(weight)
            return weight_formats.dequantise_fp8_blocks(*packed)
        if storages[name] is Storage.FP8_ROWS:
            return weight_formats.dequantise_fp8_rows(*weight_formats.quantise_fp8_rows(weight))
        if storages[name] is Storage.FP4_ROWS:
            rows = weight.flatten(0, 1)
            packed = weight_formats.quantise_fp4_rows(rows)
            return weight_formats.dequantise_fp4_rows(*packed).view_as(weight)
        return weight.bfloat16().float() if storages[name] is Storage.PLAIN else weight

    for name in weights:
        assert torch.equal(rounded[name], stored(name)), name
    total = torch.stack([tensor.sum() for tensor in rounded.values()]).sum()
    gradients = torch.autograd.grad(total, list(weights.values()))
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in gradients)


def test_gradient_of_sinkhorn_is_that_of_its_iterations() -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.rand(6, 4, 4, generator=generator, dtype=torch.float64).add_(0.01)
    start.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, iterations=5, eps=1e-6), (start,))
