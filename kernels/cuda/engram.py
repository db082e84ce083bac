"""The gate that adds rows of an n-gram table to the streams."""

import math

import torch
import torch.nn.functional as F

from ..reference.activations import sigmoid
from .norm import rms_norm

GATE_FLOOR = 1e-6
ROWS_MIN = 16
"""Of fewer rows the library lets more threads share one, which adds in another order."""
PIECE_CHANNELS = 4096
"""And of longer ones."""


def gate_engram(
    streams: torch.Tensor,
    keys_values: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
    is_masked: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """As the reference, within rounding; not differentiable."""
    n, channels = streams.shape[-2:]
    keys, value = keys_values.unflatten(-1, (n + 1, channels)).split((n, 1), -2)
    products = rms_norm(streams, None, eps) * (query_scale * key_scale) * rms_norm(keys, None, eps)
    u = _sum_rows(products) / math.sqrt(channels)
    gate = sigmoid(torch.copysign(u.abs().clamp(min=GATE_FLOOR).sqrt(), u))
    gated = torch.addcmul(streams, gate, value)
    if is_masked is None:
        return gated
    return torch.where(is_masked[..., None, None], streams, gated)


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of x [..., C], which stays with size 1; a row's bits do not
    depend on how many rows there are."""
    rows_RC = x.contiguous().view(-1, x.shape[-1])
    count = len(rows_RC)
    if count < ROWS_MIN:
        rows_RC = F.pad(rows_RC, (0, 0, 0, ROWS_MIN - count))
    first, *others = [piece.sum(-1) for piece in rows_RC.split(PIECE_CHANNELS, -1)]
    for other in others:
        first = first + other
    return first[:count].view(*x.shape[:-1], 1)
