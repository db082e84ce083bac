"""Runs a DeepSeek-V4.1 over sequences: the parts of a pass in one forward, any cut, equal bits.

What a token's bits depend on is decided here by two numbers, both functions of the prompt's length
and of the hit alone (docs/decisions/0030): where the decoder half begins, and which entries a
replay leaves as they are. The formulas are `engine.models.deepseek_v41`'s.
"""

import hashlib
from collections.abc import Sequence as Run

import torch

from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS, BlockLayout
from kvstore.policy import MISS, WINDOW_RING_TOKENS, HitPlan, window_anchor_after_prefill

from ..block_pool import BlockPool
from ..errors import DeviceFull, HandoverRefused, InvalidRequest
from ..kv.cuda_streams import mark_current
from ..kv.mover import first_line
from ..model_runner import Buffer, Part, WaitForSection, Window, wait_for_nothing
from ..models.deepseek_v41.handover import (
    has_window,
    open_block_bytes,
    pack_slot,
    restore_window,
    unpack_slot,
)
from ..models.deepseek_v41.layout import handover_layout, owner_offsets, window_layout
from ..models.deepseek_v41.model import DeepseekV41
from ..models.deepseek_v41.rows import Chunk
from ..models.deepseek_v41.state import SequenceState, StatePool
from ..sampling import FloatArray
from ..sequence import Sequence
from ..window_record import WindowRecord
from .marks import read_marks, write_marks

DECODER_TAIL_TOKENS = 140
"""Tokens at a prompt's end that run the decoder half too."""


def farthest_hit(prompt_tokens: int) -> int:
    """Where the longest hit of a prompt may end: floor128(L - 134), 0 if there can be none."""
    return max(prompt_tokens - WINDOW_RING_TOKENS, 0) // BLOCK_TOKENS * BLOCK_TOKENS


def decoder_first(prompt_tokens: int, tail_tokens: int) -> int:
    """The first position that runs the decoder half: max(0, L - tail, farthest hit).

    After a hit there are no decoder rows of the tokens before it. Nor may a cold run have any,
    whose bits have to be the same: so the tail is up to 6 tokens shorter where a hit might end
    within it, and still the window and a draft long.
    """
    return max(0, prompt_tokens - tail_tokens, farthest_hit(prompt_tokens))


def plan_borders(prompt_tokens: int, token_count: int) -> list[int]:
    """Where window state is copied as prompt and known answer (`token_count` in all) are run.

    In the prompt: where the longest hit of this very prompt ends, and where the next turn's may.
    In the answer: the newest two multiples of 128, as decoding would have left them.
    """
    borders = {farthest_hit(prompt_tokens), window_anchor_after_prefill(prompt_tokens) or 0}
    if token_count > prompt_tokens:
        newest = token_count // BLOCK_TOKENS * BLOCK_TOKENS
        borders |= {at for at in (newest - BLOCK_TOKENS, newest) if at >= prompt_tokens}
    return sorted(borders - {0})


class V41Runner:
    """A DeepSeek-V4.1 as a `ModelRunner`. `Sequence.state` is its `SequenceState`.

    On a GPU a pass that gives no logits returns when it is under way, on the current stream; all
    that follows on that stream, and every read by the host, comes after it.

    Raises InvalidRequest for a decoder tail shorter than the window and a draft.
    """

    def __init__(
        self,
        model: DeepseekV41,
        *,
        pool: BlockPool,
        states: StatePool,
        namespace: Namespace,
        decoder_tail_tokens: int = DECODER_TAIL_TOKENS,
    ) -> None:
        """`pool` is the one that `model` was built for; `states` are on the same device."""
        assert states.memory.device == pool.memory.device
        tail_min = max(WINDOW_RING_TOKENS, model.config.ring_rows)
        if decoder_tail_tokens < tail_min:
            raise InvalidRequest(
                "decoder tail tokens", given=decoder_tail_tokens, expected=f"{tail_min} or more"
            )
        self.pool = pool
        self.namespace = namespace
        self.window_layout: BlockLayout | None = window_layout(model.config)
        self.state_layout: BlockLayout | None = handover_layout(model.config)
        self.context_tokens = model.config.positions_max
        self.vocabulary = model.config.vocabulary
        self._model = model
        self._states = states
        self._tail_tokens = decoder_tail_tokens
        self._sections = {owner: rank for rank, owner in enumerate(owner_offsets(model.config))}
        # Who made the numbers, for those that take over a state: all that the namespace says.
        self._model_id = hashlib.sha256(namespace.namespace_id).digest()

    @property
    def free_states(self) -> int:
        return self._states.free_slots

    def open(self, sequence: Sequence) -> None:
        assert sequence.state is None, "the sequence is open"
        sequence.state = self._states.allocate()
        sequence.computed_tokens = 0
        sequence.hit = MISS

    def close(self, sequence: Sequence) -> None:
        if sequence.state is not None:
            self._states.release(sequence.state)
            sequence.state = None

    def start_after(self, sequence: Sequence, plan: HitPlan, window: Window | None) -> None:
        assert (window is None) == (plan.window_anchor is None), "a window, or none, as planned"
        assert plan.window_anchor in (None, plan.hit_tokens), plan
        stored_tokens = plan.hit_tokens + plan.replay_tokens
        assert stored_tokens <= farthest_hit(sequence.prompt_tokens), plan
        state = self._state_of(sequence)
        before = sequence.token_ids[: plan.hit_tokens]
        if plan.hit_tokens:
            state.start_at(plan.hit_tokens, self._model.recent_ids_of(before))
        if window is not None:
            restore_window(state, window.memory if isinstance(window, WindowRecord) else window)
        sequence.hit = plan
        sequence.computed_tokens = plan.hit_tokens

    def chunk_borders(self, sequence: Sequence) -> list[int]:
        return plan_borders(sequence.prompt_tokens, len(sequence.token_ids))

    def compute(
        self, parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        chunks = [self._chunk(part) for part in parts]
        result = self._model.forward(
            chunks, before_owner=lambda layer: wait_for_section(self._sections[layer])
        )
        found: list[FloatArray | None] = []
        for part, logits_1V in zip(parts, result.logits, strict=True):
            part.sequence.computed_tokens = part.end
            is_last = part.end == len(part.sequence.token_ids)
            found.append(logits_1V[-1].cpu().numpy() if is_last else None)
        return found

    def _chunk(self, part: Part) -> Chunk:
        sequence = part.sequence
        state = self._state_of(sequence)
        # Blocks may have been added since the last pass.
        state.block_ids = sequence.block_ids
        return Chunk(
            state=state,
            token_ids=sequence.token_ids[sequence.computed_tokens : part.end],
            decoder_first=decoder_first(sequence.prompt_tokens, self._tail_tokens),
            entries_first=sequence.hit.hit_tokens + sequence.hit.replay_tokens,
        )

    def window_anchor(self, sequence: Sequence) -> int | None:
        state = self._state_of(sequence)
        anchor = sequence.computed_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        return anchor if has_window(state, anchor) else None

    def copy_window(self, sequence: Sequence, anchor: int) -> WindowRecord:
        try:
            record = self._state_of(sequence).copy_stored_window(anchor)
        except torch.OutOfMemoryError as error:
            raise DeviceFull(f"window state: {first_line(error)}") from error
        return WindowRecord(record, mark_current(record.device))

    def pack_state(self, sequence: Sequence, into: memoryview | None) -> bytes:
        assert into is not None, "a state slot has to go too"
        state = self._state_of(sequence)
        header = pack_slot(
            state, into, states=self._states, blocks=self.pool, model_id=self._model_id
        )
        return write_marks(sequence, header)

    def unpack_state(self, sequence: Sequence, marks: bytes, state: Buffer | None) -> None:
        if state is None:
            raise HandoverRefused("state slot", given="none", expected="one")
        computed_tokens, hit, header = read_marks(marks, sequence)
        new = self._state_of(sequence)
        unpack_slot(
            new,
            header,
            state,
            length=computed_tokens,
            states=self._states,
            blocks=self.pool,
            model_id=self._model_id,
        )
        new.block_ids = sequence.block_ids
        sequence.hit = hit
        sequence.computed_tokens = computed_tokens

    def open_block_bytes(self, sequence: Sequence) -> bytes:
        return open_block_bytes(self._state_of(sequence), states=self._states, blocks=self.pool)

    def _state_of(self, sequence: Sequence) -> SequenceState:
        state = sequence.state
        assert isinstance(state, SequenceState), "the sequence is not open"
        assert state.length == sequence.computed_tokens, (state.length, sequence.computed_tokens)
        return state
