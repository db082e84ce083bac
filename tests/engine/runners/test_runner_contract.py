"""What every runner promises: the bits depend on a sequence alone, however it came to be computed.

Each test is run by both families, llama in both compute types.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import HandoverRefused
from engine.model_runner import Part
from engine.sequence import Sequence
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import MISS, HitPlan, plan_dense_hit, plan_hit
from tests.engine.runners.runner_bench import RunnerBench, same_bits

LENGTHS = (1, *range(127, 131), *range(133, 136), *range(255, 264), 301)


def tokens_of(bench: RunnerBench, count: int, seed: int = 1) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(bench.runner.vocabulary) for _ in range(count)]


def plan_of(bench: RunnerBench, hit_tokens: int) -> HitPlan:
    """A hit that leaves the bits as they are."""
    has_windows = bench.runner.window_layout is not None
    return HitPlan(hit_tokens, 0, hit_tokens if has_windows else None)


def window_of(bench: RunnerBench, sequence: Sequence, anchor: int) -> bytes | None:
    return bench.window(sequence, anchor) if bench.runner.window_layout else None


def some_ends(length: int, rng: Random) -> list[int]:
    """Ends of passes as an engine may choose them."""
    borders = range(BLOCK_TOKENS, length, BLOCK_TOKENS)
    return [border for border in borders if rng.random() < 0.5]


@pytest.mark.parametrize("length", LENGTHS)
def test_cuts_into_passes_change_no_bit(bench: RunnerBench, length: int, rng: Random) -> None:
    token_ids = tokens_of(bench, length)
    whole, cut = bench.begin(token_ids), bench.begin(token_ids)
    logits = bench.run(whole)
    assert logits.shape == (bench.runner.vocabulary,)
    assert logits.dtype == "float32"
    assert same_bits(bench.run(cut, range(BLOCK_TOKENS, length, BLOCK_TOKENS)), logits)
    assert bench.pack(cut).complete == bench.pack(whole).complete
    assert bench.pack(cut).open_block == bench.pack(whole).open_block
    assert bench.pack(cut).slot == bench.pack(whole).slot
    bench.end(whole, cut)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [(1, 1), (1, 9), (120, 12), (127, 1), (127, 2), (128, 1), (129, 3), (240, 20), (255, 1)],
)
def test_prompt_and_answer_run_anew_have_the_bits_of_decoding(
    bench: RunnerBench, prompt: int, answer: int, rng: Random
) -> None:
    token_ids = tokens_of(bench, prompt + answer, seed=prompt)
    grown = bench.begin(token_ids[:prompt], room_tokens=answer)
    bench.run(grown)
    logits = bench.append(grown, token_ids[prompt:])[-1]
    anew = bench.begin(token_ids[:prompt], token_ids[prompt:])
    assert same_bits(bench.run(anew, some_ends(len(token_ids), rng)), logits)
    assert_same_state(bench, anew, grown)
    bench.end(grown, anew)


def assert_same_state(bench: RunnerBench, one: Sequence, other: Sequence) -> None:
    packed, expected = bench.pack(one), bench.pack(other)
    assert packed.complete == expected.complete
    assert packed.open_block == expected.open_block
    assert packed.slot == expected.slot


def hit_borders(bench: RunnerBench, length: int) -> range:
    """Where a hit may end that leaves the bits as they are."""
    has_windows = bench.runner.window_layout is not None
    longest = plan_hit(length, 9, range(999)) if has_windows else plan_dense_hit(length, 9)
    return range(BLOCK_TOKENS, longest.hit_tokens + 1, BLOCK_TOKENS)


@pytest.mark.parametrize("length", [255, 256, 257, 261, 262, 263, 300, 391])
def test_hit_at_each_block_has_the_bits_of_a_cold_run(
    bench: RunnerBench, length: int, rng: Random
) -> None:
    token_ids = tokens_of(bench, length, seed=length)
    cold = bench.begin(token_ids)
    windows = {}
    borders = hit_borders(bench, length)
    assert bool(borders) is (length >= 262 or bench.runner.window_layout is None)
    for border in borders:
        bench.run_to(cold, border)
        windows[border] = window_of(bench, cold, border)
    logits = bench.run(cold)
    stored = bench.complete_blocks(cold)
    for border in borders:
        hit = bench.begin_hit(token_ids, stored, plan_of(bench, border), windows[border])
        assert (hit.computed_tokens, hit.hit.hit_tokens) == (border, border)
        assert same_bits(bench.run(hit, some_ends(length, rng)), logits)
        assert_same_state(bench, hit, cold)
        bench.end(hit)
    bench.end(cold)


def test_company_changes_no_bit(bench: RunnerBench) -> None:
    """A prompt's part beside two sequences that decode, one of which completes a block."""
    ids = tokens_of(bench, 600)
    alone = []
    for has_company in (False, True):
        first = bench.begin(ids[:127], room_tokens=1)
        second = bench.begin(ids[127:180], room_tokens=1)
        third = bench.begin(ids[200:500])
        bench.run(first)
        bench.run(second)
        first.token_ids.append(5)
        second.token_ids.append(6)
        parts = [Part(first, 128), Part(second, 54), Part(third, 256)]
        if has_company:
            found = bench.runner.compute(parts)
        else:
            found = [bench.runner.compute([part])[0] for part in parts]
        assert found[2] is None
        assert third.computed_tokens == 256
        found.append(bench.run(third))
        sequences = (first, second, third)
        alone.append((found, [bench.pack(sequence) for sequence in sequences]))
        bench.end(*sequences)
    (logits, states), (batched_logits, batched_states) = alone
    for index in (0, 1, 3):
        one, other = logits[index], batched_logits[index]
        assert one is not None
        assert other is not None
        assert same_bits(one, other)
    for state, batched in zip(states, batched_states, strict=True):
        assert state.complete == batched.complete
        assert state.open_block == batched.open_block
        assert state.slot == batched.slot


@pytest.mark.parametrize("length", [1, 7, 127, 128, 129, 130, 255, 257])
def test_state_goes_over_and_goes_on_with_equal_bits(
    benches: tuple[RunnerBench, RunnerBench], length: int
) -> None:
    source, target = benches
    ids = tokens_of(source, length + 8, seed=length)
    sequence = source.begin(ids[:length], room_tokens=140)
    source.run(sequence)
    # Twice, the second time in the middle of an answer.
    for answered in range(2):
        moved = target.unpack(source.pack(sequence), sequence, room_tokens=140)
        assert moved.computed_tokens == sequence.computed_tokens
        assert moved.hit == sequence.hit
        assert_moved(source, sequence, target, moved)
        rest = ids[length + 4 * answered :][:4]
        logits = source.append(sequence, rest), target.append(moved, rest)
        assert all(same_bits(*pair) for pair in zip(*logits, strict=True))
        assert_moved(source, sequence, target, moved)
        target.end(moved)
    source.end(sequence)


def assert_moved(
    source: RunnerBench, sequence: Sequence, target: RunnerBench, moved: Sequence
) -> None:
    sent, received = source.pack(sequence), target.pack(moved)
    assert received.marks == sent.marks
    assert received.slot == sent.slot
    assert received.complete == sent.complete
    assert received.open_block == sent.open_block


def test_open_block_is_sent_without_what_is_not_of_the_sequence(bench: RunnerBench) -> None:
    ids = tokens_of(bench, 140)
    sequence = bench.begin(ids[:128], room_tokens=12)
    bench.run(sequence)
    assert bench.runner.open_block_bytes(sequence) == b""
    bench.append(sequence, ids[128:])
    sent = bench.runner.open_block_bytes(sequence)
    assert len(sent) == bench.runner.pool.block_bytes
    # Twelve of 128 tokens: what follows theirs, in every section, is zero.
    assert sum(byte != 0 for byte in sent) < len(sent) * 12 / 128 + 1
    assert any(sent)
    bench.end(sequence)


def test_marks_that_are_cut_off_or_changed_are_refused_and_change_nothing(
    bench: RunnerBench,
) -> None:
    ids = tokens_of(bench, 130)
    sequence = bench.begin(ids)
    bench.run(sequence)
    state = bench.pack(sequence)
    new = bench.begin(ids)
    for size in (0, 3, 31, len(state.marks) - 1):
        with pytest.raises(HandoverRefused):
            bench.runner.unpack_state(new, state.marks[:size], state.slot)
    with pytest.raises(HandoverRefused):
        bench.runner.unpack_state(new, state.marks + b"\0", state.slot)
    for offset in range(len(state.marks)):
        changed = bytearray(state.marks)
        changed[offset] ^= 0x81
        with pytest.raises(HandoverRefused):
            bench.runner.unpack_state(new, bytes(changed), state.slot)
    if state.slot is not None:
        with pytest.raises(HandoverRefused, match="checksum of the body"):
            bench.runner.unpack_state(new, state.marks, bytes(len(state.slot)))
        with pytest.raises(HandoverRefused, match="length in bytes"):
            bench.runner.unpack_state(new, state.marks, state.slot[1:])
        with pytest.raises(HandoverRefused, match="state slot: given none"):
            bench.runner.unpack_state(new, state.marks, None)
    else:
        with pytest.raises(HandoverRefused):
            bench.runner.unpack_state(new, state.marks, b"a slot")
    assert (new.computed_tokens, new.hit) == (0, MISS)
    assert_new(bench, new, sequence)
    bench.end(sequence, new)


def assert_new(bench: RunnerBench, new: Sequence, like: Sequence) -> None:
    """It can still be run from its beginning."""
    bench.run(new)
    assert_same_state(bench, new, like)


@given(marks=st.binary(max_size=100), slot=st.none() | st.binary(max_size=10))
def test_bytes_that_are_no_state_are_refused(
    benches: tuple[RunnerBench, RunnerBench], marks: bytes, slot: bytes | None
) -> None:
    bench = benches[1]
    new = bench.begin([1, 2, 3])
    with pytest.raises(HandoverRefused):
        bench.runner.unpack_state(new, marks, slot)
    bench.end(new)


def test_state_of_more_tokens_than_are_known_is_refused(
    benches: tuple[RunnerBench, RunnerBench],
) -> None:
    source, target = benches
    sequence, short = source.begin(tokens_of(source, 10)), target.begin([1, 2, 3])
    source.run(sequence)
    state = source.pack(sequence)
    with pytest.raises(HandoverRefused, match="computed tokens: given 10, expected at most 3"):
        target.runner.unpack_state(short, state.marks, state.slot)
    source.end(sequence)
    target.end(short)


class SectionsOnTheirWay:
    """Blocks of a hit that come section by section, each only when a pass waits for it."""

    def __init__(self, bench: RunnerBench, sequence: Sequence, stored: list[bytes]) -> None:
        self.waited_for: list[int] = []
        self._bench = bench
        self._sequence = sequence
        self._stored = stored
        sections = bench.runner.namespace.layout.sections
        ends = [sum(s.bytes for s in sections[: i + 1]) for i in range(len(sections))]
        self._runs = [slice(e - s.bytes, e) for e, s in zip(ends, sections, strict=True)]

    def wait(self, section: int) -> None:
        self.waited_for.append(section)
        run = self._runs[section]
        for block_id, data in zip(self._sequence.block_ids, self._stored, strict=False):
            self._bench.runner.pool.buffer(block_id)[run] = data[run]


def hit_on_its_way(
    bench: RunnerBench, token_ids: list[int], stored: list[bytes], window: bytes | None
) -> tuple[Sequence, SectionsOnTheirWay]:
    hit = bench.begin(token_ids)
    poison = [b"\xfe" * bench.runner.pool.block_bytes] * 2
    bench.fill_blocks(hit, poison)
    bench.runner.start_after(hit, plan_of(bench, 256), window)
    return hit, SectionsOnTheirWay(bench, hit, stored[:2])


def test_pass_waits_for_each_section_once_and_in_order_before_it_is_used(
    bench: RunnerBench,
) -> None:
    token_ids = tokens_of(bench, 400)
    cold = bench.begin(token_ids)
    bench.run_to(cold, 256)
    window = window_of(bench, cold, 256)
    logits = bench.run(cold)
    stored = bench.complete_blocks(cold)
    hit, coming = hit_on_its_way(bench, token_ids, stored, window)
    (found,) = bench.runner.compute([Part(hit, 400)], wait_for_section=coming.wait)
    assert coming.waited_for == list(range(len(bench.runner.namespace.layout.sections)))
    assert found is not None
    assert same_bits(found, logits)
    assert_same_state(bench, hit, cold)
    bench.end(cold, hit)


class NothingCame(Exception):
    pass


def test_pass_that_waits_in_vain_spoils_no_other_sequence_and_may_be_run_anew(
    bench: RunnerBench,
) -> None:
    token_ids = tokens_of(bench, 400)
    cold = bench.begin(token_ids)
    bench.run_to(cold, 256)
    window = window_of(bench, cold, 256)
    logits = bench.run(cold)
    before = bench.pack(cold)
    for last in range(len(bench.runner.namespace.layout.sections)):
        hit, coming = hit_on_its_way(bench, token_ids, before.complete, window)

        def wait(section: int, last: int = last, coming: SectionsOnTheirWay = coming) -> None:
            if section == last:
                raise NothingCame
            coming.wait(section)

        with pytest.raises(NothingCame):
            bench.runner.compute([Part(hit, 400)], wait_for_section=wait)
        bench.runner.close(hit)
        bench.runner.open(hit)
        assert (hit.computed_tokens, hit.hit) == (0, MISS)
        if last == 0:
            assert same_bits(bench.run(hit), logits)
            assert_same_state(bench, hit, cold)
        bench.end(hit)
    assert bench.pack(cold).complete == before.complete
    bench.end(cold)


def test_sequence_may_be_closed_again(bench: RunnerBench) -> None:
    free = bench.runner.free_states
    sequence = bench.begin([1, 2, 3])
    bench.runner.close(sequence)
    bench.runner.close(sequence)
    assert bench.runner.free_states == free
    bench.end(sequence)


def test_token_ids_and_context_are_those_of_the_model(bench: RunnerBench) -> None:
    assert bench.runner.vocabulary in (268, 384)
    assert bench.runner.context_tokens in (1024, 4096)
    assert bench.runner.namespace.layout.block_bytes == bench.runner.pool.block_bytes
