"""DeepSeek-V4.1 behind a hit: where its windows, its decoder half and its entries begin."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import HandoverRefused, InvalidRequest, StateSlotsExhausted
from engine.models.deepseek_v41 import rows
from engine.models.deepseek_v41.compression import EntryRows, EntryWriter
from engine.models.deepseek_v41.config import LayerRole
from engine.models.deepseek_v41.rows import RowBatch
from engine.models.deepseek_v41.weights import CompressorWeights, IndexerWeights
from engine.runners.v41_runner import decoder_first, farthest_hit, plan_borders
from engine.sequence import Sequence
from kvstore.policy import HitPlan, plan_hit, window_anchor_after_prefill
from tests.engine.runners.runner_bench import RunnerBench, same_bits, v41_bench


@pytest.fixture(scope="module")
def opened() -> RunnerBench:
    return v41_bench()


@pytest.fixture
def bench(opened: RunnerBench) -> Iterator[RunnerBench]:
    """One engine, of which everything is free again at the end."""
    runner = opened.runner
    before = runner.pool.free_blocks, runner.free_states
    yield opened
    assert (runner.pool.free_blocks, runner.free_states) == before


@pytest.mark.parametrize(
    ("prompt_tokens", "first"),
    [
        (1, 0),
        (140, 0),
        (141, 1),
        (261, 121),
        # A hit may end at 128 from here on, which is the later one up to 268.
        (262, 128),
        (267, 128),
        (268, 128),
        (269, 129),
        (389, 249),
        (390, 256),
    ],
)
def test_decoder_half_begins_with_the_tail_or_where_the_longest_hit_ends(
    prompt_tokens: int, first: int
) -> None:
    assert decoder_first(prompt_tokens, 140) == first


@given(prompt=st.integers(0, 5000), tail=st.integers(134, 300), matched=st.integers(0, 50))
def test_tail_holds_a_window_and_a_draft_and_begins_behind_any_hit(
    prompt: int, tail: int, matched: int
) -> None:
    first = decoder_first(prompt, tail)
    assert prompt - tail <= first <= max(prompt - 134, 0)
    for anchors in (set(), set(range(0, 7000, 128))):
        plan = plan_hit(prompt, matched, anchors)
        assert plan.hit_tokens + plan.replay_tokens <= farthest_hit(prompt) <= first


@pytest.mark.parametrize(
    ("prompt", "known", "borders"),
    [
        (1, 1, []),
        (128, 128, []),
        (129, 129, [128]),
        (262, 262, [128, 256]),
        (263, 263, [128, 256]),
        (257, 257, [256]),
        # With an answer: the two crossings that decoding would have left.
        (100, 130, [128]),
        (100, 300, [128, 256]),
        (262, 700, [128, 256, 512, 640]),
        (262, 390, [128, 256, 384]),
        (384, 385, [128, 256, 384]),
    ],
)
def test_borders_are_where_a_later_hit_may_end(prompt: int, known: int, borders: list[int]) -> None:
    assert plan_borders(prompt, known) == borders


@given(st.integers(1, 3000))
def test_borders_of_a_prompt_are_where_its_own_hit_and_the_next_turns_end(prompt: int) -> None:
    borders = plan_borders(prompt, prompt)
    assert set(borders) == {farthest_hit(prompt), window_anchor_after_prefill(prompt) or 0} - {0}
    assert borders == sorted(borders)


def test_tail_shorter_than_a_window_and_a_draft_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="decoder tail tokens: given 133, expected 134"):
        v41_bench(decoder_tail_tokens=133)


def test_tail_changes_no_byte_of_a_block_or_a_window() -> None:
    """So the number of its tokens is no part of the namespace."""
    found = []
    for tail in (134, 140, 10_000):
        bench = v41_bench(decoder_tail_tokens=tail)
        sequence = bench.begin(bench.tokens(400))
        bench.run_to(sequence, 384)
        window = bench.window(sequence, 384)
        logits = bench.run(sequence)
        found.append((bench.complete_blocks(sequence), window, logits))
    assert found[0][:2] == found[1][:2] == found[2][:2]
    assert not same_bits(found[0][2], found[2][2]), "the tail changes nothing at all"


@pytest.mark.parametrize("at", [128, 256])
def test_window_is_the_same_bytes_until_a_draft_after_its_anchor(
    bench: RunnerBench, at: int
) -> None:
    sequence = bench.begin(bench.tokens(at - 1), room_tokens=20)
    bench.run(sequence)
    expected_anchor = at - 128 or None
    assert bench.runner.window_anchor(sequence) in (None, expected_anchor)
    records = set()
    for number in range(8):
        bench.append(sequence, [number])
        anchor = bench.runner.window_anchor(sequence)
        assert anchor == (at if number < 7 else None)
        if anchor:
            records.add(bench.window(sequence, anchor))
    assert len(records) == 1
    bench.end(sequence)


def test_window_of_another_length_is_refused(bench: RunnerBench) -> None:
    sequence = bench.begin(bench.tokens(300))
    with pytest.raises(HandoverRefused, match="bytes of a window: given 7"):
        bench.runner.start_after(sequence, HitPlan(128, 0, 128), b"a week.")
    bench.end(sequence)


def test_sequence_without_a_slot_is_refused(bench: RunnerBench) -> None:
    opened = [bench.begin([1]) for _ in range(bench.runner.free_states)]
    with pytest.raises(StateSlotsExhausted):
        bench.runner.open(Sequence(opened[0].request))
    bench.end(*opened)


class TruncatedWindows:
    """The definition of a hit with replay, computed without any of what makes one quick.

    The whole prompt runs from its beginning in one pass. What a query at or after `first` sees of
    the windows is written out key by key: none before `first`. After each owner layer has written
    its entries, those of tokens before `stored_end` are put back to what a cold run left.
    """

    def __init__(self, first: int, stored_end: int, stored: list[bytes]) -> None:
        self._first = first
        self._stored_end = stored_end
        self._stored = stored

    def window_index(
        self, positions_T: torch.Tensor, window: int, start: int, base: int
    ) -> torch.Tensor:
        seen = []
        for query in positions_T.tolist():
            least = max(start, self._first if query >= self._first else 0)
            keys = range(query - window + 1, query + 1)
            seen.append([key - base if key >= least else -1 for key in keys])
        return torch.tensor(seen)

    def logits(
        self, bench: RunnerBench, sequence: Sequence, monkeypatch: pytest.MonkeyPatch
    ) -> torch.Tensor:
        write = EntryWriter.write

        def write_and_restore(
            writer: EntryWriter,
            role: LayerRole,
            compressor: CompressorWeights,
            indexer: IndexerWeights,
            x_TE: torch.Tensor,
            batch: RowBatch,
            entries: EntryRows,
        ) -> None:
            write(writer, role, compressor, indexer, x_TE, batch, entries)
            offsets = writer.blocks.owners[role.index]
            own = slice(offsets.offset, offsets.offset + offsets.bytes)
            for block in range(self._stored_end // 128):
                buffer = bench.runner.pool.buffer(sequence.block_ids[block])
                buffer[own] = self._stored[block][own]

        with monkeypatch.context() as patched:
            patched.setattr(rows, "window_index", self.window_index)
            patched.setattr(EntryWriter, "write", write_and_restore)
            return torch.from_numpy(bench.run(sequence))


@pytest.mark.parametrize(("length", "matched"), [(391, 3), (520, 4)])
def test_hit_with_replay_is_the_truncated_window_and_nothing_else(
    bench: RunnerBench, monkeypatch: pytest.MonkeyPatch, length: int, matched: int, rng: Random
) -> None:
    token_ids = bench.tokens(length, seed=length)
    cold = bench.begin(token_ids)
    cold_logits = bench.run(cold)
    stored = bench.complete_blocks(cold)
    bench.end(cold)
    plan = plan_hit(length, matched, window_anchors=())
    assert plan.replay_tokens == 128
    expected = bench.begin(token_ids, room_tokens=4)
    logits = TruncatedWindows(plan.hit_tokens, plan.hit_tokens + 128, stored).logits(
        bench, expected, monkeypatch
    )
    hit = bench.begin(token_ids, room_tokens=4)
    bench.fill_blocks(hit, stored[: plan.stored_blocks])
    bench.runner.start_after(hit, plan, None)
    # Any cut, also one within the tokens that are replayed.
    ends = sorted(rng.sample(range(plan.hit_tokens + 1, length), 3))
    found = torch.from_numpy(bench.run(hit, ends))
    assert torch.equal(found, logits)
    assert not torch.equal(found, torch.from_numpy(cold_logits)), "nothing was truncated"
    blocks = bench.complete_blocks(hit)
    assert blocks[: plan.stored_blocks] == stored[: plan.stored_blocks]
    assert blocks == bench.complete_blocks(expected)
    assert bench.pack(hit).slot == bench.pack(expected).slot
    for one, other in zip(*(bench.append(its, [7, 8, 9]) for its in (hit, expected)), strict=True):
        assert same_bits(one, other)
    assert bench.pack(hit).open_block == bench.pack(expected).open_block
    bench.end(hit, expected)


def test_window_after_a_replay_is_one_that_the_next_turn_can_begin_with(
    bench: RunnerBench,
) -> None:
    token_ids = bench.tokens(400)
    cold = bench.begin(token_ids)
    bench.run(cold)
    stored = bench.complete_blocks(cold)
    bench.end(cold)
    replayed = bench.begin_hit(token_ids, stored, HitPlan(128, 128, None))
    assert bench.runner.window_anchor(replayed) is None
    bench.run_to(replayed, 256)
    window = bench.window(replayed, 256)
    logits = bench.run(replayed)
    blocks = bench.complete_blocks(replayed)
    again = bench.begin_hit(token_ids, blocks, HitPlan(256, 0, 256), window)
    assert same_bits(bench.run(again), logits)
    assert bench.pack(again).slot == bench.pack(replayed).slot
    bench.end(replayed, again)


def test_state_within_a_replay_is_not_packed(bench: RunnerBench) -> None:
    token_ids = bench.tokens(400)
    sequence = bench.begin_hit(token_ids, [bytes(bench.runner.pool.block_bytes)] * 2, REPLAY)
    bench.run_to(sequence, 200)
    with pytest.raises(AssertionError):
        bench.pack(sequence)
    bench.run(sequence)
    bench.pack(sequence)
    bench.end(sequence)


REPLAY = HitPlan(128, 128, None)
