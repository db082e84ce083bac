"""Root mean square normalisation of rows."""

import torch

_PIECE_CHANNELS = 16_384
"""Longer rows are summed in pieces: from 32,768 numbers on one row alone would be shared by several
threads, in another order than the same row among many."""


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of the squares over the last dimension, which stays with size 1."""
    # The order of a sum follows from the strides; squaring keeps those of its input.
    squares = x.contiguous().square()
    channels = squares.shape[-1]
    if channels <= _PIECE_CHANNELS:
        return squares.mean(-1, keepdim=True)
    first, *others = [piece.sum(-1, keepdim=True) for piece in squares.split(_PIECE_CHANNELS, -1)]
    for other in others:
        first = first + other
    return first / channels


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: float32 [..., C]; weight: [C] or None for ones. A row of zeros stays zeros when eps > 0.
    """
    normed = x * torch.rsqrt(mean_square(x) + eps)
    return normed if weight is None else normed * weight
