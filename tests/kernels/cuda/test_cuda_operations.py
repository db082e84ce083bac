"""The back end for GPUs against the reference: choices and index scores bit by bit, the rest within
rounding. Run on the CPU, and once more on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cuda import engram, experts, index_scores, linear, norm, selection, streams
from kernels.cuda import sparse_attention as attention
from kernels.cuda.operations import CUDA_OPERATIONS
from kernels.operations import REFERENCE
from kernels.paged_rows import PagedRows
from kernels.reference.index_entries import quantise_index_entries, round_index_entries
from kernels.reference.index_scores import IndexKeys
from kernels.reference.main_entries import quantise_main_entries
from kernels.reference.tiles import plan_tiles
from tests.kernels.paged_pool import put_in_pages

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
NONE = float("-inf")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def normal(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def assert_near(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def on(device: torch.device, rows: PagedRows) -> PagedRows:
    return PagedRows(rows.pages.to(device), rows.block_ids.to(device))


@pytest.mark.parametrize("rows", [1, 255, 256, 300])
def test_product_is_that_of_the_reference(rows: int, device: torch.device) -> None:
    x, weight = normal(rows, 48, seed=1, device=device), normal(20, 48, seed=2, device=device)
    tiles = plan_tiles(torch.arange(rows, device=device))
    assert_near(linear.linear(x, weight, tiles), REFERENCE.linear(x, weight, tiles))


def test_product_with_short_weights_is_float32(device: torch.device) -> None:
    x, weight = normal(5, 64, seed=1, device=device), normal(8, 64, seed=2, device=device)
    tiles = plan_tiles(torch.arange(5, device=device))
    short = linear.linear(x, weight.bfloat16(), tiles)
    assert short.dtype == torch.float32
    torch.testing.assert_close(short, x @ weight.T, rtol=0.05, atol=0.3)


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (1, 3), (70, 2), (200, 3)])
def test_experts_are_those_of_the_reference(
    rows: int, k: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "PIECE_ROWS", 128)
    count, hidden, inner = 7, 24, 20
    scores = torch.rand(rows, count, generator=torch.Generator().manual_seed(4))
    scores[:, 3] = 0  # an expert that nobody goes to, but where all are needed
    chosen = scores.argsort(dim=1, descending=True)[:, :k].sort(dim=1).values.to(device)
    arguments = (
        normal(rows, hidden, seed=1, device=device),
        chosen,
        normal(rows, k, seed=5, device=device).abs(),
        normal(count, inner, hidden, seed=6, device=device),
        normal(count, inner, hidden, seed=7, device=device),
        normal(count, hidden, inner, seed=8, device=device),
        1.5,
        plan_tiles(torch.arange(rows, device=device)),
    )
    assert_near(experts.run_experts(*arguments), REFERENCE.run_experts(*arguments))


@given(
    choices=st.integers(1, 6).flatmap(
        lambda count: st.lists(st.integers(0, count - 1), min_size=1, max_size=300)
    )
)
@settings(max_examples=30, deadline=None)
def test_each_row_has_a_slot_of_its_own_in_a_tile_of_its_expert(choices: list[int]) -> None:
    chosen = torch.tensor(choices)[:, None]
    plan = experts.plan_expert_tiles(chosen, 6)
    slots = plan.slots_RK.flatten()
    assert len(set(slots.tolist())) == len(choices)
    assert torch.equal(plan.expert_of_tile[slots // experts.TILE_ROWS], chosen.flatten())
    assert torch.equal(plan.rows_S[slots], torch.arange(len(choices)))
    assert int((plan.rows_S < len(choices)).sum()) == len(choices)
    assert len(plan.expert_of_tile) % experts.BATCH_TILES == 0


SCORES = st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, NONE, float("nan"), float("inf")])


@given(
    scores=st.integers(0, 20).flatmap(
        lambda width: st.lists(
            st.lists(SCORES, min_size=width, max_size=width), min_size=1, max_size=6
        )
    ),
    k=st.integers(0, 24),
)
@settings(max_examples=200, deadline=None)
def test_choice_is_that_of_the_reference(scores: list[list[float]], k: int) -> None:
    scores_TG = torch.tensor(scores).view(len(scores), -1)
    assert torch.equal(selection.select_topk(scores_TG, k), REFERENCE.select_topk(scores_TG, k))


@pytest.mark.parametrize("width", [0, 5, 64, 333])
def test_choices_of_blocks_and_in_them_are_those_of_the_reference(
    width: int, device: torch.device
) -> None:
    # Whole numbers, so that many are equal.
    scores_TG = normal(40, width, seed=3, device=device).mul(2).round()
    visible_T = (torch.arange(40, device=device) * 9).clamp(max=width)
    scores_TG[torch.arange(width, device=device) >= visible_T[:, None]] = NONE
    blocks = [
        operations.select_candidate_blocks(scores_TG, visible_T, 8, 6)
        for operations in (CUDA_OPERATIONS, REFERENCE)
    ]
    assert torch.equal(*blocks)
    candidates = REFERENCE.candidate_entries(blocks[1], visible_T, 8)
    places = candidates.clamp(min=0, max=max(width - 1, 0))
    listed = scores_TG.gather(1, places) if width else places.float()
    chosen = [
        operations.topk_of_candidates(listed, candidates, 11)
        for operations in (CUDA_OPERATIONS, REFERENCE)
    ]
    assert torch.equal(*chosen)


@pytest.mark.parametrize("piece_values", [1, 3000, index_scores.PIECE_VALUES])
@pytest.mark.parametrize("heads", [1, 5, 8])
def test_index_scores_have_the_bits_of_the_reference(
    heads: int, piece_values: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scores, "PIECE_VALUES", piece_values)
    generator = torch.Generator().manual_seed(1)
    magnitudes = 2.0 ** torch.randint(-8, 9, (50, 1), generator=generator)
    data, scales = quantise_index_entries(torch.randn(50, 96, generator=generator) * magnitudes)
    packed = [put_in_pages(rows, 8, generator) for rows in (data, scales)]
    q_TIJ = round_index_entries(torch.randn(20, heads, 96, generator=generator))
    weights_TI = torch.randn(20, heads, generator=generator)
    visible_T = torch.arange(20) * 2
    candidates_TP = torch.randint(-1, 50, (20, 13), generator=generator)
    tiles = plan_tiles(torch.arange(20))
    keys = IndexKeys(*packed)
    expected = REFERENCE.score_entries(q_TIJ, weights_TI, keys, visible_T, tiles)
    listed = REFERENCE.score_candidates(q_TIJ, weights_TI, keys, candidates_TP, tiles)

    there = IndexKeys(*(on(device, rows) for rows in packed))
    q_TIJ, weights_TI, visible_T = (x.to(device) for x in (q_TIJ, weights_TI, visible_T))
    for width in (None, 38):
        scores = index_scores.score_entries(q_TIJ, weights_TI, there, visible_T, tiles, width=width)
        assert torch.equal(scores.cpu(), expected)
    scores = index_scores.score_candidates(
        q_TIJ, weights_TI, there, candidates_TP.to(device), tiles
    )
    assert torch.equal(scores.cpu(), listed)


def test_no_query_and_nothing_visible_give_no_scores() -> None:
    generator = torch.Generator().manual_seed(1)
    data, scales = quantise_index_entries(torch.randn(8, 32, generator=generator))
    keys = IndexKeys(put_in_pages(data, 8, generator), put_in_pages(scales, 8, generator))
    nobody = torch.zeros(0, 2, 32), torch.zeros(0, 2), keys, torch.zeros(0, dtype=torch.int64)
    assert index_scores.score_entries(*nobody, plan_tiles(nobody[-1])).shape == (0, 0)
    blind_T = torch.zeros(3, dtype=torch.int64)
    blind = torch.zeros(3, 2, 32), torch.zeros(3, 2), keys, blind_T
    assert index_scores.score_entries(*blind, plan_tiles(blind_T)).shape == (3, 0)


@pytest.mark.parametrize("queries", [1, 5, 64, 70])
@pytest.mark.parametrize("chosen", [0, 4, 30])
def test_attention_is_that_of_the_reference(
    queries: int, chosen: int, device: torch.device
) -> None:
    heads, channels, window, entries = 3, 64, 16, 40
    generator = torch.Generator().manual_seed(2)
    packed = quantise_main_entries(torch.randn(entries, channels, generator=generator) * 4)
    rows = put_in_pages(packed, 8, generator)
    selected_TS = torch.randint(-1, entries, (queries, chosen), generator=generator)
    index_TW = (torch.arange(queries)[:, None] + torch.arange(1 - window, 1)).clamp(min=-1)
    q_THD = torch.randn(queries, heads, channels, generator=generator)
    window_ND = torch.randn(queries, channels, generator=generator)
    sink_H = torch.randn(heads, generator=generator)
    tiles = plan_tiles(torch.arange(queries))
    for has_entries in (True, False):
        there = (rows, selected_TS) if has_entries else (None, None)
        expected = REFERENCE.sparse_attention(
            q_THD, window_ND, index_TW, *there, sink_H, 0.125, tiles
        )
        found = attention.sparse_attention(
            q_THD.to(device),
            window_ND.to(device),
            index_TW.to(device),
            on(device, rows) if has_entries else None,
            selected_TS.to(device) if has_entries else None,
            sink_H.to(device),
            0.125,
            tiles,
        )
        assert_near(found.cpu(), expected)


def test_query_that_sees_nothing_gives_zeros() -> None:
    nothing = torch.full((2, 4), -1)
    q_THD = torch.ones(2, 3, 32)
    found = attention.sparse_attention(
        q_THD, torch.ones(5, 32), nothing, None, None, torch.zeros(3), 1.0, plan_tiles(nothing[0])
    )
    assert torch.equal(found, torch.zeros(2, 3, 32))


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("n", [1, 4])
def test_streams_are_mixed_as_by_the_reference(rows: int, n: int, device: torch.device) -> None:
    hidden = 32
    x_TNE = normal(rows, n, hidden, seed=1, device=device)
    y_TE = normal(rows, hidden, seed=2, device=device)
    width = (2 + n) * n
    projection = normal(width, n * hidden, seed=3, device=device)
    base, scale = normal(width, seed=4, device=device), normal(3, seed=5, device=device)
    tiles = plan_tiles(torch.arange(rows, device=device))
    projected = streams.project_streams(x_TNE, projection, 1e-20, tiles)
    assert_near(projected, REFERENCE.project_streams(x_TNE, projection, 1e-20, tiles))
    mix = streams.mix_streams(projected, base, scale, 20, 1e-6)
    expected = REFERENCE.mix_streams(projected, base, scale, 20, 1e-6)
    for name in ("pre", "post", "comb"):
        assert_near(getattr(mix, name), getattr(expected, name))
    found = streams.write_back_streams(x_TNE, y_TE, mix)
    assert_near(found, REFERENCE.write_back_streams(x_TNE, y_TE, expected))


@pytest.mark.parametrize("rows", [1, 30])
def test_gate_of_table_rows_is_that_of_the_reference(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engram, "PIECE_CHANNELS", 20)
    n, hidden = 4, 48
    arguments = (
        normal(rows, n, hidden, seed=1, device=device),
        normal(rows, (n + 1) * hidden, seed=2, device=device),
        normal(n, hidden, seed=3, device=device),
        normal(n, hidden, seed=4, device=device),
    )
    for masked in (None, torch.arange(rows, device=device) % 3 == 0):
        found = engram.gate_engram(*arguments, masked, 1e-20)
        assert_near(found, REFERENCE.gate_engram(*arguments, masked, 1e-20))


def test_norm_is_that_of_the_reference_and_keeps_zeros(device: torch.device) -> None:
    x, weight = normal(9, 64, seed=1, device=device), normal(64, seed=2, device=device)
    x[3] = 0
    for one in (weight, weight.bfloat16(), None):
        found = norm.rms_norm(x, one, 1e-20)
        assert found.dtype == torch.float32
        assert_near(found, REFERENCE.rms_norm(x, one, 1e-20))
        assert not found[3].any()
