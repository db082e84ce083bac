"""Engram: rows of an n-gram table, and the gate that adds them to the streams."""

import math

import torch

from .activations import sigmoid
from .norm import mean_square
from .weight_formats import dequantise_fp8_rows

_GATE_FLOOR = 1e-6


def read_table_rows(
    rows: torch.Tensor, scales: torch.Tensor | None, index: torch.Tensor
) -> torch.Tensor:
    """float32 [*index.shape, C]: the rows `index` (int64) of a table.

    rows: float [R, C] with `scales` None, or both as `quantise_fp8_rows` gives them.
    """
    if scales is None:
        return rows[index].to(torch.float32)
    # Bytes: not every type of eight bits can be indexed.
    values = rows.view(torch.uint8)[index].view(rows.dtype)
    return dequantise_fp8_rows(values, scales.view(torch.uint8)[index].view(scales.dtype))


def gate_engram(
    streams: torch.Tensor,
    keys_values: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
    is_masked: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The streams [..., n, E] with each row's value added, gated for each stream.

    keys_values: [..., (n + 1) E], n keys and then the value. For stream k with h = X_k:
    u = sum(RMS(h) query_scale_k RMS(key_k) key_scale_k) / sqrt(E) without norm weights, gate =
    sigmoid(copysign(sqrt(max(|u|, 1e-6)), u)), so 0 counts as the smallest positive u. Rows where
    `is_masked` [...] (image tokens; None for nowhere) stay as they are. Differentiable.
    """
    n, channels = streams.shape[-2:]
    keys, value = keys_values.unflatten(-1, (n + 1, channels)).split((n, 1), -2)
    products = (streams * (query_scale * key_scale) * keys).contiguous()
    rstd = torch.rsqrt(mean_square(streams) + eps) * torch.rsqrt(mean_square(keys) + eps)
    u = products.sum(-1, keepdim=True) * rstd / math.sqrt(channels)
    gate = sigmoid(torch.copysign(u.abs().clamp(min=_GATE_FLOOR).sqrt(), u))
    gated = streams + gate * value
    if is_masked is None:
        return gated
    return torch.where(is_masked[..., None, None], streams, gated)
