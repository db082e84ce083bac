"""Choices by score: the definition, ties lowest first, a pool that is everything while it fits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference import selection
from kernels.reference.selection import (
    candidate_entries,
    select_candidate_blocks,
    select_topk,
    topk_of_candidates,
)
from tests.kernels.golden_vectors import SOURCES, golden_vectors

MINUS_INFINITY = float("-inf")
# Few values, so that rows have many ties; the last two are equal once they are capped.
VALUES = st.sampled_from([MINUS_INFINITY, -1.5, -0.0, 0.0, 1e-30, 2.0, 3.395e38, 3.4e38])
ROWS = st.integers(0, 40).flatmap(
    lambda width: st.lists(st.lists(VALUES, min_size=width, max_size=width), min_size=1, max_size=4)
)


def tensor_of(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).view(len(rows), -1)


def filled(positions: list[int], length: int) -> list[int]:
    return positions + [-1] * (length - len(positions))


def plain_topk(scores: list[float], k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda g: (-scores[g], g))
    chosen = [g for g in order if scores[g] > MINUS_INFINITY][:k]
    return filled(sorted(chosen), k)


def plain_blocks(scores: list[float], visible: int, size: int, blocks: int) -> list[int]:
    """By the definition: a block is as good as its best entry, the newest is better than all."""
    largest_bf16 = math.ldexp(2 - 2**-7, 127)
    count = math.ceil(visible / size)
    best = [
        min(max(scores[b * size : b * size + size][: visible - b * size]), largest_bf16)
        for b in range(count)
    ]
    if count:
        best[-1] = math.inf
    return plain_topk(best, blocks)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_pool_is_the_golden_one(source: str, case: str) -> None:
    golden = golden_vectors("pool", source)
    scores_TG, visible_T, mask = (golden[f"{case}_{n}"] for n in ("logits", "visible", "mask"))
    size, blocks = golden[f"{case}_par"].tolist()
    pool_TB = select_candidate_blocks(scores_TG, visible_T, size, blocks)
    entries_TP = candidate_entries(pool_TB, visible_T, size)
    in_pool = torch.zeros(len(scores_TG), scores_TG.shape[1] + 1, dtype=torch.bool)
    in_pool.scatter_(1, torch.where(entries_TP < 0, scores_TG.shape[1], entries_TP), True)
    # The golden mask covers whole blocks, the entries behind the newest one too.
    is_visible = torch.arange(scores_TG.shape[1]) < visible_T[:, None]
    assert torch.equal(in_pool[:, :-1], mask & is_visible)


@pytest.mark.parametrize("source", SOURCES)
def test_entries_of_a_pool_are_the_golden_ones(source: str) -> None:
    golden = golden_vectors("pool", source)
    blocks_TB, visible_T = golden["compact_blocks"].long(), golden["compact_valid"]
    entries_TP = candidate_entries(blocks_TB, visible_T, 8)
    assert torch.equal((entries_TP >= 0).sum(-1), golden["compact_lens"].long())
    # Places in a list of whole blocks, and the entries they stand for, visible or not.
    places = golden["restore_in"].long()
    entries_TP = candidate_entries(blocks_TB, torch.full_like(visible_T, 1000), 8)
    is_in_list = (places >= 0) & (places < entries_TP.shape[1])
    entries = entries_TP.gather(1, places.clamp(0, entries_TP.shape[1] - 1))
    assert torch.equal(entries.masked_fill(~is_in_list, -1), golden["restore_out"].long())


@given(rows=ROWS, k=st.integers(0, 45))
def test_topk_is_the_head_of_a_sort_by_score_then_position(rows: list[list[float]], k: int) -> None:
    expected = torch.tensor([plain_topk(row, k) for row in rows]).view(len(rows), k)
    assert torch.equal(select_topk(tensor_of(rows), k), expected)


def test_topk_of_many_distinct_scores_is_that_of_a_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    scores_TG = torch.randn(30, 3000, generator=generator)
    expected = [plain_topk(row, 64) for row in scores_TG.tolist()]
    assert select_topk(scores_TG, 64).tolist() == expected


def test_topk_takes_the_lowest_positions_when_all_scores_are_equal() -> None:
    scores_TG = torch.zeros(3, 5000)
    assert torch.equal(select_topk(scores_TG, 100), torch.arange(100).expand(3, 100))


def test_topk_never_takes_a_score_that_is_not_a_number_and_other_rows_go_on() -> None:
    scores_TG = torch.arange(150.0).view(3, 50)
    scores_TG[1, 20:] = float("nan")
    scores_TG[2] = float("nan")
    chosen = select_topk(scores_TG, 4).tolist()
    assert chosen == [[46, 47, 48, 49], [16, 17, 18, 19], [-1, -1, -1, -1]]


def test_choices_do_not_depend_on_the_rows_beside_nor_on_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores_TG = torch.randint(-5, 5, (23, 90), generator=generator).float()
    visible_T = torch.arange(23) + 68
    scores_TG[torch.arange(90) >= visible_T[:, None]] = MINUS_INFINITY
    whole = select_topk(scores_TG, 20), select_candidate_blocks(scores_TG, visible_T, 8, 5)
    monkeypatch.setattr(selection, "PIECE_VALUES", 200)
    for size in (1, 4, 23):
        for first in range(0, 23, size):
            rows = slice(first, first + size)
            width = int(visible_T[rows].max())
            part, visible = scores_TG[rows, :width], visible_T[rows]
            assert torch.equal(select_topk(part, 20), whole[0][rows])
            assert torch.equal(select_candidate_blocks(part, visible, 8, 5), whole[1][rows])


@given(rows=ROWS, size=st.integers(1, 9), blocks=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_pool_is_the_best_blocks_by_their_best_entry(
    rows: list[list[float]], size: int, blocks: int, seed: int
) -> None:
    scores_TG = tensor_of(rows).clamp(min=-2)
    generator = torch.Generator().manual_seed(seed)
    width = scores_TG.shape[1]
    visible_T = torch.randint(0, width + 1, (len(rows),), generator=generator)
    # What lies behind the visible entries must not count, whatever it is.
    given_TG = scores_TG.masked_fill(torch.arange(width) >= visible_T[:, None], float("nan"))
    pool_TB = select_candidate_blocks(given_TG, visible_T, size, blocks)
    expected = [
        plain_blocks(row, visible, size, blocks)
        for row, visible in zip(scores_TG.tolist(), visible_T.tolist(), strict=True)
    ]
    assert pool_TB.tolist() == expected
    newest_T = (visible_T - 1).div(size, rounding_mode="floor")
    assert ((pool_TB == newest_T[:, None]).any(-1) | (visible_T == 0)).all()


def test_scores_of_blocks_are_capped_so_that_the_newest_stands_alone() -> None:
    # Both are above the largest BF16, so they are equal and the lower block is taken.
    scores_TG = torch.tensor([[3.395e38, 3.4e38, 3.4e38, -5.0]])
    pool_TB = select_candidate_blocks(scores_TG, torch.tensor([4]), 1, 2)
    assert pool_TB.tolist() == [[0, 3]]


@given(
    visible=st.integers(0, 40),
    size=st.integers(1, 9),
    blocks=st.lists(st.integers(0, 40), unique=True),
)
def test_entries_are_those_of_the_blocks_that_are_visible(
    visible: int, size: int, blocks: list[int]
) -> None:
    present = sorted(b for b in blocks if b * size < visible)
    listed = filled(present, len(present) + 2)
    entries = [b * size + e for b in present for e in range(size) if b * size + e < visible]
    given_entries = candidate_entries(torch.tensor([listed]), torch.tensor([visible]), size)
    assert given_entries.tolist() == [filled(entries, len(listed) * size)]


@given(rows=ROWS, k=st.integers(0, 12), seed=st.integers(0, 2**16))
def test_topk_of_candidates_is_the_topk_among_them(
    rows: list[list[float]], k: int, seed: int
) -> None:
    scores_TP = tensor_of(rows)
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, scores_TP.shape, generator=generator)
    candidates_TP = steps.cumsum(-1)
    is_none = torch.rand(scores_TP.shape, generator=generator) < 0.2
    candidates_TP[is_none] = -1
    expected = []
    for scores, candidates in zip(scores_TP.tolist(), candidates_TP.tolist(), strict=True):
        real = [p for p, candidate in enumerate(candidates) if candidate >= 0]
        chosen = plain_topk([scores[p] for p in real], k)
        expected.append([candidates[real[c]] if c >= 0 else -1 for c in chosen])
    assert topk_of_candidates(scores_TP, candidates_TP, k).tolist() == expected


@given(seed=st.integers(0, 2**16), entries=st.integers(1, 80), distinct=st.sampled_from([3, 1000]))
def test_choice_in_the_pool_is_the_full_search_while_everything_fits(
    seed: int, entries: int, distinct: int
) -> None:
    blocks, size, k = 5, 8, 16
    generator = torch.Generator().manual_seed(seed)
    visible_T = torch.arange(entries) + 1
    scores_TG = torch.randint(0, distinct, (entries, entries), generator=generator).float()
    scores_TG[torch.arange(entries) >= visible_T[:, None]] = MINUS_INFINITY
    own_TG = torch.randint(0, distinct, (entries, entries), generator=generator).float()
    own_TG[torch.arange(entries) >= visible_T[:, None]] = MINUS_INFINITY

    pool_TB = select_candidate_blocks(scores_TG, visible_T, size, blocks)
    candidates_TP = candidate_entries(pool_TB, visible_T, size)
    own_TP = own_TG.gather(1, candidates_TP.clamp(min=0))
    chosen_TK = topk_of_candidates(own_TP, candidates_TP, k)

    full_TK = select_topk(own_TG, k)
    fits = visible_T <= blocks * size
    assert torch.equal(chosen_TK[fits], full_TK[fits])
    for t in (~fits).nonzero().flatten().tolist():
        pool = plain_blocks(scores_TG[t].tolist(), t + 1, size, blocks)
        inside = [g if g // size in pool else None for g in range(t + 1)]
        own = [MINUS_INFINITY if g is None else own_TG[t, g].item() for g in inside]
        assert chosen_TK[t].tolist() == plain_topk(own, k)
