"""Index scores: the definition, exact bits per query and key, and work bounded by what is asked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import index_scores
from kernels.reference.index_entries import (
    dequantise_index_entries,
    quantise_index_entries,
    round_index_entries,
)
from kernels.reference.index_scores import IndexKeys, score_candidates, score_entries
from kernels.reference.selection import select_topk
from kernels.reference.tiles import plan_tiles
from tests.kernels.golden_attention import TOPK
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.paged_pool import RecordedRows, put_keys

MINUS_INFINITY = float("-inf")


class Case:
    """Queries at the end of a sequence of G entries of ratio 1."""

    def __init__(
        self, queries: int, heads: int, channels: int, entries: int, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        magnitudes = 2.0 ** torch.randint(-8, 9, (entries, 1), generator=generator)
        raw = torch.randn(entries, channels, generator=generator) * magnitudes
        self.packed = quantise_index_entries(raw)
        self.keys = put_keys(raw, 8, generator)
        raw = torch.randn(queries, heads, channels, generator=generator)
        self.q_TIJ = round_index_entries(raw)
        self.weights_TI = torch.randn(queries, heads, generator=generator)
        self.visible_T = (torch.arange(queries) + 1 + entries - queries).clamp(min=0)

    def score(self, rows: slice = slice(None), keys: IndexKeys | None = None) -> torch.Tensor:
        visible_T = self.visible_T[rows]
        tiles = plan_tiles(visible_T)
        return score_entries(
            self.q_TIJ[rows], self.weights_TI[rows], keys or self.keys, visible_T, tiles
        )

    def score_listed(self, candidates_TP: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        tiles = plan_tiles(self.visible_T[rows])
        q_TIJ, weights_TI = self.q_TIJ[rows], self.weights_TI[rows]
        return score_candidates(q_TIJ, weights_TI, self.keys, candidates_TP[rows], tiles)

    def plain_scores(self) -> torch.Tensor:
        """float64 [T, G], from the definition."""
        keys_GJ = dequantise_index_entries(*self.packed).double()
        scores_TG = torch.full((len(self.q_TIJ), len(keys_GJ)), MINUS_INFINITY).double()
        for t, visible in enumerate(self.visible_T.tolist()):
            for g in range(visible):
                dots_I = (self.q_TIJ[t].double() * keys_GJ[g]).sum(-1)
                scores_TG[t, g] = (dots_I.clamp(min=0) * self.weights_TI[t].double()).sum()
        return scores_TG[:, : int(self.visible_T.max())]


def same_bits(given_scores: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(given_scores.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("source", SOURCES)
def test_scores_and_choices_are_the_golden_ones(source: str) -> None:
    golden = golden_vectors("index", source)
    for layer in {name.split("_")[0] for name in golden}:
        q_TIJ, weights_TI, keys_GJ, visible_T, expected_TG, topk_TK, gap_T = (
            golden[f"{layer}_{name}"]
            for name in ("q", "weights", "keys", "visible", "scores", "topk", "gap")
        )
        keys = put_keys(keys_GJ, 8, torch.Generator().manual_seed(0))
        read_GJ = keys.read(torch.arange(len(keys_GJ)), torch.float32)
        assert torch.equal(read_GJ, keys_GJ), "values on the grid must survive the cache"
        scores_TG = score_entries(q_TIJ, weights_TI, keys, visible_T, plan_tiles(visible_T))
        expected_TG = expected_TG[:, : scores_TG.shape[1]]
        assert torch.equal(scores_TG.isinf(), expected_TG.isinf())
        assert torch.allclose(scores_TG, expected_TG, rtol=1e-5, atol=1e-5)
        assert (gap_T > 1e-3).all()
        assert torch.equal(select_topk(scores_TG, TOPK), topk_TK.long())


@pytest.mark.parametrize(("heads", "channels"), [(1, 32), (3, 32), (16, 64), (5, 128)])
def test_score_is_the_weighed_sum_of_positive_products(heads: int, channels: int) -> None:
    case = Case(9, heads, channels, 20)
    expected = case.plain_scores()
    assert torch.allclose(case.score().double(), expected, rtol=1e-5, atol=1e-5)


def test_score_of_one_head_is_exact() -> None:
    case = Case(50, 1, 32, 300)
    case.weights_TI.fill_(1)
    keys_GJ = dequantise_index_entries(*case.packed).double()
    # 53 bits hold every product and sum, so the conversion finds out whether 24 held them too.
    exact_TG = (case.q_TIJ[:, 0].double() @ keys_GJ.T).clamp(min=0)
    scores_TG = case.score()
    is_visible = torch.arange(300) < case.visible_T[:, None]
    assert torch.equal(scores_TG[is_visible].double(), exact_TG[is_visible])
    assert (scores_TG[~is_visible] == MINUS_INFINITY).all()
    assert (~is_visible).any()


@pytest.mark.parametrize(("heads", "channels"), [(5, 128), (32, 128)])
def test_score_has_the_bits_of_the_order_that_is_written_out(heads: int, channels: int) -> None:
    case = Case(9, heads, channels, 40)
    # Groups of sizes so unlike that sums of three are rounded, and another order rounds otherwise.
    sizes_J = torch.tensor([1.0, 2.0**12, 2.0**-12, 2.0**6]).repeat_interleave(32)
    case.q_TIJ = round_index_entries(case.q_TIJ * sizes_J)
    keys_GJ = dequantise_index_entries(*case.packed).double()
    q_groups = case.q_TIJ.double().view(9, heads, -1, 32).unbind(-2)
    key_groups = keys_GJ.view(40, -1, 32).unbind(-2)
    # In 64 bits the product of one group is exact, and so few bits are a float32 number.
    dots_TIG = torch.zeros(9, heads, 40)
    for q_group, key_group in zip(q_groups, key_groups, strict=True):
        dots_TIG += (q_group @ key_group.mT).float()
    parts = list((dots_TIG.relu() * case.weights_TI[..., None]).unbind(1))
    while len(parts) > 1:
        half = (len(parts) + 1) // 2
        pairs = zip(parts, parts[half:], strict=False)
        parts = [first + second for first, second in pairs] + parts[len(parts) - half : half]
    scores_TG = case.score()
    is_visible = torch.arange(40) < case.visible_T[:, None]
    assert torch.equal(scores_TG[is_visible], parts[0][is_visible])
    whole_TIG = (case.q_TIJ.double() @ keys_GJ.T).float()
    assert not torch.equal(whole_TIG, dots_TIG), "with no rounding, no order would be seen"


@pytest.mark.parametrize(("heads", "channels"), [(1, 32), (3, 32), (16, 64), (32, 128)])
def test_scores_keep_their_bits_in_any_chunk_of_queries(heads: int, channels: int) -> None:
    case = Case(21, heads, channels, 70)
    whole = case.score()
    for size in (1, 2, 8, 20):
        for first in range(0, 21, size):
            rows = slice(first, first + size)
            part = case.score(rows)
            assert same_bits(part, whole[rows, : part.shape[1]].contiguous())
            assert (whole[rows, part.shape[1] :] == MINUS_INFINITY).all()


def test_scores_keep_their_bits_when_contexts_are_cut_into_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(21, 5, 64, 70)
    whole = case.score()
    listed = torch.arange(70).expand(21, 70)
    for piece_keys, piece_values in ((1, 1), (7, 100), (64, 1000)):
        monkeypatch.setattr(index_scores, "PIECE_KEYS", piece_keys)
        monkeypatch.setattr(index_scores, "PIECE_VALUES", piece_values)
        assert same_bits(case.score(), whole)
        is_visible = whole > MINUS_INFINITY
        assert same_bits(case.score_listed(listed)[is_visible], whole[is_visible])


def test_scores_keep_their_bits_when_more_blocks_lie_behind() -> None:
    case = Case(6, 16, 32, 40)
    whole = case.score()
    keys_GJ = dequantise_index_entries(*case.packed)
    later_GJ = torch.full((100, 32), 6.0)
    longer = put_keys(torch.cat([keys_GJ, later_GJ]), 16, torch.Generator().manual_seed(5))
    assert same_bits(case.score(keys=longer), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_keep_their_bits_with_any_number_of_threads(threads: int) -> None:
    case = Case(40, 16, 128, 400)
    whole = case.score()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert same_bits(case.score(), whole)
        assert same_bits(case.score(slice(39, 40)), whole[39:])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30)
@given(
    queries=st.integers(1, 20),
    heads=st.sampled_from([1, 2, 5, 16]),
    channels=st.sampled_from([32, 64, 128]),
    listed=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)
def test_candidates_have_the_bits_of_all_entries(
    queries: int, heads: int, channels: int, listed: int, seed: int
) -> None:
    case = Case(queries, heads, channels, 64, seed=seed)
    whole = case.score()
    generator = torch.Generator().manual_seed(seed)
    # In any order, some twice, some none.
    candidates_TP = torch.randint(-1, whole.shape[1], (queries, listed), generator=generator)
    candidates_TP[candidates_TP >= case.visible_T[:, None]] = -1
    expected = whole.gather(1, candidates_TP.clamp(min=0))
    expected[candidates_TP < 0] = MINUS_INFINITY
    assert same_bits(case.score_listed(candidates_TP), expected)
    last = slice(queries - 1, queries)
    assert same_bits(case.score_listed(candidates_TP, last), expected[last].contiguous())


def test_hidden_entries_are_not_looked_at() -> None:
    case = Case(5, 4, 32, 30)
    whole = case.score()
    # The scores that nothing may see yet read as NaN.
    case.keys.scales.write(30 - 5 + 1, torch.full((4, 1), 0xFF, dtype=torch.uint8))
    first = case.score(slice(0, 1))
    assert same_bits(first, whole[:1, :26].contiguous())
    hidden_too = case.score()
    assert not hidden_too[0].isnan().any()
    assert hidden_too[4].isnan().sum() == 4


def test_nothing_is_scored_when_nothing_is_visible() -> None:
    case = Case(3, 4, 32, 3)
    case.visible_T.zero_()
    assert case.score().shape == (3, 0)
    assert case.score(slice(0, 0)).shape == (0, 0)
    none = torch.full((3, 4), -1)
    assert (case.score_listed(none) == MINUS_INFINITY).all()


def test_each_key_of_a_long_context_is_unpacked_once_and_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_scores, "PIECE_KEYS", 16)
    case = Case(40, 4, 32, 100)
    case.score()
    assert isinstance(case.keys.data, RecordedRows)
    reads = case.keys.data.reads
    assert max(len(rows) for rows in reads) == 16
    assert torch.equal(torch.cat(reads), torch.arange(100))


def test_only_candidates_are_unpacked_and_each_once() -> None:
    case = Case(3, 4, 32, 1000)
    candidates_TP = torch.tensor([[5, 900, -1], [5, 6, 7], [-1, -1, 900]])
    case.score_listed(candidates_TP)
    assert isinstance(case.keys.data, RecordedRows)
    assert torch.equal(torch.cat(case.keys.data.reads), torch.tensor([5, 6, 7, 900]))
