"""Our operations give the numbers of transformers' DeepSeek-V4, where V4.1 is the same.

The numbers come from tests/engine/golden/v4/make_v4_numbers.py; transformers is not needed here.
Tolerances are relative to the largest number of the expected tensor (at least 1): both sides are
float32 and sum in orders of their own.

Not compared, because V4.1 differs: which site uses a `pre` (V4.1's are shifted by one) and the head
gate; the norm of query heads (applied here by hand); the weight of a lone expert (V4 divides by the
sum, also for k = 1); `bias_image`; routing by a table; quantised window rows, entries and keys, so
that entries and keys here are exact in FP4; candidate pools and reuse of a top-k; index keys from
the latent (V4 pools them on their own); Engram and DSpark, which V4 does not have.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models.deepseek_v41.config import YarnScaling
from kernels.paged_rows import PagedRows
from kernels.reference.experts import run_experts, swiglu
from kernels.reference.index_entries import dequantise_index_entries, quantise_index_entries
from kernels.reference.index_scores import IndexKeys, score_candidates, score_entries
from kernels.reference.linear import linear
from kernels.reference.main_entries import dequantise_main_entries, quantise_main_entries
from kernels.reference.norm import rms_norm
from kernels.reference.rope import apply_rope, rope_frequencies, rope_tables
from kernels.reference.route import route_tokens
from kernels.reference.selection import select_topk
from kernels.reference.sparse_attention import sparse_attention
from kernels.reference.streams import StreamMix, collapse_streams, write_back_streams
from kernels.reference.tiles import plan_tiles
from tests.kernels.v4_operations import (
    AttentionSizes,
    Turned,
    attend_v4,
    feed_forward_v4,
    mix_site,
    pool_groups,
)

with np.load(Path(__file__).parents[1] / "engine" / "golden" / "v4" / "v4_numbers.npz") as file:
    NUMBERS = {name: torch.from_numpy(array) for name, array in file.items()}

OPERATION = 2e-6
"""Largest difference of one operation."""
SUBLAYER = 1e-5
"""Of several, one after the other."""
SIZES = AttentionSizes(heads=4, head_dim=32, groups=2, window=5, epsilon=1e-6)
SWIGLU_LIMIT = 1.5
ROUTED_SCALING = 1.5
ROPE_DIM = 8
YARN = YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=64)
REAL_YARN = YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=65_536)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), expected.isfinite())
    finite = expected.isfinite()
    difference = (actual[finite] - expected[finite]).abs().max()
    assert difference <= tolerance * max(1.0, float(expected[finite].abs().max()))


def attention_weights() -> dict[str, torch.Tensor]:
    names = {
        "q_a": "q_a_proj.weight",
        "q_norm": "q_a_norm.weight",
        "q_b": "q_b_proj.weight",
        "kv": "kv_proj.weight",
        "kv_norm": "kv_norm.weight",
        "out_a": "o_a_proj.weight",
        "out_b": "o_b_proj.weight",
        "sink": "sinks",
    }
    return {ours: NUMBERS[f"layer_w.self_attn.{theirs}"] for ours, theirs in names.items()}


def pool_weights(prefix: str) -> dict[str, torch.Tensor]:
    return {
        "kv": NUMBERS[f"{prefix}kv_proj.weight"],
        "gate": NUMBERS[f"{prefix}gate_proj.weight"],
        "bias": NUMBERS[f"{prefix}position_bias"],
        "norm": NUMBERS[f"{prefix}kv_norm.weight"],
    }


def paged(rows: torch.Tensor) -> PagedRows:
    """Rows in pages of 4 that lie in the pool in reverse order."""
    pages = -(-len(rows) // 4)
    padded = torch.cat([rows, rows.new_zeros(pages * 4 - len(rows), rows.shape[1])])
    return PagedRows(padded.view(pages, 4, -1).flip(0), torch.arange(pages).flip(0))


# Rows


def test_rms_norm_is_that_of_v4() -> None:
    x, weight = NUMBERS["norm_x"], NUMBERS["norm_w"]
    for row in range(len(x)):
        assert_near(rms_norm(x[row], weight, 1e-6), NUMBERS["norm_out"][row], OPERATION)
        assert_near(rms_norm(x[row], None, 1e-6), NUMBERS["norm_plain_out"][row], OPERATION)


@pytest.mark.parametrize(
    ("kind", "theta", "yarn"), [("main", 10_000.0, None), ("compress", 160_000.0, REAL_YARN)]
)
def test_rope_tables_are_those_of_v4_at_the_released_sizes(
    kind: str, theta: float, yarn: YarnScaling | None
) -> None:
    frequencies = rope_frequencies(64, theta, yarn)
    expected = NUMBERS[f"rope_real_{kind}_frequencies"]
    assert ((frequencies - expected).abs() <= 2e-7 * expected).all()
    # Tables are compared at equal frequencies: at a million tokens one bit of them is visible.
    cos, sin = rope_tables(expected, NUMBERS["rope_real_positions"])
    assert_near(cos, NUMBERS[f"rope_real_{kind}_cos"], 1e-6)
    assert_near(sin, NUMBERS[f"rope_real_{kind}_sin"], 1e-6)


def test_rope_turns_the_last_channels_in_pairs_and_back_as_in_v4() -> None:
    x, cos, sin = NUMBERS["rope_x"], NUMBERS["rope_cos"], NUMBERS["rope_sin"]
    assert_near(apply_rope(x, cos, sin), NUMBERS["rope_out"], OPERATION)
    assert_near(apply_rope(x, cos, sin, inverse=True), NUMBERS["rope_inverse_out"], OPERATION)


def test_rope_with_yarn_over_few_positions_is_that_of_v4() -> None:
    frequencies = rope_frequencies(ROPE_DIM, 160_000.0, YARN)
    cos, sin = rope_tables(frequencies, torch.arange(60, 71))
    assert_near(cos, NUMBERS["rope_cos"], OPERATION)
    assert_near(sin, NUMBERS["rope_sin"], OPERATION)


# Streams


@pytest.mark.parametrize(("site", "module"), [("attention", "attn_hc"), ("experts", "ffn_hc")])
def test_mix_of_a_site_and_its_collapse_are_those_of_v4(site: str, module: str) -> None:
    streams = NUMBERS[f"layer_{site}_site_streams"]
    mix = mix_of(streams, module)
    assert_near(mix.post, NUMBERS[f"layer_{site}_site_post"], OPERATION)
    assert_near(mix.comb, NUMBERS[f"layer_{site}_site_comb"], OPERATION)
    collapsed = collapse_streams(streams, mix.pre)
    assert_near(collapsed, NUMBERS[f"layer_{site}_site_collapsed"], OPERATION)


def mix_of(streams: torch.Tensor, module: str) -> StreamMix:
    return mix_site(
        streams,
        NUMBERS[f"layer_w.{module}.fn"],
        NUMBERS[f"layer_w.{module}.base"],
        NUMBERS[f"layer_w.{module}.scale"],
        iterations=20,
        stream_epsilon=1e-6,
        norm_epsilon=1e-6,
    )


@pytest.mark.parametrize(
    ("site", "module", "written", "result"),
    [
        ("attention", "attn_hc", "layer_attention_out", "layer_experts_site_streams"),
        ("experts", "ffn_hc", "layer_moe_out", "layer_out"),
    ],
)
def test_write_back_of_a_site_is_that_of_v4(
    site: str, module: str, written: str, result: str
) -> None:
    streams = NUMBERS[f"layer_{site}_site_streams"]
    out = write_back_streams(streams, NUMBERS[written], mix_of(streams, module))
    assert_near(out, NUMBERS[result], OPERATION)


# Experts


def test_router_chooses_by_the_biased_score_and_weighs_by_the_plain_one_as_in_v4() -> None:
    bias = NUMBERS["route_bias"]
    experts, weights = route_tokens(NUMBERS["route_logits"], bias, bias, None, 4, ROUTED_SCALING)
    assert torch.equal(experts, NUMBERS["route_experts"])
    assert_near(weights, NUMBERS["route_weights"], OPERATION)
    unbiased, _ = route_tokens(NUMBERS["route_logits"], 0 * bias, bias, None, 4, ROUTED_SCALING)
    assert not torch.equal(unbiased, experts), "the bias changes a choice, or this tests nothing"


def test_router_of_a_layer_is_that_of_v4() -> None:
    bias = NUMBERS["layer_w.mlp.gate.e_score_correction_bias"]
    experts, weights = route_tokens(
        NUMBERS["layer_router_logits"], bias, bias, None, 2, ROUTED_SCALING
    )
    assert torch.equal(experts, NUMBERS["layer_experts"])
    assert_near(weights, NUMBERS["layer_weights"], OPERATION)


def expert_weights() -> dict[str, torch.Tensor]:
    gate, up = NUMBERS["layer_w.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    shared = "layer_w.mlp.shared_experts"
    return {
        "gate": gate,
        "up": up,
        "down": NUMBERS["layer_w.mlp.experts.down_proj"],
        "shared_gate": NUMBERS[f"{shared}.gate_proj.weight"],
        "shared_up": NUMBERS[f"{shared}.up_proj.weight"],
        "shared_down": NUMBERS[f"{shared}.down_proj.weight"],
    }


def experts_input() -> torch.Tensor:
    collapsed = NUMBERS["layer_experts_site_collapsed"]
    return rms_norm(collapsed, NUMBERS["layer_w.post_attention_layernorm.weight"], 1e-6)


def test_experts_with_their_limit_are_those_of_v4() -> None:
    x_TE = experts_input()
    chosen, by = NUMBERS["layer_experts"], NUMBERS["layer_weights"]
    out, routed = feed_forward_v4(x_TE, chosen, by, expert_weights(), SWIGLU_LIMIT)
    assert_near(routed, NUMBERS["layer_routed_out"], SUBLAYER)
    assert_near(out, NUMBERS["layer_moe_out"], SUBLAYER)


def test_limit_of_the_experts_matters_in_these_numbers() -> None:
    weights, x_TE = expert_weights(), experts_input()
    tiles = plan_tiles(torch.arange(len(x_TE)))
    gate = linear(x_TE, weights["shared_gate"], tiles)
    assert (gate > SWIGLU_LIMIT).any()
    assert not torch.equal(swiglu(gate, gate, SWIGLU_LIMIT), swiglu(gate, gate, 1e9))
    chosen, by = NUMBERS["layer_experts"], NUMBERS["layer_weights"]
    stacks = (weights["gate"], weights["up"], weights["down"])
    unlimited = run_experts(x_TE, chosen, by, *stacks, 1e9, tiles)
    assert (unlimited - NUMBERS["layer_routed_out"]).abs().max() > 1e-2


# Attention


def test_attention_over_a_window_is_that_of_v4() -> None:
    positions = NUMBERS["layer_positions"]
    x_TE = rms_norm(
        NUMBERS["layer_attention_site_collapsed"], NUMBERS["layer_w.input_layernorm.weight"], 1e-6
    )
    turned = Turned(*rope_tables(rope_frequencies(ROPE_DIM, 10_000.0, None), positions))
    out, values = attend_v4(x_TE, positions, turned, SIZES, attention_weights())
    assert_near(values.reshape(NUMBERS["layer_values"].shape), NUMBERS["layer_values"], SUBLAYER)
    assert_near(out, NUMBERS["layer_attention_out"], SUBLAYER)


def test_groups_of_two_are_pooled_as_in_v4_and_attended_to() -> None:
    x_TE = NUMBERS["pool_x"]
    frequencies = rope_frequencies(ROPE_DIM, 160_000.0, YARN)
    latents = pool_groups(x_TE, 2, pool_weights("pool_w."), 1e-6, is_overlapping=False)
    # An entry stands at the first token of its group.
    entries = apply_rope(latents, *rope_tables(frequencies, torch.arange(len(latents)) * 2))
    assert_near(entries, NUMBERS["pool_entries"], SUBLAYER)
    positions = torch.arange(len(x_TE))
    groups = torch.arange(len(entries)).expand(len(x_TE), -1)
    selected = torch.where(groups < ((positions + 1) // 2)[:, None], groups, -1)
    turned = Turned(*rope_tables(frequencies, positions))
    out, _ = attend_v4(x_TE, positions, turned, SIZES, attention_weights(), entries, selected)
    assert_near(out, NUMBERS["pool_out"], SUBLAYER)


def test_softmax_over_eight_slots_pools_the_overlapping_groups_of_v4() -> None:
    x_TE = NUMBERS["overlap_x"]
    latents = pool_groups(x_TE, 4, pool_weights("overlap_w."), 1e-6, is_overlapping=True)
    frequencies = rope_frequencies(ROPE_DIM, 160_000.0, YARN)
    entries = apply_rope(latents, *rope_tables(frequencies, torch.arange(len(latents)) * 4))
    assert_near(entries, NUMBERS["overlap_entries"], SUBLAYER)


def core_lists() -> tuple[torch.Tensor, torch.Tensor]:
    """What each query sees, as lists: window rows and entries, -1 for those it does not see."""
    is_seen = NUMBERS["core_is_seen"]
    numbers = torch.where(is_seen, torch.arange(is_seen.shape[1]), -1)
    window = len(NUMBERS["core_window"])
    entries = numbers[:, window:]
    return numbers[:, :window], torch.where(entries < 0, -1, entries - window)


def test_one_softmax_with_a_sink_over_window_rows_and_packed_entries_is_that_of_v4() -> None:
    packed = quantise_main_entries(NUMBERS["core_entries"])
    assert torch.equal(dequantise_main_entries(packed), NUMBERS["core_entries"])
    window_index, selected = core_lists()
    q_THD = NUMBERS["core_q"]
    out = sparse_attention(
        q_THD,
        NUMBERS["core_window"],
        window_index,
        paged(packed),
        selected,
        NUMBERS["core_sinks"],
        SIZES.head_dim**-0.5,
        plan_tiles(torch.arange(len(q_THD))),
    )
    assert_near(out, NUMBERS["core_out"], OPERATION)
    assert (out[0] == 0).all(), "a query that sees nothing"


def index_keys() -> IndexKeys:
    data, scales = quantise_index_entries(NUMBERS["index_keys"])
    assert torch.equal(dequantise_index_entries(data, scales), NUMBERS["index_keys"])
    return IndexKeys(paged(data), paged(scales))


def index_queries() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, I, J] after RoPE, and head weights [T, I] with both scales."""
    tiles = plan_tiles(torch.arange(len(NUMBERS["index_x"])))
    q_T = linear(NUMBERS["index_latent"], NUMBERS["index_w.q_b_proj.weight"], tiles)
    heads, channels = NUMBERS["index_q"].shape[1:]
    frequencies = rope_frequencies(ROPE_DIM, 160_000.0, YARN)
    tables = rope_tables(frequencies, tiles.positions_T)
    w_TI = linear(NUMBERS["index_x"], NUMBERS["index_w.weights_proj.weight"], tiles)
    return apply_rope(q_T.view(-1, heads, channels), *tables), w_TI * (channels * heads) ** -0.5


def test_queries_scores_and_topk_of_the_indexer_are_those_of_v4() -> None:
    q_TIJ, w_TI = index_queries()
    assert_near(q_TIJ, NUMBERS["index_q"], OPERATION)
    visible = NUMBERS["index_visible"]
    tiles = plan_tiles(torch.arange(len(q_TIJ)))
    scores = score_entries(q_TIJ, w_TI, index_keys(), visible, tiles)
    entry = torch.arange(scores.shape[1])
    expected = NUMBERS["index_scores"][:, : scores.shape[1]]
    expected = expected.masked_fill(entry >= visible[:, None], float("-inf"))
    assert_near(scores, expected, OPERATION)
    chosen = select_topk(scores, NUMBERS["index_topk"].shape[1])
    assert sorted_sets(chosen) == sorted_sets(NUMBERS["index_topk"])


def test_scores_of_listed_entries_are_those_of_v4() -> None:
    q_TIJ, w_TI = index_queries()
    visible = NUMBERS["index_visible"]
    entry = torch.arange(len(NUMBERS["index_keys"])).expand(len(q_TIJ), -1)
    listed = torch.where(entry < visible[:, None], entry, -1).flip(1)
    tiles = plan_tiles(torch.arange(len(q_TIJ)))
    scores = score_candidates(q_TIJ, w_TI, index_keys(), listed, tiles)
    expected = NUMBERS["index_scores"].masked_fill(entry >= visible[:, None], float("-inf"))
    assert_near(scores, expected.flip(1), OPERATION)


def sorted_sets(chosen_TK: torch.Tensor) -> list[list[int]]:
    """V4 lists the best first; ours are ascending. -1 is no choice."""
    return [sorted(entry for entry in row if entry >= 0) for row in chosen_TK.tolist()]
