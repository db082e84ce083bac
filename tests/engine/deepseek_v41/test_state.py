"""A state gives back what its own sequence wrote, and never a row of another or an older one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest, StateSlotsExhausted
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import NO_ID, SequenceState, StatePool

CONFIG = replace(shipped_config("v41-nano"), window=16)
RING_ROWS = 22
COMPRESSOR_ROWS = 7
OWNER = 2
DRAFT_RING = 9


def window_rows(ring: int, first: int, versions: list[int]) -> torch.Tensor:
    """Rows of 66 bytes that say what they are of."""
    positions = torch.arange(first, first + len(versions))
    rows = (positions * 7 % 251).unsqueeze(1).repeat(1, 66)
    rows[:, 0] = ring
    rows[:, 1] = torch.tensor(versions) % 256
    rows[:, 2], rows[:, 3] = positions % 256, positions // 256
    return rows.to(torch.uint8)


def compressor_rows(first: int, versions: list[int]) -> torch.Tensor:
    numbers = torch.arange(first, first + len(versions)) + torch.tensor(versions) / 8
    return torch.stack((numbers, -numbers), dim=1).unsqueeze(2).repeat(1, 1, 64)


class Writer:
    """Writes rows as a forward pass does, and remembers which version of each position counts."""

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self.versions: list[int] = []
        self.version = 0

    def write(self, tokens: int) -> None:
        """Rows of the next tokens, not committed."""
        self.version += 1
        first, versions = self.state.length, [self.version] * tokens
        for ring in range(len(self.state.window_rings)):
            self.state.write_window_rows(ring, first, window_rows(ring, first, versions))
        for owner in self.state.compressor_rings:
            self.state.write_compressor_rows(owner, first, compressor_rows(first, versions))

    def append(self, tokens: int) -> None:
        self.write(tokens)
        self.state.advance(tokens, range(self.state.length, self.state.length + tokens))
        self.versions += [self.version] * tokens

    def rewind(self, length: int) -> None:
        self.state.rewind(length)
        del self.versions[length:]

    def check(self) -> None:
        """What the next token needs is there: the window, the open group, the lookback."""
        state, length = self.state, self.state.length
        first = max(length - CONFIG.window, 0)
        for ring in (0, 3, 8, DRAFT_RING, 11):
            expected = window_rows(ring, first, self.versions[first:])
            assert torch.equal(state.read_window_rows(ring, first, length), expected)
        group = length - length % 2
        expected = compressor_rows(group, self.versions[group:])
        assert torch.equal(state.read_compressor_rows(OWNER, group, length), expected)
        lookback = [p if p >= 0 else NO_ID for p in range(length - 3, length)]
        assert state.recent_ids[-3:] == lookback


def dirty_pool(slots: int = 1) -> StatePool:
    """A pool whose slots are full of another sequence's rows (and of NaN as float32)."""
    pool = StatePool(CONFIG, slots)
    pool.memory.fill_(0xFF)
    return pool


def test_pool_memory_is_zero_at_first_and_a_slot_is_not_cleared_for_the_next() -> None:
    pool = StatePool(CONFIG, slots=1)
    assert not pool.memory.any()
    state = pool.allocate()
    Writer(state).append(3)
    pool.release(state)
    again = pool.allocate()
    assert again.slot == state.slot
    assert again.memory.any()
    assert (again.length, again.block_ids) == (0, [])


def test_pool_gives_each_slot_once_until_it_is_back() -> None:
    pool = StatePool(CONFIG, slots=2)
    states = [pool.allocate(), pool.allocate()]
    assert {state.slot for state in states} == {0, 1}
    with pytest.raises(StateSlotsExhausted, match="no slot of 2 is free"):
        pool.allocate()
    pool.release(states[0])
    assert pool.free_slots == 1
    with pytest.raises(AssertionError, match="is not this state's"):
        pool.release(states[0])
    # Its slot has a new owner now, which the old one must not end.
    pool.allocate()
    with pytest.raises(AssertionError, match="is not this state's"):
        pool.release(states[0])


def test_pool_refuses_to_have_no_slot() -> None:
    with pytest.raises(InvalidRequest, match="state slots: given 0"):
        StatePool(CONFIG, slots=0)


def test_pool_gives_no_slot_to_two_threads() -> None:
    pool = StatePool(CONFIG, slots=4)

    def use(worker: int) -> int:
        clashes = 0
        for _ in range(100):
            state = pool.allocate()
            state.memory[0] = worker
            clashes += int(state.memory[0]) != worker
            pool.release(state)
        return clashes

    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(use, range(1, 5))) == [0, 0, 0, 0]
    assert pool.free_slots == 4


def test_rings_are_views_of_the_slot_in_order_of_layer() -> None:
    state = StatePool(CONFIG, slots=1).allocate()
    assert len(state.window_rings) == 12
    for number, ring in enumerate(state.window_rings):
        assert ring.rows.shape == (RING_ROWS, 66)
        ring.rows.fill_(number + 1)
    ring_bytes = RING_ROWS * 66
    padded_bytes = -(-ring_bytes // 32) * 32
    for number in range(12):
        run = state.memory[number * padded_bytes : (number + 1) * padded_bytes]
        assert (run[:ring_bytes] == number + 1).all()
        assert not run[ring_bytes:].any()
    rows = state.compressor_rings[OWNER].rows
    assert rows.shape == (COMPRESSOR_ROWS, 2, 64)
    assert rows.dtype == torch.float32
    rows[0, 0, 0] = 1.0
    assert bytes(state.memory[12 * padded_bytes : 12 * padded_bytes + 4].numpy()) == b"\0\0\x80\x3f"


def test_row_of_a_position_stands_at_its_place_in_the_ring() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(131)
    ring = writer.state.window_rings[4].rows
    for position in (130, 110):
        assert torch.equal(ring[position % RING_ROWS], window_rows(4, position, [1])[0])
    ring = writer.state.compressor_rings[4].rows
    assert torch.equal(ring[130 % 7], compressor_rows(130, [1])[0])


@pytest.mark.parametrize(
    "length", [1, 7, 8, 9, 15, 16, 17, 21, 22, 23, 43, 44, 45, 127, 128, 129, 130, 255, 256, 257]
)
@pytest.mark.parametrize("piece", [1, 5, 21, 22, 23, 300])
def test_state_in_a_used_slot_reads_what_was_written_in_any_pieces(length: int, piece: int) -> None:
    writer = Writer(dirty_pool().allocate())
    for first in range(0, length, piece):
        writer.append(min(piece, length - first))
        writer.check()
    assert writer.state.length == length


@pytest.mark.parametrize("tokens", [1, 5, 21, 22, 23, 40])
def test_state_does_not_show_rows_that_are_not_its_own(tokens: int) -> None:
    state = dirty_pool().allocate()
    with pytest.raises(AssertionError, match="rows 0 to 0 asked for, readable are 0 to -1"):
        state.read_window_rows(0, 0, 1)
    Writer(state).append(tokens)
    first = max(tokens - RING_ROWS, 0)
    assert len(state.read_window_rows(0, first, tokens)) == tokens - first
    for bounds in ((first - 1, tokens), (first, tokens + 1), (tokens, tokens - 1)):
        with pytest.raises(AssertionError, match=f"readable are {first} to {tokens - 1}"):
            state.read_window_rows(0, *bounds)
    first = max(tokens - COMPRESSOR_ROWS, 0)
    with pytest.raises(AssertionError, match=f"readable are {first} to"):
        state.read_compressor_rows(OWNER, first - 1, tokens)


def test_reading_no_rows_is_allowed_anywhere() -> None:
    state = dirty_pool().allocate()
    state.decoder_window_start = 90
    assert state.read_window_rows(8, 40, 40).shape == (0, 66)
    assert state.read_compressor_rows(OWNER, 12, 12).shape == (0, 2, 64)


def test_rows_read_are_a_copy() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(20)
    before = writer.state.read_window_rows(0, 10, 20)
    kept = before.clone()
    writer.append(30)
    assert torch.equal(before, kept)


def test_window_starts_hide_rows_of_their_half_only() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(20)
    state = writer.state
    state.encoder_window_start, state.decoder_window_start = 6, 12
    for ring, start in ((0, 6), (4, 6), (5, 12), (8, 12), (DRAFT_RING, 12), (11, 12)):
        assert len(state.read_window_rows(ring, start, 20)) == 20 - start
        with pytest.raises(AssertionError, match=f"readable are {start} to 19"):
            state.read_window_rows(ring, start - 1, 20)


def test_rows_before_a_gap_are_gone() -> None:
    """The decoder half of a long prompt runs its tail only."""
    state = dirty_pool().allocate()
    rows = torch.zeros(4, 66, dtype=torch.uint8)
    state.write_window_rows(8, 0, rows)
    state.write_window_rows(8, 10, rows)
    assert len(state.read_window_rows(8, 10, 14)) == 4
    with pytest.raises(AssertionError, match="readable are 10 to 13"):
        state.read_window_rows(8, 3, 14)


@pytest.mark.parametrize("length", [6, 16, 22, 28, 100, 131])
def test_rewind_of_a_whole_draft_keeps_all_that_the_next_token_needs(length: int) -> None:
    writer = Writer(dirty_pool().allocate())
    writer.append(length)
    for taken in range(7):
        writer.append(6)
        writer.rewind(length + 6 - taken)
        writer.check()
        writer.rewind(length)
        writer.check()
    with pytest.raises(AssertionError, match=rf"rewind to {length - 1}, allowed are {length} to"):
        writer.rewind(length - 1)


def test_rewind_does_not_add_up_beyond_what_the_rings_keep() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(50)
    writer.rewind(47)
    writer.rewind(44)
    with pytest.raises(AssertionError, match="rewind to 43, allowed are 44 to 44"):
        writer.rewind(43)
    writer.append(1)
    with pytest.raises(AssertionError, match="rewind to 43, allowed are 44 to 45"):
        writer.rewind(43)
    writer.append(8)
    writer.rewind(47)
    writer.check()


def test_rewind_counts_rows_that_were_written_and_not_committed() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(40)
    writer.write(4)
    writer.rewind(38)
    writer.check()
    with pytest.raises(AssertionError, match="rewind to 37, allowed are 38 to 38"):
        writer.rewind(37)


def test_rewind_counts_the_rows_of_a_pass_that_ended_in_its_first_layer() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(40)
    writer.state.write_window_rows(0, 40, window_rows(0, 40, [9] * 4))
    writer.rewind(38)
    writer.check()
    with pytest.raises(AssertionError, match="rewind to 37, allowed are 38 to 38"):
        writer.rewind(37)


def test_state_is_lost_when_a_pass_wrote_more_than_a_draft_and_did_not_advance() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(40)
    writer.write(7)
    with pytest.raises(AssertionError, match="rewind to 40, allowed are 41 to 40"):
        writer.rewind(40)


def test_rewind_to_a_greater_length_is_refused() -> None:
    writer = Writer(StatePool(CONFIG, slots=1).allocate())
    writer.append(3)
    with pytest.raises(AssertionError, match="rewind to 4"):
        writer.rewind(4)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 60)),
        st.tuples(st.just("write"), st.integers(1, 6)),
        st.tuples(st.just("rewind"), st.integers(0, 6)),
        st.tuples(st.just("reuse"), st.just(0)),
    ),
    max_size=25,
)


@given(steps)
def test_state_agrees_with_a_list_of_all_rows(steps: list[tuple[str, int]]) -> None:
    pool = dirty_pool()
    writer, reached = Writer(pool.allocate()), 0
    for step, number in steps:
        length = writer.state.length
        if step == "append":
            writer.append(number)
        elif step == "write":
            # A draft that nobody commits; what comes next writes over it.
            writer.write(number)
            reached = max(reached, length + number)
        elif step == "rewind" and reached - 6 <= length - number >= 0:
            writer.rewind(length - number)
        elif step == "reuse":
            pool.release(writer.state)
            writer, reached = Writer(pool.allocate()), 0
        reached = max(reached, writer.state.length)
        writer.check()


def test_recent_ids_are_those_of_the_newest_tokens() -> None:
    state = StatePool(CONFIG, slots=1).allocate()
    assert state.recent_ids == [NO_ID] * 9
    state.advance(2, [5, NO_ID])
    assert state.recent_ids == [NO_ID] * 7 + [5, NO_ID]
    state.advance(20, torch.arange(100, 120))
    assert state.recent_ids == list(range(111, 120))
    # Those of a pass that came with its lookback.
    state.advance(1, [118, 119, 7])
    assert state.recent_ids == [*range(112, 120), 7]
    state.rewind(20)
    assert state.recent_ids == [NO_ID] * 3 + list(range(112, 118))
    with pytest.raises(AssertionError):
        state.advance(3, [1, 2])


def test_state_without_engram_keeps_no_ids() -> None:
    state = StatePool(replace(CONFIG, engram=None), slots=1).allocate()
    state.advance(20)
    state.rewind(17)
    assert (state.recent_ids, state.length) == ([], 17)


def test_state_that_starts_after_cached_blocks_sees_no_row_before() -> None:
    state = dirty_pool().allocate()
    state.start_at(256, range(247, 256))
    assert state.length == state.encoder_window_start == state.decoder_window_start == 256
    assert state.recent_ids == list(range(247, 256))
    for ring in (0, 8, DRAFT_RING):
        with pytest.raises(AssertionError, match="readable are 256 to 255"):
            state.read_window_rows(ring, 255, 256)
    writer = Writer(state)
    writer.versions = [0] * 256
    writer.append(3)
    assert torch.equal(state.read_window_rows(0, 256, 259), window_rows(0, 256, [1] * 3))
    writer.rewind(256)
    with pytest.raises(AssertionError, match="rewind to 255, allowed are 256 to 256"):
        writer.rewind(255)


@pytest.mark.parametrize(("position", "ids"), [(131, range(131)), (256, range(8))])
def test_state_refuses_to_start_where_it_cannot(position: int, ids: range) -> None:
    state = StatePool(CONFIG, slots=1).allocate()
    with pytest.raises(AssertionError):
        state.start_at(position, ids)
    assert state.length == 0


def test_clearing_keeps_what_may_be_read_and_nothing_else() -> None:
    states = [dirty_pool().allocate(), StatePool(CONFIG, slots=1).allocate()]
    for state in states:
        writer = Writer(state)
        writer.append(13)
        writer.write(4)
        writer.rewind(13)
        state.clear_unreadable()
        writer.check()
    assert torch.equal(states[0].memory, states[1].memory)
    assert int((states[0].window_rings[0].rows.sum(1) != 0).sum()) == 13
