"""Our attention, pooling and indexer give the numbers of transformers' DeepSeek-V4.

What is not compared, and why, stands in test_v4_numbers.py.
"""

import torch

from kernels.paged_rows import PagedRows
from kernels.reference.index_entries import dequantise_index_entries, quantise_index_entries
from kernels.reference.index_scores import IndexKeys, score_candidates, score_entries
from kernels.reference.linear import linear
from kernels.reference.main_entries import dequantise_main_entries, quantise_main_entries
from kernels.reference.norm import rms_norm
from kernels.reference.rope import apply_rope, rope_frequencies, rope_tables
from kernels.reference.selection import select_topk
from kernels.reference.sparse_attention import sparse_attention
from kernels.reference.tiles import plan_tiles
from tests.kernels.v4_numbers import NUMBERS, OPERATION, ROPE_DIM, SUBLAYER, YARN, assert_near
from tests.kernels.v4_operations import AttentionSizes, Turned, attend_v4, pool_groups

SIZES = AttentionSizes(heads=4, head_dim=32, groups=2, window=5, epsilon=1e-6)


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
