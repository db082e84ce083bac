"""State of one sequence outside its blocks: window rings, compressor rings, recent token ids.

The rings are views into the exact bytes that are stored and handed over (`layout.state_offsets`,
docs/formats/v41-state.md). A slot that is used again still has the rows of the sequence before:
what may be read is what the sequence at hand wrote, and each ring keeps account of it. When a
state is saved, and where, is decided elsewhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch

from kvstore.layout import BLOCK_TOKENS

from ...errors import InvalidRequest, StateSlotsExhausted
from .config import DeepseekV41Config
from .layout import ByteRun, StateOffsets, group_tokens, state_offsets
from .ring import Ring
from .stored_window import make_record, window_shape

NO_ID = -1
"""In `recent_ids`: the token is an image's, or there is none because the sequence begins later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMarks:
    """Everything of a state but its bytes and its blocks.

    `length_reached` is the position after the last row that was ever written, and `length_min` the
    position that the sequence began at. `ring_ranges` are the positions first .. end - 1 whose rows
    a ring holds: window rings of layers and draft stages, then compressor rings.
    """

    length: int
    length_reached: int
    length_min: int
    encoder_window_start: int
    decoder_window_start: int
    ring_ranges: tuple[tuple[int, int], ...]
    recent_ids: tuple[int, ...]


class SequenceState:
    """What one sequence keeps beside the entries in its blocks. Not for use by two threads at once.

    `block_ids[i]` is the pool's block of tokens 128 i .. 128 i + 127; it may reach beyond `length`.
    `recent_ids` are the compressed ids (Engram) of the newest tokens, the newest last, NO_ID for a
    token of an image or before the start; always as many as a lookback needs after a rewind,
    and none for a model without Engram. `memory` is the slot: uint8 [state bytes].

    Ring layers are numbered over the model, draft stages after the last layer.
    """

    def __init__(
        self, config: DeepseekV41Config, offsets: StateOffsets, *, slot: int, memory: torch.Tensor
    ) -> None:
        assert memory.shape == (offsets.state_bytes,), (memory.shape, offsets.state_bytes)
        self.slot = slot
        self.memory = memory
        self.block_ids: list[int] = []
        self.recent_ids = [NO_ID] * recent_count(config)
        self._window = config.window
        self._window_shape = window_shape(config, offsets)
        self._group_tokens = group_tokens(config)
        self._offsets = offsets
        self._length = 0
        self._length_reached = 0
        self._length_min = 0
        self._rewind_tokens_max = config.ring_rows - config.window
        self.window_rings = [Ring(_rows(memory, run)) for run in offsets.rings]
        self.compressor_rings = {
            layer: Ring(_compressor_rows(memory, run)) for layer, run in offsets.compressors.items()
        }
        self._encoder_rings = self.window_rings[: config.decoder_start]
        self._decoder_rings = self.window_rings[config.decoder_start :]

    @property
    def length(self) -> int:
        """Tokens committed: `advance` adds to it, `rewind` takes away."""
        return self._length

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the sequence's blocks have room for."""
        return len(self.block_ids) * BLOCK_TOKENS

    @property
    def window_memory(self) -> torch.Tensor:
        """The part of the slot that is stored as a window: uint8 [stored bytes], a view."""
        return self.memory[: self._offsets.stored_bytes]

    @property
    def encoder_window_start(self) -> int:
        """Position before which no window row of an encoder layer may be seen."""
        return self._encoder_rings[0].start

    @encoder_window_start.setter
    def encoder_window_start(self, position: int) -> None:
        _set_start(self._encoder_rings, position)

    @property
    def decoder_window_start(self) -> int:
        """Position before which no window row of a decoder layer or draft stage may be seen."""
        return self._decoder_rings[0].start

    @decoder_window_start.setter
    def decoder_window_start(self, position: int) -> None:
        _set_start(self._decoder_rings, position)

    def write_window_rows(self, layer: int, first_position: int, rows: torch.Tensor) -> None:
        """Put window rows (uint8 [n, row bytes]) at `first_position` and after it.

        The last ring rows of them are kept. They may be beyond `length`: a forward pass writes
        first and advances afterwards. Rows of later positions, of a draft, are taken back. A pass
        that wrote more than draft block tokens + 1 rows and did not advance has overwritten what
        the next token needs: the state is lost.
        """
        self._length_reached = max(self._length_reached, first_position + len(rows))
        self.window_rings[layer].write(first_position, rows)

    def read_window_rows(self, layer: int, first: int, end: int) -> torch.Tensor:
        """A copy, uint8 [end - first, row bytes], of the rows of positions first .. end - 1.

        They must have been written by this sequence and not overwritten since, and lie at or after
        the window start of the layer's half; anything else is an assertion. With ring rows =
        window + block tokens + 1, the window of a query is there after any rewind that is allowed.
        """
        return self.window_rings[layer].read(first, end)

    def write_compressor_rows(self, owner: int, first_position: int, rows: torch.Tensor) -> None:
        """Put gate and content (float32 [n, 2, D]) at `first_position` and after it."""
        self._length_reached = max(self._length_reached, first_position + len(rows))
        self.compressor_rings[owner].write(first_position, rows)

    def read_compressor_rows(self, owner: int, first: int, end: int) -> torch.Tensor:
        """A copy, float32 [end - first, 2, D], of the rows of positions first .. end - 1.

        Bounds are those of `read_window_rows`; the tokens of the open group are always there.
        """
        return self.compressor_rings[owner].read(first, end)

    def advance(self, tokens: int, compressed_ids: Sequence[int] | torch.Tensor = ()) -> None:
        """Commit `tokens` whose rows have been written.

        A model with Engram gives `compressed_ids`, which end with one id for each of them.
        """
        assert tokens >= 0, tokens
        count = min(tokens, len(self.recent_ids))
        if count:
            assert len(compressed_ids) >= tokens, (len(compressed_ids), tokens)
            newest = [int(number) for number in compressed_ids[-count:]]
            self.recent_ids = [*self.recent_ids, *newest][-len(self.recent_ids) :]
        self._length += tokens
        self._length_reached = max(self._length_reached, self._length)

    def rewind(self, length: int) -> None:
        """Take back the tokens from `length` on, and every row written beyond it.

        At most draft block tokens + 1 before the end of all that was ever written: that far the
        rings still have the window, and `recent_ids` the lookback. A window start beyond `length`
        comes back to it: what is written next may be seen.
        """
        length_min = max(self._length_min, self._length_reached - self._rewind_tokens_max)
        assert length_min <= length <= self._length, (
            f"rewind to {length}, allowed are {length_min} to {self._length}"
        )
        taken = self._length - length
        if self.recent_ids and taken:
            self.recent_ids = [NO_ID] * taken + self.recent_ids[:-taken]
        self._length = length
        for ring in self.all_rings():
            ring.rewind(length)

    def marks(self) -> StateMarks:
        """What the state knows of its bytes; `resume` of another state takes it."""
        return StateMarks(
            length=self._length,
            length_reached=self._length_reached,
            length_min=self._length_min,
            encoder_window_start=self.encoder_window_start,
            decoder_window_start=self.decoder_window_start,
            ring_ranges=tuple((ring.first, ring.end) for ring in self.all_rings()),
            recent_ids=tuple(self.recent_ids),
        )

    def resume(self, marks: StateMarks) -> None:
        """Take the place of the state that gave `marks`, whose bytes are in `memory` already.

        For a new state only.
        """
        assert self._length_reached == 0, "only a new state can take another's place"
        assert len(marks.recent_ids) == len(self.recent_ids), marks.recent_ids
        self._length = marks.length
        self._length_reached = marks.length_reached
        self._length_min = marks.length_min
        self.recent_ids = list(marks.recent_ids)
        self.encoder_window_start = marks.encoder_window_start
        self.decoder_window_start = marks.decoder_window_start
        for ring, (first, end) in zip(self.all_rings(), marks.ring_ranges, strict=True):
            ring.hold(first, end)

    def start_at(self, position: int, recent_ids: Sequence[int]) -> None:
        """Go on at `position` of a sequence whose blocks before it are complete already.

        No row before it may be seen, by any layer. `recent_ids` are the compressed ids of the
        tokens before it, the newest last: as many as `recent_ids` has (or all there are). For a new
        state only; `position` is a multiple of every compress ratio, so that no group is open (a
        hit ends at a multiple of 128).
        """
        assert self._length_reached == 0, "only a new state can begin at another position"
        assert position % self._group_tokens == 0, (position, self._group_tokens)
        count = len(self.recent_ids)
        assert len(recent_ids) >= min(count, position), (len(recent_ids), count, position)
        if count:
            self.recent_ids = [*self.recent_ids, *recent_ids][-count:]
        self._length = self._length_reached = self._length_min = position
        self.encoder_window_start = self.decoder_window_start = position
        for ring in self.all_rings():
            ring.hold(position, position)

    def hold_stored_window(self) -> None:
        """Say that `window_memory` is filled with the window of a sequence of this length.

        Called after `start_at`; the encoder may then see the window before that position.
        """
        assert self._length_min == self._length == self._length_reached > 0, self._length
        start = max(self._length - self._window, 0)
        for ring in self._encoder_rings:
            ring.hold(start, self._length)
        _set_start(self._encoder_rings, start)

    def holds_window(self, position: int) -> bool:
        """Whether the encoder's window rows before `position` may all be read."""
        first = position - self._window
        return all(
            ring.readable_from <= first and position <= min(ring.end, self._length)
            for ring in self._encoder_rings
        )

    def copy_stored_window(self, position: int) -> torch.Tensor:
        """A copy of the encoder's window before `position` as it is stored: uint8 [stored bytes],
        on the slot's device; on a GPU it is queued in the current stream.

        Nothing else of the sequence gets into it, so the copy is the same whenever it is taken.
        """
        assert self.holds_window(position), f"no window at {position}, length {self._length}"
        if self.memory.device.type != "cpu":
            return make_record(self.memory, position, self._window_shape)
        into = self.window_memory.clone()
        end = 0
        for run in self._offsets.rings[: len(self._encoder_rings)]:
            into[end : run.offset] = 0
            ring = Ring(_rows(into, run))
            ring.hold(position - self._window, position)
            ring.clear_unreadable()
            end = run.end
        into[end:] = 0
        return into

    def clear_unreadable(self) -> None:
        """Zero every row of the slot that may not be read, and the padding.

        What is left of the slot is this sequence's own, and depends on it alone.
        """
        offset = 0
        runs = [*self._offsets.rings, *self._offsets.compressors.values()]
        for run, ring in zip(runs, self.all_rings(), strict=True):
            self.memory[offset : run.offset] = 0
            ring.clear_unreadable()
            offset = run.end
        self.memory[offset:] = 0

    def all_rings(self) -> list[Ring]:
        """Window rings of layers and draft stages, then compressor rings: in order of bytes."""
        return [*self.window_rings, *self.compressor_rings.values()]


class StatePool:
    """`slots` state slots: uint8 `memory` [slot, state bytes], on `device`. May be used by several
    threads.

    Memory is zero at first and never cleared again; a slot given back is used again as it is.
    """

    def __init__(
        self, config: DeepseekV41Config, slots: int, *, device: torch.device | str = "cpu"
    ) -> None:
        if slots < 1:
            raise InvalidRequest("state slots", given=slots, expected="1 or more")
        self.config = config
        self.slots = slots
        self.offsets = state_offsets(config)
        self.memory = torch.zeros(slots, self.offsets.state_bytes, dtype=torch.uint8, device=device)
        self._free = list(reversed(range(slots)))
        self._in_use: dict[int, SequenceState] = {}
        self._lock = Lock()

    @property
    def free_slots(self) -> int:
        with self._lock:
            return len(self._free)

    def allocate(self) -> SequenceState:
        """State of a new sequence, of length 0 and without blocks.

        Raises StateSlotsExhausted if no slot is free.
        """
        with self._lock:
            if not self._free:
                raise StateSlotsExhausted(slots=self.slots)
            slot = self._free.pop()
            state = SequenceState(self.config, self.offsets, slot=slot, memory=self.memory[slot])
            self._in_use[slot] = state
        return state

    def release(self, state: SequenceState) -> None:
        """Take the slot back; the state must not be used any more. Its blocks are the caller's."""
        with self._lock:
            assert self._in_use.get(state.slot) is state, f"slot {state.slot} is not this state's"
            del self._in_use[state.slot]
            self._free.append(state.slot)


def recent_count(config: DeepseekV41Config) -> int:
    """Ids kept: the lookback of the longest n-gram, and the tokens that a rewind may take back."""
    if config.engram is None:
        return 0
    return config.engram.ngram_max - 1 + config.draft.block_tokens + 1


def _rows(memory: torch.Tensor, run: ByteRun) -> torch.Tensor:
    return memory[run.offset : run.end].view(run.entries, run.row_bytes)


def _compressor_rows(memory: torch.Tensor, run: ByteRun) -> torch.Tensor:
    return _rows(memory, run).view(torch.float32).view(run.entries, 2, -1)


def _set_start(rings: Iterable[Ring], position: int) -> None:
    assert position >= 0, position
    for ring in rings:
        ring.start = position
