"""A whole DeepSeek-V4 model from our operations, for the golden data that other V4 programs made.

One prefill in float32, without cache. V4's own parts are plain: hash routing, scores of unquantised
index keys, the head gate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.models.deepseek_v41.config import YarnScaling
from kernels.reference.linear import linear
from kernels.reference.norm import rms_norm
from kernels.reference.rope import apply_rope, rope_frequencies, rope_tables
from kernels.reference.route import route_tokens
from kernels.reference.selection import select_topk
from kernels.reference.streams import collapse_streams, flatten_streams, write_back_streams
from kernels.reference.tiles import plan_tiles
from tests.kernels.v4_operations import (
    AttentionSizes,
    Turned,
    Weights,
    attend_v4,
    feed_forward_v4,
    mix_site,
    pool_groups,
)

OVERLAPPING = "compressed_sparse_attention"


@dataclass
class Seen:
    """What a pass went through, layer by layer."""

    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    streams: list[torch.Tensor] = field(default_factory=list)
    attention_in: list[torch.Tensor] = field(default_factory=list)
    attention_out: list[torch.Tensor] = field(default_factory=list)
    experts: list[torch.Tensor] = field(default_factory=list)
    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    topk: dict[int, torch.Tensor] = field(default_factory=dict)


class V4Model:
    """`sizes`: config.json; `tensors`: by released name."""

    def __init__(self, sizes: Mapping[str, Any], tensors: Weights) -> None:
        self.sizes = sizes
        self.tensors = {
            name: x if x.dtype == torch.int32 else x.float() for name, x in tensors.items()
        }
        self.epsilon = sizes["rms_norm_eps"]
        rope = sizes["rope_parameters"]["compress"]
        yarn = YarnScaling(
            factor=rope["factor"],
            beta_fast=rope["beta_fast"],
            beta_slow=rope["beta_slow"],
            original_positions=rope["original_max_position_embeddings"],
        )
        channels = sizes["qk_rope_head_dim"]
        self.window_rope = rope_frequencies(channels, sizes["rope_theta"], None)
        self.compressed_rope = rope_frequencies(channels, sizes["compress_rope_theta"], yarn)

    def run(self, ids_T: torch.Tensor) -> Seen:
        seen = Seen()
        tensors, tiles = self.tensors, plan_tiles(torch.arange(len(ids_T)))
        embedded = tensors["embed.weight"][ids_T]
        streams = embedded[:, None].expand(-1, self.sizes["hc_mult"], -1).contiguous()
        for layer in range(self.sizes["num_hidden_layers"]):
            streams = self._run_attention(layer, streams, seen)
            streams = self._run_experts(layer, streams, ids_T, seen)
            seen.streams.append(streams)
        flat = flatten_streams(streams, self.epsilon)
        m = linear(flat, tensors["hc_head_fn"], tiles) * tensors["hc_head_scale"]
        gate = torch.sigmoid(m + tensors["hc_head_base"]) + self.sizes["hc_eps"]
        last = rms_norm(collapse_streams(streams, gate), tensors["norm.weight"], self.epsilon)
        seen.logits = linear(last, tensors["head.weight"], tiles)
        return seen

    def _mix(self, prefix: str, streams: torch.Tensor) -> Any:  # noqa: ANN401
        parts = (self.tensors[f"{prefix}_{part}"] for part in ("fn", "base", "scale"))
        return mix_site(
            streams,
            *parts,
            iterations=self.sizes["hc_sinkhorn_iters"],
            stream_epsilon=self.sizes["hc_eps"],
            norm_epsilon=self.epsilon,
        )

    def _run_attention(self, layer: int, streams: torch.Tensor, seen: Seen) -> torch.Tensor:
        prefix, tensors, sizes = f"layers.{layer}", self.tensors, self.sizes
        mix = self._mix(f"{prefix}.hc_attn", streams)
        collapsed = collapse_streams(streams, mix.pre)
        seen.attention_in.append(collapsed)
        x_TE = rms_norm(collapsed, tensors[f"{prefix}.attn_norm.weight"], self.epsilon)
        weights = {
            "q_a": tensors[f"{prefix}.attn.wq_a.weight"],
            "q_norm": tensors[f"{prefix}.attn.q_norm.weight"],
            "q_b": tensors[f"{prefix}.attn.wq_b.weight"],
            "kv": tensors[f"{prefix}.attn.wkv.weight"],
            "kv_norm": tensors[f"{prefix}.attn.kv_norm.weight"],
            "out_a": tensors[f"{prefix}.attn.wo_a.weight"],
            "out_b": tensors[f"{prefix}.attn.wo_b.weight"],
            "sink": tensors[f"{prefix}.attn.attn_sink"],
        }
        attention = AttentionSizes(
            heads=sizes["num_attention_heads"],
            head_dim=sizes["head_dim"],
            groups=sizes["o_groups"],
            window=sizes["sliding_window"],
            epsilon=self.epsilon,
        )
        positions = torch.arange(len(x_TE))
        entries, selected, frequencies = None, None, self.window_rope
        kind = sizes["layer_types"][layer]
        if kind != "sliding_attention":
            frequencies = self.compressed_rope
            entries, selected = self._select(layer, x_TE, weights, kind)
            seen.entries[layer], seen.topk[layer] = entries, selected
        turned = Turned(*rope_tables(frequencies, positions))
        y, _ = attend_v4(x_TE, positions, turned, attention, weights, entries, selected)
        seen.attention_out.append(y)
        return write_back_streams(streams, y, mix)

    def _pool(self, prefix: str, x_TE: torch.Tensor, ratio: int, kind: str) -> torch.Tensor:
        weights = {
            "kv": self.tensors[f"{prefix}.wkv.weight"],
            "gate": self.tensors[f"{prefix}.wgate.weight"],
            "bias": self.tensors[f"{prefix}.ape"],
            "norm": self.tensors[f"{prefix}.norm.weight"],
        }
        is_overlapping = kind == OVERLAPPING
        latents = pool_groups(x_TE, ratio, weights, self.epsilon, is_overlapping=is_overlapping)
        return apply_rope(
            latents, *rope_tables(self.compressed_rope, torch.arange(len(latents)) * ratio)
        )

    def _select(
        self, layer: int, x_TE: torch.Tensor, weights: Weights, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries [G, D] of a layer and those each query attends to, [T, S]."""
        ratio = self.sizes["compress_rates"][kind]
        prefix = f"layers.{layer}.attn"
        entries = self._pool(f"{prefix}.compressor", x_TE, ratio, kind)
        positions = torch.arange(len(x_TE))
        numbers = torch.arange(len(entries))
        is_visible = numbers < ((positions + 1) // ratio)[:, None]
        if kind != OVERLAPPING:
            return entries, torch.where(is_visible, numbers, -1)
        scores = self._score(prefix, x_TE, weights, ratio)
        scores = scores.masked_fill(~is_visible, float("-inf"))
        return entries, select_topk(scores, self.sizes["index_topk"])

    def _score(self, prefix: str, x_TE: torch.Tensor, weights: Weights, ratio: int) -> torch.Tensor:
        tensors, tiles = self.tensors, plan_tiles(torch.arange(len(x_TE)))
        heads, channels = self.sizes["index_n_heads"], self.sizes["index_head_dim"]
        keys = self._pool(f"{prefix}.indexer.compressor", x_TE, ratio, OVERLAPPING)
        latent = rms_norm(linear(x_TE, weights["q_a"], tiles), weights["q_norm"], self.epsilon)
        q_T = linear(latent, tensors[f"{prefix}.indexer.wq_b.weight"], tiles)
        q_TIJ = apply_rope(
            q_T.view(-1, heads, channels), *rope_tables(self.compressed_rope, tiles.positions_T)
        )
        w_TI = linear(x_TE, tensors[f"{prefix}.indexer.weights_proj.weight"], tiles)
        dots = torch.einsum("tij,gj->tig", q_TIJ, keys).relu()
        return torch.einsum("tig,ti->tg", dots, w_TI * (channels * heads) ** -0.5)

    def _run_experts(
        self, layer: int, streams: torch.Tensor, ids_T: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        prefix, tensors = f"layers.{layer}", self.tensors
        mix = self._mix(f"{prefix}.hc_ffn", streams)
        collapsed = collapse_streams(streams, mix.pre)
        x_TE = rms_norm(collapsed, tensors[f"{prefix}.ffn_norm.weight"], self.epsilon)
        experts, by = self._route(f"{prefix}.ffn.gate", x_TE, ids_T)
        seen.experts.append(experts)
        ffn = f"{prefix}.ffn"
        numbers = range(self.sizes["n_routed_experts"])
        weights = {
            ours: torch.stack([tensors[f"{ffn}.experts.{n}.{theirs}.weight"] for n in numbers])
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        } | {
            f"shared_{ours}": tensors[f"{ffn}.shared_experts.{theirs}.weight"]
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        }
        y, _ = feed_forward_v4(x_TE, experts, by, weights, self.sizes["swiglu_limit"])
        return write_back_streams(streams, y, mix)

    def _route(
        self, prefix: str, x_TE: torch.Tensor, ids_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, scaling = self.sizes["num_experts_per_tok"], self.sizes["routed_scaling_factor"]
        tiles = plan_tiles(torch.arange(len(x_TE)))
        logits = linear(x_TE, self.tensors[f"{prefix}.weight"], tiles)
        table = self.tensors.get(f"{prefix}.tid2eid")
        if table is None:
            bias = self.tensors[f"{prefix}.bias"]
            return route_tokens(logits, bias, bias, None, k, scaling)
        experts = table[ids_T].long().sort(dim=-1).values
        scores = torch.nn.functional.softplus(logits).sqrt().gather(-1, experts)
        return experts, scores / scores.sum(-1, keepdim=True) * scaling
