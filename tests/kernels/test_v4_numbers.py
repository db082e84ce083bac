"""Our operations give the numbers of transformers' DeepSeek-V4, where V4.1 is the same.

The numbers come from tests/engine/golden/v4/make_v4_numbers.py; transformers is not needed here.

Not compared, because V4.1 differs: which site uses a `pre` (V4.1's are shifted by one) and the head
gate; the norm of query heads (applied here by hand); the weight of a lone expert (V4 divides by the
sum, also for k = 1); `bias_image`; routing by a table; quantised window rows, entries and keys, so
that entries and keys here are exact in FP4; candidate pools and reuse of a top-k; index keys from
the latent (V4 pools them on their own); Engram and DSpark, which V4 does not have.
"""

import pytest
import torch

from engine.models.deepseek_v41.config import YarnScaling
from kernels.reference.experts import run_experts, swiglu
from kernels.reference.linear import linear
from kernels.reference.norm import rms_norm
from kernels.reference.rope import apply_rope, rope_frequencies, rope_tables
from kernels.reference.route import route_tokens
from kernels.reference.streams import StreamMix, collapse_streams, write_back_streams
from kernels.reference.tiles import plan_tiles
from tests.kernels.v4_numbers import NUMBERS, OPERATION, ROPE_DIM, SUBLAYER, YARN, assert_near
from tests.kernels.v4_operations import feed_forward_v4, mix_site

SWIGLU_LIMIT = 1.5
ROUTED_SCALING = 1.5
REAL_YARN = YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_positions=65_536)


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
