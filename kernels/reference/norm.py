"""Root mean square normalisation of rows."""

import torch

_CHANNELS_LIMIT = 32_768
"""From here on one row alone would be summed by several threads, in another order than many."""


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of the squares over the last dimension (below 32,768), which stays with size 1."""
    assert x.shape[-1] < _CHANNELS_LIMIT, f"{x.shape[-1]} channels, expected fewer than 32,768"
    # The order of a sum follows from the strides; squaring keeps those of its input.
    return x.contiguous().square().mean(-1, keepdim=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: float32 [..., C]; weight: [C] or None for ones. A row of zeros stays zeros when eps > 0.
    """
    normed = x * torch.rsqrt(mean_square(x) + eps)
    return normed if weight is None else normed * weight
