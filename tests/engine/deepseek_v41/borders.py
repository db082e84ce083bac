"""How near the rows of a computation lie to a border of rounding or selection, on this machine.

Another order of summing moves a logits row by some 1e-6, unless a number lies so near to a border
that it falls on the other side: then an FP4 code, an expert or a chosen entry is another one, and
later rows see that too. Which rows these are is a matter of the processor as well, so it is
measured where the test runs: weights moved by 1e-7 of each do what another order does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

STABLE = 5e-5
"""A row that moves by less is beside no border."""

Tensors = Mapping[str, torch.Tensor]


def move_weights(tensors: Tensors, seed: int) -> dict[str, torch.Tensor]:
    """float32, each number moved by 1e-7 of itself, normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor.float() * (1 + 1e-7 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in tensors.items()
    }


def measure_noise(
    compute: Callable[[Tensors], torch.Tensor], tensors: Tensors, draws: int
) -> torch.Tensor:
    """[T]: how far a row of `compute` [T, V] moves at most when weights are moved `draws` times."""
    expected = compute(tensors)
    moved = [compute(move_weights(tensors, seed)) for seed in range(draws)]
    return torch.stack([(it - expected).abs().amax(-1) for it in moved]).amax(0)
