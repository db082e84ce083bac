"""Attention over listed keys: the definition, exact bits of a query, only what is listed read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import sparse_attention as module
from kernels.reference.main_entries import dequantise_main_entries, quantise_main_entries
from kernels.reference.sparse_attention import sparse_attention
from kernels.reference.tiles import plan_tiles
from tests.kernels.golden_attention import WINDOW
from tests.kernels.golden_vectors import SOURCES, golden_vectors
from tests.kernels.paged_pool import put_in_pages
from tests.kernels.row_invariance import RecordedProducts, threads_keep_bits

SHAPES = [(1, 32, 8, 4), (4, 64, 128, 64), (3, 32, 5, 0), (16, 128, 16, 16)]
"""Heads, channels, window slots, chosen entries."""


class Case:
    """Queries at positions 0 .. T - 1 of a sequence with G entries, all kinds of lists."""

    def __init__(
        self, queries: int, shape: tuple[int, int, int, int], entries: int = 40, seed: int = 0
    ) -> None:
        heads, channels, window, chosen = shape
        generator = torch.Generator().manual_seed(seed)
        self.q_THD = torch.randn(queries, heads, channels, generator=generator)
        self.rows_ND = torch.randn(queries, channels, generator=generator)
        index_TW = torch.arange(queries)[:, None] + torch.arange(1 - window, 1)
        self.index_TW = index_TW.clamp(min=-1)
        self.packed = quantise_main_entries(torch.randn(entries, channels, generator=generator) * 4)
        self.entries = put_in_pages(self.packed, 8, generator)
        # Not ascending and with repetitions: neither is asked for.
        self.selected_TS = torch.randint(-1, entries, (queries, chosen), generator=generator)
        self.sink_H = torch.randn(heads, generator=generator)
        self.scale = channels**-0.5

    def attend(self, rows: slice = slice(None), **changes: object) -> torch.Tensor:
        arguments = {
            "q_THD": self.q_THD[rows],
            "window_rows_ND": self.rows_ND,
            "window_index_TW": self.index_TW[rows],
            "entries": self.entries,
            "selected_TS": self.selected_TS[rows],
            "sink_H": self.sink_H,
            "scale": self.scale,
            "tiles": plan_tiles(torch.arange(len(self.q_THD))[rows]),
        }
        return sparse_attention(**(arguments | changes))

    def plain(self) -> torch.Tensor:
        entries_GD = dequantise_main_entries(self.packed).double()
        out = torch.zeros(self.q_THD.shape, dtype=torch.double)
        for t, (window, chosen) in enumerate(
            zip(self.index_TW.tolist(), self.selected_TS.tolist(), strict=True)
        ):
            keys = [self.rows_ND[i].double() for i in window if i >= 0]
            keys += [entries_GD[i] for i in chosen if i >= 0]
            for h in range(out.shape[1]):
                out[t, h] = plain_head(self.q_THD[t, h], keys, self.sink_H[h], self.scale)
        return out


def plain_head(
    q_D: torch.Tensor, keys: list[torch.Tensor], sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """float64 [D], from the definition: exponentials as they are, nothing shifted."""
    weights = [torch.exp(scale * (q_D.double() * key).sum()) for key in keys]
    total = torch.exp(sink.double()) + sum(weights)
    mixed = torch.zeros(len(q_D), dtype=torch.double)
    for weight, key in zip(weights, keys, strict=True):
        mixed += weight / total * key
    return mixed


@pytest.mark.parametrize("source", SOURCES)
def test_attention_over_listed_rows_is_the_golden_one(source: str) -> None:
    golden = golden_vectors("listed_attention", source)
    q_THD, kv_ND, sink_H, index_TK = (golden[name] for name in ("q", "kv", "sink", "idx"))
    tiles = plan_tiles(torch.arange(len(q_THD)))
    scale = q_THD.shape[2] ** -0.5
    o_THD = sparse_attention(q_THD, kv_ND, index_TK.long(), None, None, sink_H, scale, tiles)
    assert torch.allclose(o_THD, golden["out"], rtol=1e-5, atol=1e-6)
    assert not o_THD[0].any(), "the first query lists nothing"


@pytest.mark.parametrize("source", SOURCES)
def test_attention_of_layers_is_the_golden_one(source: str) -> None:
    golden = golden_vectors("layer_attention", source)
    positions_T = golden["positions"]
    index_TW = (positions_T[:, None] + torch.arange(1 - WINDOW, 1)).clamp(min=-1)
    for layer in {name.split("_")[0] for name in golden} - {"positions"}:
        q_THD, rows_ND, sink_H, expected = (
            golden[f"{layer}_{name}"] for name in ("q", "window", "sink", "out")
        )
        entries, selected_TS = None, None
        if f"{layer}_entries" in golden:
            packed = quantise_main_entries(golden[f"{layer}_entries"])
            assert torch.equal(dequantise_main_entries(packed), golden[f"{layer}_entries"])
            entries = put_in_pages(packed, 8, torch.Generator().manual_seed(0))
            selected_TS = golden[f"{layer}_selected"].long()
        scale = q_THD.shape[2] ** -0.5
        o_THD = sparse_attention(
            q_THD, rows_ND, index_TW, entries, selected_TS, sink_H, scale, plan_tiles(positions_T)
        )
        assert torch.allclose(o_THD, expected, rtol=1e-5, atol=1e-5), layer


@settings(max_examples=25)
@given(
    queries=st.integers(1, 8),
    shape=st.tuples(
        st.integers(1, 5), st.sampled_from([16, 32, 64]), st.integers(0, 9), st.integers(0, 9)
    ),
    seed=st.integers(0, 2**16),
)
def test_attention_is_one_softmax_with_the_sink_over_all_listed_keys(
    queries: int, shape: tuple[int, int, int, int], seed: int
) -> None:
    case = Case(queries, shape, seed=seed)
    assert torch.allclose(case.attend().double(), case.plain(), rtol=1e-4, atol=1e-5)


def test_attention_is_stable_when_scores_are_huge() -> None:
    case = Case(3, (2, 32, 4, 4))
    for factor in (1e6, -1e6):
        o_THD = case.attend(scale=factor)
        assert o_THD.isfinite().all()
        # Nothing but the key of the largest score is left: the output is one of the keys.
        keys_ND = torch.cat([case.rows_ND, dequantise_main_entries(case.packed)])
        assert ((o_THD[:, :, None] == keys_ND).all(-1)).any(-1).all()


def test_query_without_keys_gives_zero() -> None:
    case = Case(3, (2, 32, 4, 4))
    none = torch.full((3, 4), -1)
    assert not case.attend(window_index_TW=none, selected_TS=none).any()
    assert not case.attend(window_index_TW=none[:, :0], entries=None, selected_TS=None).any()
    assert case.attend(slice(0, 0)).shape == (0, 2, 32)


def test_key_that_is_listed_twice_counts_twice() -> None:
    case = Case(1, (1, 32, 1, 2))
    both = case.attend(selected_TS=torch.tensor([[7, 7]]), window_index_TW=torch.tensor([[-1]]))
    weight = torch.exp(
        case.scale * (case.q_THD[0, 0] * dequantise_main_entries(case.packed)[7]).sum()
    )
    share = 2 * weight / (2 * weight + case.sink_H.exp())
    expected = share * dequantise_main_entries(case.packed)[7]
    assert torch.allclose(both[0, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_query_keeps_its_bits_alone_and_in_any_chunk(shape: tuple[int, int, int, int]) -> None:
    case = Case(21, shape)
    whole = case.attend()
    for size in (1, 2, 8, 20):
        parts = [case.attend(slice(first, first + size)) for first in range(0, 21, size)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("queries", [1, 6])
def test_query_has_products_of_its_own(queries: int) -> None:
    # With MKL_CBWR products happen to have these bits in any shape, so bits do not show this.
    case = Case(queries, (4, 32, 5, 3))
    with RecordedProducts() as products:
        case.attend()
    assert sorted(left.shape for left in products.left) == [(4, 8)] * queries + [(4, 32)] * queries


def test_entries_without_a_choice_are_refused() -> None:
    case = Case(2, (1, 32, 4, 4))
    with pytest.raises(AssertionError, match="come together"):
        case.attend(selected_TS=None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_query_keeps_its_bits_with_any_number_of_threads(
    shape: tuple[int, int, int, int], threads: int
) -> None:
    case = Case(40, shape)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = case.attend()
        torch.set_num_threads(threads)
        again = case.attend()
        assert torch.equal(case.attend(slice(39, 40)), again[39:])
        if threads > 1 and not threads_keep_bits():
            pytest.skip("small products of this processor differ between one thread and two")
        assert torch.equal(again, whole)
    finally:
        torch.set_num_threads(before)


def test_query_keeps_its_bits_wherever_its_keys_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(21, (4, 64, 16, 16))
    whole = case.attend()
    # More context behind, in other blocks of another size.
    later = quantise_main_entries(torch.randn(90, 64, generator=torch.Generator().manual_seed(1)))
    longer = torch.cat([case.packed, later])
    elsewhere = put_in_pages(longer, 16, torch.Generator().manual_seed(2))
    assert torch.equal(case.attend(entries=elsewhere), whole)
    # The window's rows as one query alone hands them over: its own window and no more.
    for t in (0, 3, 20):
        first = max(0, t - 15)
        index = torch.where(case.index_TW[t] < 0, -1, case.index_TW[t] - first)[None]
        rows_ND = case.rows_ND[first : t + 1]
        alone = case.attend(slice(t, t + 1), window_rows_ND=rows_ND, window_index_TW=index)
        assert torch.equal(alone, whole[t : t + 1])
    # Queries that are a strided view, and passes of another size.
    strided = torch.stack([case.q_THD, case.q_THD], dim=-1)[..., 0]
    assert torch.equal(case.attend(q_THD=strided), whole)
    transposed = case.q_THD.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(case.attend(q_THD=transposed), whole)
    monkeypatch.setattr(module, "PIECE_VALUES", 1)
    assert torch.equal(case.attend(), whole)


def test_only_chosen_entries_are_read_and_each_once() -> None:
    # All other entries of the sequence read as NaN.
    case = Case(3, (4, 32, 4, 3), entries=1000)
    selected_TS = torch.tensor([[5, 900, -1], [5, 6, 7], [-1, -1, 900]])
    expected = case.attend(selected_TS=selected_TS)
    chosen = torch.tensor([5, 6, 7, 900])
    damaged = torch.full_like(case.packed, 0xFF)
    damaged[chosen] = case.packed[chosen]
    entries = put_in_pages(damaged, 8, torch.Generator().manual_seed(0))
    assert torch.equal(case.attend(selected_TS=selected_TS, entries=entries), expected)
    assert torch.equal(torch.cat(entries.reads), chosen)


def test_key_that_is_not_a_number_is_seen_by_those_only_that_list_it() -> None:
    case = Case(6, (2, 32, 2, 3))
    case.selected_TS.clamp_(max=30)
    expected = case.attend()
    case.selected_TS[4, 1] = 33
    case.entries.write(33, torch.full((1, case.packed.shape[1]), 0xFF, dtype=torch.uint8))
    given_THD = case.attend()
    assert given_THD[4].isnan().all()
    others = torch.tensor([0, 1, 2, 3, 5])
    assert torch.equal(given_THD[others], expected[others])
    # The last row of the window is what a careless look-up of -1 would find.
    case.rows_ND[5] = float("nan")
    given_THD = case.attend()
    assert given_THD[5].isnan().all()
    assert torch.equal(given_THD[others[:-1]], expected[others[:-1]])
