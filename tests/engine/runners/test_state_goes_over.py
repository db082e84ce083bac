"""What a hand-over takes from one runner to another one, and what is not taken for a state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import HandoverRefused
from kvstore.policy import MISS
from tests.engine.runners.runner_bench import RunnerBench, same_bits


@pytest.mark.parametrize("length", [1, 126, 128, 257])
def test_state_goes_over_and_goes_on_with_equal_bits(
    benches: tuple[RunnerBench, RunnerBench], length: int
) -> None:
    source, target = benches
    ids = source.tokens(length + 4, seed=length)
    sequence = source.begin(ids[:length], room_tokens=10)
    source.run(sequence)
    # Twice, the second time in the middle of an answer.
    for answered in range(2):
        moved = target.unpack(source.pack(sequence), sequence, room_tokens=10)
        assert moved.computed_tokens == sequence.computed_tokens
        assert moved.hit == sequence.hit
        assert target.pack(moved) == source.pack(sequence)
        rest = ids[length + 2 * answered :][:2]
        logits = source.append(sequence, rest), target.append(moved, rest)
        assert all(same_bits(*pair) for pair in zip(*logits, strict=True))
        assert target.pack(moved) == source.pack(sequence)
        target.end(moved)
    source.end(sequence)


def test_open_block_is_sent_without_what_is_not_of_the_sequence(bench: RunnerBench) -> None:
    ids = bench.tokens(136)
    sequence = bench.begin(ids[:128], room_tokens=8)
    bench.run(sequence)
    assert bench.runner.open_block_bytes(sequence) == b""
    bench.append(sequence, ids[128:])
    sent = bench.runner.open_block_bytes(sequence)
    assert len(sent) == bench.runner.pool.block_bytes
    # Eight of 128 tokens: what follows theirs, in every section, is zero.
    assert sum(byte != 0 for byte in sent) < len(sent) * 8 / 128 + 1
    assert any(sent)
    bench.end(sequence)


def test_marks_that_are_cut_off_or_changed_are_refused_and_change_nothing(
    bench: RunnerBench,
) -> None:
    ids = bench.tokens(130)
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
    bench.run(new)  # from its beginning, as if nothing had been
    bench.check_same_state(new, sequence)
    bench.end(sequence, new)


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
    sequence, short = source.begin(source.tokens(10)), target.begin([1, 2, 3])
    source.run(sequence)
    state = source.pack(sequence)
    with pytest.raises(HandoverRefused, match="computed tokens: given 10, expected at most 3"):
        target.runner.unpack_state(short, state.marks, state.slot)
    source.end(sequence)
    target.end(short)
