"""Writes v4_numbers.npz: what transformers' DeepSeek-V4 computes from small fixed inputs.

V4.1 shares these parts with V4: the weights of an mHC site, its collapse and write-back; the
router; the experts; RMSNorm; partial interleaved RoPE with YaRN; attention with a sink, the inverse
RoPE and the grouped output; the pooling of a group of tokens; the indexer's scores and top-k. The
project never depends on transformers, so this runs in an environment of its own:

    python -m venv v4 && v4/bin/pip install numpy torch==2.13.0 transformers==5.24.0
    v4/bin/python tests/engine/golden/v4/make_v4_numbers.py

All is float32, without a batch dimension. Weights and inputs are exact in BF16, so that they
compress. Names: `layer_*` one whole decoder layer (window only), with `layer_w.<parameter>`;
`pool_*` the same attention with groups of 2 that do not overlap and have no position bias (V4's HCA
at V4.1's ratio); `overlap_*` the pooling of overlapping groups of 4; `core_*` attention alone, over
window rows and entries that FP4 holds exactly; `index_*` the indexer over keys that FP4 holds
exactly; `norm_*`, `rope_*`, `route_*` single operations. tests/kernels/test_v4_numbers.py reads it
and says what V4.1 does otherwise.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.deepseek_v4 import (  # type: ignore[import-not-found]
    modeling_deepseek_v4 as v4,
)
from transformers.models.deepseek_v4.configuration_deepseek_v4 import (  # type: ignore[import-not-found]
    DeepseekV4Config,
)

TOKENS = 11
FIRST_POSITION = 70
INDEX_TOKENS = 22
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
REAL_POSITIONS = (0, 1, 127, 128, 65_535, 65_536, 1_048_575)

Arrays = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]


def make_config(**changes: object) -> DeepseekV4Config:
    sizes: dict[str, object] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 8,
        "num_experts_per_tok": 2,
        "n_routed_experts": 5,
        "max_position_embeddings": 1024,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 2},
        "mlp_layer_types": ["moe"] * 3,
        "swiglu_limit": 1.5,
        "sliding_window": 5,
        "o_groups": 2,
        "o_lora_rank": 6,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 3,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**(sizes | changes))


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * scale
    return x.bfloat16().float()


def fill(module: nn.Module, seed: int) -> None:
    """Random weights that make every part matter: limits are reached, mixes are far from even."""
    module.eval().requires_grad_(False)
    for index, (name, x) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        if "inv_freq" in name:
            continue
        leaf = name.rsplit(".", 1)[-1]
        noise = draw(*x.shape, seed=seed * 1000 + index)
        if leaf == "position_bias":
            x.zero_()
        elif "norm" in name:
            x.copy_((1 + 0.3 * noise).bfloat16())
        elif leaf in ("base", "scale", "sinks", "e_score_correction_bias"):
            x.copy_(noise)
        else:
            x.copy_((noise * 1.5 * x.shape[-1] ** -0.5).bfloat16())


def weights_of(module: nn.Module, prefix: str) -> Arrays:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {f"{prefix}{name}": x for name, x in named if "inv_freq" not in name}


def keep(arrays: Arrays, **tensors: torch.Tensor) -> None:
    """Without the batch dimension, which is 1 everywhere here."""
    arrays.update({name: x[0].clone() for name, x in tensors.items()})


def window_mask(tokens: int, window: int) -> torch.Tensor:
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    is_seen = (behind >= 0) & (behind < window)
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~is_seen, float("-inf"))


def rope_of(
    config: DeepseekV4Config, positions: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rotary = v4.DeepseekV4RotaryEmbedding(config)
    x = torch.zeros(1)
    return {
        kind: rotary(x, position_ids=positions, layer_type=kind) for kind in ("main", "compress")
    }


def run_layer(arrays: Arrays) -> v4.DeepseekV4Attention:
    """A decoder layer that sees a window only; returns its attention."""
    config = make_config()
    layer = v4.DeepseekV4DecoderLayer(config, 0)
    fill(layer, seed=1)
    arrays.update(weights_of(layer, "layer_w."))
    seen: dict[str, Any] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Tensors, output: object) -> None:
            seen[name] = (inputs, output)

        return hook

    attention = layer.self_attn
    for name, module in {
        "attention_site": layer.attn_hc,
        "experts_site": layer.ffn_hc,
        "attention": attention,
        "grouped": attention.o_a_proj,
        "experts": layer.mlp.experts,
        "moe": layer.mlp,
        "router": layer.mlp.gate,
    }.items():
        module.register_forward_hook(record(name))
    streams = draw(1, TOKENS, config.hc_mult, config.hidden_size, seed=2)
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + TOKENS)[None]
    out = layer(
        streams,
        position_embeddings=rope_of(config, positions),
        position_ids=positions,
        attention_mask=window_mask(TOKENS, config.sliding_window),
    )
    for site in ("attention_site", "experts_site"):
        inputs, (post, comb, collapsed) = seen[site]
        keep(arrays, **{f"layer_{site}_streams": inputs[0], f"layer_{site}_post": post})
        keep(arrays, **{f"layer_{site}_comb": comb, f"layer_{site}_collapsed": collapsed})
    keep(arrays, layer_positions=positions, layer_attention_out=seen["attention"][1][0])
    # What goes into the grouped output: values turned back, [T, groups, heads x D / groups].
    keep(arrays, layer_values=seen["grouped"][0][0], layer_moe_out=seen["moe"][1], layer_out=out)
    (_, experts, weights), routed = seen["experts"][0], seen["experts"][1]
    logits = seen["router"][1][0]
    experts, order = experts.sort(dim=-1)
    arrays["layer_router_logits"], arrays["layer_routed_out"] = logits, routed
    arrays["layer_experts"], arrays["layer_weights"] = experts, weights.gather(1, order)
    return attention


def run_pooled_attention(arrays: Arrays, window_only: v4.DeepseekV4Attention) -> None:
    """Attention over a window and every closed group of 2 tokens; other weights as the layer's."""
    config = make_config()
    attention = v4.DeepseekV4Attention(config, 1)
    fill(attention, seed=3)
    attention.load_state_dict(window_only.state_dict(), strict=False)
    arrays.update(weights_of(attention.compressor, "pool_w."))
    entries: list[torch.Tensor] = []
    attention.compressor.register_forward_hook(lambda _, __, output: entries.append(output[0]))
    x = draw(1, TOKENS, config.hidden_size, seed=4)
    positions = torch.arange(TOKENS)[None]
    out, _ = attention(
        x,
        position_embeddings=rope_of(config, positions),
        position_ids=positions,
        attention_mask=window_mask(TOKENS, config.sliding_window),
    )
    keep(arrays, pool_x=x, pool_entries=entries[0][0], pool_out=out)


def run_overlapping_compressor(arrays: Arrays) -> None:
    """V4's own groups: four tokens of one series and the four before them of another."""
    config = make_config()
    compressor = v4.DeepseekV4CSACompressor(config)
    fill(compressor, seed=5)
    compressor.position_bias.copy_(draw(*compressor.position_bias.shape, seed=6))
    compressor.indexer.forward = lambda *_: torch.zeros(1, TOKENS, 1, dtype=torch.int64)
    x = draw(1, TOKENS, config.hidden_size, seed=7)
    entries, _ = compressor(x, x, torch.arange(TOKENS)[None], None, 2)
    keep(arrays, overlap_x=x, overlap_entries=entries[0])
    for name in ("kv_proj.weight", "gate_proj.weight", "kv_norm.weight", "position_bias"):
        arrays[f"overlap_w.{name}"] = compressor.get_parameter(name)


def on_grid(rows: int, channels: int, group: int, seed: int) -> torch.Tensor:
    """Values that FP4 with a power of two for each `group` channels holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 8, (rows, channels // group, group), generator=generator)
    codes[..., 0] = 7
    signs = torch.randint(0, 2, codes.shape, generator=generator) * 2 - 1
    scales = 2.0 ** torch.randint(-4, -1, (rows, channels // group, 1), generator=generator)
    return (torch.tensor(E2M1)[codes] * signs * scales).flatten(1)


def run_attention_core(arrays: Arrays) -> None:
    """One softmax over 6 window rows and 7 entries, of which each query sees a part."""
    config = make_config()
    heads, dim = config.num_attention_heads, config.head_dim
    attention = v4.DeepseekV4Attention(config, 0)
    attention.eval().requires_grad_(False)
    attention.sinks.copy_(torch.tensor([0.5, -30.0, 6.0, -1.0]))
    q = draw(1, heads, TOKENS, dim, seed=8, scale=2.0)
    window = draw(6, dim, seed=9)
    entries = on_grid(7, dim, 16, seed=10)
    generator = torch.Generator().manual_seed(11)
    is_seen = torch.rand(TOKENS, 13, generator=generator) < 0.5
    is_seen[0] = False
    mask = torch.zeros(1, 1, TOKENS, 13).masked_fill(~is_seen, float("-inf"))
    keys = torch.cat([window, entries])[None, None]
    out, _ = v4.eager_attention_forward(attention, q, keys, keys, mask, scaling=attention.scaling)
    keep(arrays, core_q=q.transpose(1, 2), core_out=out)
    arrays |= {"core_window": window, "core_entries": entries, "core_is_seen": is_seen}
    arrays["core_sinks"] = attention.sinks


def run_indexer(arrays: Arrays) -> None:
    """The indexer's own queries, weights, scores and choice, over keys that are put in its way."""
    config = make_config()
    indexer = v4.DeepseekV4Indexer(config)
    fill(indexer, seed=12)
    rate = indexer.compress_rate
    keys = on_grid(INDEX_TOKENS // rate, config.index_head_dim, 32, seed=13)
    seen: dict[str, torch.Tensor] = {}

    def replace_keys(_: nn.Module, inputs: Tensors) -> Tensors:
        seen["q"] = inputs[0]
        return inputs[0], keys[None], inputs[2]

    def record(_: nn.Module, __: Tensors, output: torch.Tensor) -> None:
        seen["scores"] = output

    indexer.scorer.register_forward_pre_hook(replace_keys)
    indexer.scorer.register_forward_hook(record)
    x = draw(1, INDEX_TOKENS, config.hidden_size, seed=14)
    latent = draw(1, INDEX_TOKENS, config.q_lora_rank, seed=15)
    chosen = indexer(x, latent, torch.arange(INDEX_TOKENS)[None], None, 2)
    visible = (torch.arange(INDEX_TOKENS) + 1) // rate
    assert_no_ties(seen["scores"][0], visible, config.index_topk)
    keep(arrays, index_x=x, index_latent=latent, index_q=seen["q"], index_scores=seen["scores"])
    arrays["index_topk"] = chosen[0]
    arrays |= {"index_keys": keys, "index_visible": visible}
    arrays["index_w.q_b_proj.weight"] = indexer.q_b_proj.weight
    arrays["index_w.weights_proj.weight"] = indexer.scorer.weights_proj.weight


def assert_no_ties(scores: torch.Tensor, visible: torch.Tensor, k: int) -> None:
    """The library leaves the order of equal scores open: there are none where it would matter."""
    for row, count in zip(scores, visible.tolist(), strict=True):
        ordered = row[:count].sort(descending=True).values
        assert count <= k or ordered[k - 1] - ordered[k] > 1e-3, "another seed is needed"


def run_single_operations(arrays: Arrays) -> None:
    norm = v4.DeepseekV4RMSNorm(24, eps=1e-6)
    norm.requires_grad_(False).weight.copy_(draw(24, seed=16))
    # From where epsilon decides to where squares are large; and a row of zeros.
    x = draw(6, 24, seed=17) * torch.tensor([1e-5, 1e-3, 1.0, 1e2, 1e6, 0.0])[:, None]
    arrays |= {"norm_x": x, "norm_w": norm.weight, "norm_out": norm(x)}
    arrays["norm_plain_out"] = v4.DeepseekV4UnweightedRMSNorm(eps=1e-6)(x)
    real = make_config(
        head_dim=512,
        partial_rotary_factor=0.125,
        max_position_embeddings=1 << 20,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65_536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    rotary = v4.DeepseekV4RotaryEmbedding(real)
    arrays["rope_real_positions"] = torch.tensor(REAL_POSITIONS)
    for kind, (cos, sin) in rope_of(real, arrays["rope_real_positions"][None]).items():
        arrays[f"rope_real_{kind}_frequencies"] = getattr(rotary, f"{kind}_inv_freq")
        keep(arrays, **{f"rope_real_{kind}_cos": cos, f"rope_real_{kind}_sin": sin})
    small = make_config()
    cos, sin = rope_of(small, torch.arange(60, 71)[None])["compress"]
    turned = draw(1, 11, 3, 20, seed=18)
    keep(arrays, rope_x=turned, rope_cos=cos, rope_sin=sin)
    keep(arrays, rope_out=v4.apply_rotary_pos_emb(turned, cos, sin, unsqueeze_dim=2))
    keep(arrays, rope_inverse_out=v4.apply_rotary_pos_emb(turned, cos, -sin, unsqueeze_dim=2))
    router = v4.DeepseekV4TopKRouter(make_config(n_routed_experts=13, num_experts_per_tok=4))
    fill(router, seed=19)
    logits, weights, experts = router(draw(1, 17, 16, seed=20, scale=6.0))
    experts, order = experts.sort(dim=-1)
    arrays |= {"route_logits": logits, "route_bias": router.e_score_correction_bias}
    arrays |= {"route_experts": experts, "route_weights": weights.gather(1, order)}


def main() -> None:
    torch.set_num_threads(1)
    arrays: Arrays = {}
    window_only = run_layer(arrays)
    run_pooled_attention(arrays, window_only)
    run_overlapping_compressor(arrays)
    run_attention_core(arrays)
    run_indexer(arrays)
    run_single_operations(arrays)
    plain = {name: x.detach().numpy() for name, x in arrays.items()}
    np.savez_compressed(Path(__file__).with_name("v4_numbers.npz"), **plain)


if __name__ == "__main__":
    main()
