"""A model that costs next to nothing, for tests of what an engine does.

Its numbers mean nothing, but they hang on everything that a runner reads, as those of a real model
do: each token on the 128 rows before it, and on every entry of the blocks before it and its place.
So a block or a row that is wrong, lost, or another sequence's shows in all logits after it. The
rules are those of V4.1 (docs/decisions/0030): a replay begins with no rows and leaves its entries.
A dense one has no rows: all that it goes on from is in the blocks.

Beside the bits it sees that passes keep to what `ModelRunner` allows, and that nothing is written
that somebody else reads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Run
from dataclasses import dataclass

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.model_runner import Buffer, Part, WaitForSection, Window, wait_for_nothing
from engine.runners.marks import read_marks, write_marks
from engine.runners.v41_runner import farthest_hit, plan_borders
from engine.sampling import FloatArray
from engine.sequence import Sequence
from engine.window_record import WindowRecord
from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS, BlockLayout, Section
from kvstore.policy import DRAFT_TOKENS, MISS, WINDOW_RING_TOKENS, WINDOW_TOKENS, HitPlan

SECTIONS = 2
ENTRY_BYTES = 4
SECTION_BYTES = BLOCK_TOKENS * ENTRY_BYTES
LAYOUT = BlockLayout(tuple(Section(f"half {half}", SECTION_BYTES) for half in range(SECTIONS)))
ROW_BYTES = 8
WINDOW_LAYOUT = BlockLayout((Section("rows", WINDOW_TOKENS * ROW_BYTES),))
STATE_LAYOUT = BlockLayout((Section("ring", WINDOW_RING_TOKENS * ROW_BYTES),))
VOCABULARY = 256
MASK = (1 << 64) - 1
SPOILED = 0xFEFE_FEFE_FEFE_FEFE
SCALES = np.random.Philox(key=7).random_raw(VOCABULARY) | np.uint64(1)
WINDOW_FIRST = struct.Struct("<Q")


@dataclass(eq=False)
class State:
    """Rows window_first .. length - 1 are there, of which the ring holds the newest."""

    slot: int
    length: int = 0
    window_first: int = 0
    is_lost: bool = False
    """A pass over it was broken off."""


class SummingRunner:
    """A `ModelRunner` with pools of its own."""

    context_tokens = 4096
    vocabulary = VOCABULARY

    def __init__(self, pool_blocks: int, state_slots: int, *, is_dense: bool = False) -> None:
        self.window_layout: BlockLayout | None = None if is_dense else WINDOW_LAYOUT
        self.state_layout: BlockLayout | None = None if is_dense else STATE_LAYOUT
        self._window_tokens = 0 if is_dense else WINDOW_TOKENS
        model = "sums" if is_dense else "sums of rows too"
        self.namespace = Namespace(model=model, weights="none", tokenizer="none", layout=LAYOUT)
        self.pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=pool_blocks)
        entries = self.pool.memory.numpy().view(np.uint32)
        self._halves = entries.reshape(-1, SECTIONS, BLOCK_TOKENS)
        self._rings = np.full((state_slots, WINDOW_RING_TOKENS), SPOILED, np.uint64)
        self._free_slots = list(range(state_slots))

    @property
    def free_states(self) -> int:
        return len(self._free_slots)

    def open(self, sequence: Sequence) -> None:
        assert sequence.state is None, "the sequence is open"
        sequence.state = State(self._free_slots.pop())
        sequence.computed_tokens, sequence.hit = 0, MISS

    def close(self, sequence: Sequence) -> None:
        if sequence.state is not None:
            self._rings[sequence.state.slot] = SPOILED
            self._free_slots.append(sequence.state.slot)
            sequence.state = None

    def start_after(self, sequence: Sequence, plan: HitPlan, window: Window | None) -> None:
        assert (window is None) == (plan.window_anchor is None), plan
        known_tokens, is_dense = len(sequence.token_ids), self.window_layout is None
        farthest = known_tokens - 1 if is_dense else farthest_hit(sequence.prompt_tokens)
        assert plan.hit_tokens + plan.replay_tokens <= farthest, plan
        state = self._state_of(sequence)
        assert state.length == 0, "only a new state can begin behind a hit"
        state.length = state.window_first = plan.hit_tokens
        if window is not None:
            assert plan.window_anchor == plan.hit_tokens, plan
            state.window_first -= WINDOW_TOKENS
            stored = window.memory.numpy() if isinstance(window, WindowRecord) else window
            rows = np.frombuffer(stored, np.uint64)
            self._rings[state.slot, _places(state.window_first, state.length)] = rows
        sequence.hit = plan
        sequence.computed_tokens = plan.hit_tokens

    def chunk_borders(self, sequence: Sequence) -> list[int]:
        if self.window_layout is None:
            return []
        return plan_borders(sequence.prompt_tokens, len(sequence.token_ids))

    def compute(
        self, parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        assert parts, "a pass over nothing"
        for part in parts:
            self._check(part)
            self._state_of(part.sequence).is_lost = True
        sums = [[0] * SECTIONS for _ in parts]
        for section in range(SECTIONS):
            wait_for_section(section)
            for number, part in enumerate(parts):
                sums[number][section] = self._sum(part.sequence, section)
        return [self._run(part, *both) for part, both in zip(parts, sums, strict=True)]

    def window_anchor(self, sequence: Sequence) -> int | None:
        state = self._state_of(sequence)
        anchor = state.length // BLOCK_TOKENS * BLOCK_TOKENS
        is_there = anchor > 0 and state.window_first <= anchor - WINDOW_TOKENS
        return anchor if is_there and state.length - anchor <= DRAFT_TOKENS else None

    def copy_window(self, sequence: Sequence, anchor: int) -> WindowRecord:
        assert anchor == self.window_anchor(sequence), anchor
        rows = self._rings[sequence.state.slot, _places(anchor - WINDOW_TOKENS, anchor)]
        return WindowRecord(torch.frombuffer(bytearray(rows.tobytes()), dtype=torch.uint8))

    def pack_state(self, sequence: Sequence, into: memoryview | None) -> bytes:
        state = self._state_of(sequence)
        assert (into is None) == (self.state_layout is None)
        if into is not None:
            into[:] = self._rings[state.slot].tobytes()
        return write_marks(sequence, WINDOW_FIRST.pack(state.window_first))

    def unpack_state(self, sequence: Sequence, marks: bytes, state: Buffer | None) -> None:
        assert (state is None) == (self.state_layout is None)
        new = self._state_of(sequence)
        computed_tokens, sequence.hit, own = read_marks(marks, sequence)
        (new.window_first,) = WINDOW_FIRST.unpack(own)
        if state is not None:
            self._rings[new.slot] = np.frombuffer(state, np.uint64)
        new.length = sequence.computed_tokens = computed_tokens

    def open_block_bytes(self, sequence: Sequence) -> bytes:
        block, tokens = divmod(sequence.computed_tokens, BLOCK_TOKENS)
        if tokens == 0:
            return b""
        entries = self._halves[sequence.block_ids[block]].copy()
        entries[:, tokens:] = 0
        return bytes(entries.tobytes())

    # Inside ---------------------------------------------------------------------------------------

    def _state_of(self, sequence: Sequence) -> State:
        state = sequence.state
        assert isinstance(state, State), "the sequence is not open"
        assert not state.is_lost, "it was lost in a pass, and not opened anew"
        assert state.length == sequence.computed_tokens, (state.length, sequence.computed_tokens)
        return state

    def _check(self, part: Part) -> None:
        sequence, first, end = part.sequence, part.sequence.computed_tokens, part.end
        assert first < end <= len(sequence.token_ids), (first, end)
        ends = {*self.chunk_borders(sequence), sequence.prompt_tokens, len(sequence.token_ids)}
        assert end % BLOCK_TOKENS == 0 or end in ends, (first, end)
        assert not any(first < at < end for at in self.chunk_borders(sequence)), (first, end)
        assert end <= len(sequence.block_ids) * BLOCK_TOKENS, "a token without a block"

    def _sum(self, sequence: Sequence, section: int) -> int:
        """Of all entries before the next token, each times its place."""
        entries = self._halves[sequence.block_ids, section]
        before = entries.reshape(-1)[: sequence.computed_tokens].astype(np.uint64)
        return int(np.dot(before, np.arange(1, len(before) + 1, dtype=np.uint64)))

    def _run(self, part: Part, *sums: int) -> FloatArray | None:
        sequence, first, end = part.sequence, part.sequence.computed_tokens, part.end
        state: State = sequence.state
        past = self._weigh(*sums)
        rows = self._window_rows(state)
        window, before = sum(rows), len(rows)
        written_first = max(first, sequence.hit.hit_tokens + sequence.hit.replay_tokens)
        halves = self._read(sequence, first, min(written_first, end))
        for at in range(first, end):
            row = _mix(sequence.token_ids[at] + at + window * 0x9E3779B97F4A7C15 + past * 7)
            rows.append(row)
            window += row
            if len(rows) > self._window_tokens:
                window -= rows[-1 - self._window_tokens]
            if at >= written_first:
                halves.append((row >> 32, row & 0xFFFF_FFFF))
            past += (at + 1) * self._weigh(*halves[at - first])
        ring_first = max(first, end - WINDOW_RING_TOKENS)
        self._rings[state.slot, _places(ring_first, end)] = rows[before + ring_first - first :]
        self._write(sequence, halves[written_first - first :], end)
        state.length = sequence.computed_tokens = end
        state.is_lost = False
        is_last = end == len(sequence.token_ids)
        return _logits(row + sequence.prompt_tokens) if is_last else None

    def _window_rows(self, state: State) -> list[int]:
        first = max(state.window_first, state.length - self._window_tokens)
        return list(map(int, self._rings[state.slot, _places(first, state.length)]))

    def _read(self, sequence: Sequence, first: int, end: int) -> list[tuple[int, int]]:
        places = range(first, end)
        found = [self._halves[sequence.block_ids[at // 128], :, at % 128] for at in places]
        return [(int(one), int(other)) for one, other in found]

    def _write(self, sequence: Sequence, halves: list[tuple[int, int]], end: int) -> None:
        """Where nobody else reads, and nobody may want to read again what is there."""
        at = end - len(halves)
        while at < end:
            block, place = divmod(at, BLOCK_TOKENS)
            count = min(BLOCK_TOKENS - place, end - at)
            block_id = sequence.block_ids[block]
            begin = at - (end - len(halves))
            is_own = self.pool._references[block_id] == 1 and not self.pool._is_kept[block_id]
            assert is_own, f"block {block_id} is read by others"
            new = np.array(halves[begin : begin + count], np.uint32).T
            self._halves[block_id, :, place : place + count] = new
            at += count

    @staticmethod
    def _weigh(one: int, other: int) -> int:
        return 3 * one + 5 * other


def _mix(value: int) -> int:
    value &= MASK
    return (value ^ value >> 29) * 0xBF58476D1CE4E5B9 & MASK


def _places(first: int, end: int) -> np.ndarray:
    """Of rows in a ring."""
    return np.arange(first, end) % WINDOW_RING_TOKENS


def _logits(value: int) -> FloatArray:
    mixed = SCALES * np.uint64(_mix(value) | 1)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)
