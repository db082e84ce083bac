"""Parts of DeepSeek-V4 put together from our operations, to be compared with other computations.

V4 differs from V4.1 in what is plain here: a norm of each query head, keys and entries that are not
quantised, position biases in the pooling of groups, groups of 4 that overlap, a shared expert with
the limit of the routed ones, and mixes that a site uses itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.reference.compressor import compress_groups
from kernels.reference.experts import run_experts, swiglu
from kernels.reference.linear import linear
from kernels.reference.norm import rms_norm
from kernels.reference.rope import apply_rope
from kernels.reference.sparse_attention import sparse_attention
from kernels.reference.streams import StreamMix, mix_streams, project_streams
from kernels.reference.tiles import RowTiles, plan_tiles

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    heads: int
    head_dim: int
    groups: int
    window: int
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class Turned:
    """RoPE tables of the rows, [T, R / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


def mix_site(
    streams_TNE: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    stream_epsilon: float,
    norm_epsilon: float,
) -> StreamMix:
    tiles = plan_tiles(torch.arange(len(streams_TNE)))
    m = project_streams(streams_TNE, projection, norm_epsilon, tiles)
    return mix_streams(m, base, scale, iterations, stream_epsilon)


def window_of(positions_T: torch.Tensor, window: int) -> torch.Tensor:
    """Rows [T, window] that each sees, of rows whose first stands at positions_T[0]."""
    rows = positions_T[:, None] + torch.arange(1 - window, 1) - positions_T[0]
    return torch.where(rows >= 0, rows, -1)


def attend_v4(
    x_TE: torch.Tensor,
    positions_T: torch.Tensor,
    turned: Turned,
    sizes: AttentionSizes,
    weights: Weights,
    entries_GD: torch.Tensor | None = None,
    selected_TS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, E], and the values turned back [T, H, D]; entries are further rows of a window.

    `weights`: q_a, q_norm, q_b, kv, kv_norm, out_a, out_b, sink.
    """
    tiles = plan_tiles(positions_T)
    latent_TQ = rms_norm(linear(x_TE, weights["q_a"], tiles), weights["q_norm"], sizes.epsilon)
    q_THD = linear(latent_TQ, weights["q_b"], tiles).view(-1, sizes.heads, sizes.head_dim)
    q_THD = apply_rope(rms_norm(q_THD, None, sizes.epsilon), turned.cos, turned.sin)
    kv_TD = rms_norm(linear(x_TE, weights["kv"], tiles), weights["kv_norm"], sizes.epsilon)
    rows_ND = apply_rope(kv_TD, turned.cos, turned.sin)
    index_TW = window_of(positions_T, sizes.window)
    if entries_GD is not None and selected_TS is not None:
        shifted_TS = torch.where(selected_TS < 0, -1, selected_TS + len(rows_ND))
        rows_ND, index_TW = torch.cat([rows_ND, entries_GD]), torch.cat([index_TW, shifted_TS], 1)
    scale = sizes.head_dim**-0.5
    o_THD = sparse_attention(q_THD, rows_ND, index_TW, None, None, weights["sink"], scale, tiles)
    o_THD = apply_rope(o_THD, turned.cos, turned.sin, inverse=True)
    return project_groups(o_THD, sizes.groups, weights["out_a"], weights["out_b"], tiles), o_THD


def project_groups(
    o_THD: torch.Tensor, groups: int, out_a: torch.Tensor, out_b: torch.Tensor, tiles: RowTiles
) -> torch.Tensor:
    """The grouped low-rank output: a matrix for each group of heads, then one for all."""
    grouped = o_THD.reshape(len(o_THD), groups, -1)
    matrices = out_a.view(groups, -1, grouped.shape[-1])
    parts = [linear(grouped[:, g].contiguous(), matrices[g], tiles) for g in range(groups)]
    return linear(torch.cat(parts, dim=1), out_b, tiles)


def pool_groups(
    x_TE: torch.Tensor, ratio: int, weights: Weights, epsilon: float, *, is_overlapping: bool
) -> torch.Tensor:
    """Latents [G, D] of the closed groups, normed, before RoPE; `weights`: kv, gate, bias, norm."""
    groups, width = len(x_TE) // ratio, len(weights["kv"])
    x_TE = x_TE[: groups * ratio]
    tiles = plan_tiles(torch.arange(len(x_TE)))
    content = linear(x_TE, weights["kv"], tiles).view(groups, ratio, width)
    gate = linear(x_TE, weights["gate"], tiles).view(groups, ratio, width) + weights["bias"]
    if is_overlapping:
        # A group has its own second series, and the first series of the group before it.
        (content_a, content_b), (gate_a, gate_b) = content.chunk(2, -1), gate.chunk(2, -1)
        before = torch.full_like(gate_a[:1], float("-inf"))
        gate = torch.cat([torch.cat([before, gate_a[:-1]]), gate_b], dim=1)
        content = torch.cat([torch.cat([0 * content_a[:1], content_a[:-1]]), content_b], dim=1)
    return rms_norm(compress_groups(gate, content), weights["norm"], epsilon)


def feed_forward_v4(
    x_TE: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    weights: Weights,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E]: routed experts and the shared one; and the routed ones alone.

    `weights`: gate, up, down with a dimension of experts; shared_gate, shared_up, shared_down.
    """
    tiles = plan_tiles(torch.arange(len(x_TE)))
    stacks = (weights["gate"], weights["up"], weights["down"])
    routed = run_experts(x_TE, experts_TK, weights_TK, *stacks, limit, tiles)
    gate = linear(x_TE, weights["shared_gate"], tiles)
    up = linear(x_TE, weights["shared_up"], tiles)
    shared = linear(swiglu(gate, up, limit), weights["shared_down"], tiles)
    return routed + shared, routed
