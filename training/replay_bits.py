"""What a hit costs a DeepSeek-V4.1 model: bits of what follows a prompt.

How the prompt was computed makes the difference; what follows is the document's own text, so that
every way is judged on the same bytes. Blocks that a hit takes are copies of those of the whole
computation, which is what a store gives back. Not for timing anything.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.handover import restore_window, window_state
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.load import LoadedModel
from engine.models.deepseek_v41.rows import Chunk
from engine.models.deepseek_v41.state import SequenceState, StatePool
from engine.runners.v41_runner import DECODER_TAIL_TOKENS, decoder_first
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import WINDOW_RING_TOKENS, HitPlan, plan_hit

from .replay_scores import Prefix, Reading

CHUNK_TOKENS = 512
"""Tokens of one forward pass, at most; the bits do not depend on it."""

PROMPT_TOKENS_MIN = WINDOW_RING_TOKENS + 2 * BLOCK_TOKENS
"""The shortest prompt of which something is left to hit once a block is replayed."""


def window_plan(prompt_tokens: int) -> HitPlan:
    """The longest hit of a prompt all of which is stored, window state included."""
    blocks = prompt_tokens // BLOCK_TOKENS
    return plan_hit(prompt_tokens, blocks, range(0, prompt_tokens, BLOCK_TOKENS))


class PrefixJudge:
    """A model with room for two documents of at most `tokens_max` tokens: one to take from."""

    def __init__(self, loaded: LoadedModel, *, tokens_max: int) -> None:
        self._blocks_each = -(-tokens_max // BLOCK_TOKENS)
        self._blocks = BlockPool(
            block_bytes=block_layout(loaded.config).block_bytes,
            capacity_blocks=2 * self._blocks_each,
        )
        self._states = StatePool(loaded.config, slots=2)
        self._model = loaded.build(self._blocks)

    def judge(
        self, ids: NDArray[np.int64], *, prompt_lengths: Sequence[int], answer_tokens: int
    ) -> list[dict[Prefix, Reading]]:
        """For each prompt length, by how the prompt was computed, the tokens after it.

        `ids`: int64 [T], from BOS on; T reaches to the end of the last answer. Prompt lengths are
        PROMPT_TOKENS_MIN or more.
        """
        assert len(ids) >= max(prompt_lengths) + answer_tokens, len(ids)
        assert min(prompt_lengths) >= PROMPT_TOKENS_MIN, prompt_lengths
        plans = [window_plan(length) for length in prompt_lengths]
        anchors = {plan.hit_tokens for plan in plans}
        with self._opened() as stored:
            logits_TV, windows = self._read_whole(stored, ids[:-1], anchors)
            found = []
            for length, plan in zip(prompt_lengths, plans, strict=True):
                answer = slice(length - 1, length + answer_tokens - 1)
                window = windows[plan.hit_tokens]
                text = ids[: length + answer_tokens]
                logits = {Prefix.WHOLE: logits_TV[answer]}
                logits |= self._read_prefixes(stored, text, length, plan, window)
                found.append(
                    {
                        prefix: read_answer(rows, logits[Prefix.COLD], text[length:])
                        for prefix, rows in logits.items()
                    }
                )
        return found

    def _read_whole(
        self, state: SequenceState, ids: NDArray[np.int64], anchors: set[int]
    ) -> tuple[torch.Tensor, dict[int, bytes]]:
        """Logits float32 [T, V] of every token by every layer, and window states by position."""
        windows = {}
        logits = []
        cuts = sorted({*range(0, len(ids), CHUNK_TOKENS), *anchors, len(ids)})
        for begin, end in pairwise(cuts):
            chunk = Chunk(state=state, token_ids=ids[begin:end].tolist())
            logits += self._model.forward([chunk], wants_all_logits=True).logits
            if end in anchors:
                windows[end] = bytes(window_state(state, end))
        return torch.cat(logits), windows

    def _read_prefixes(
        self,
        stored: SequenceState,
        text: NDArray[np.int64],
        prompt_tokens: int,
        plan: HitPlan,
        window: bytes,
    ) -> dict[Prefix, torch.Tensor]:
        """Logits float32 [answer, V] of the answer that ends `text`, in all ways but WHOLE."""
        cut = HitPlan(plan.hit_tokens, replay_tokens=0, window_anchor=None)
        replay = plan_hit(prompt_tokens, plan.stored_blocks, ())
        with self._opened() as state:
            cold = self._answer(state, text, prompt_tokens, entries_first=0)
            complete = prompt_tokens // BLOCK_TOKENS
            # The decoder half writes no block: what a cold engine saves is what was computed whole.
            assert self._are_equal(state, stored, complete)
        read = {
            Prefix.COLD: cold,
            Prefix.WINDOW: self._read_hit(stored, text, prompt_tokens, plan, window),
            Prefix.REPLAY: self._read_hit(stored, text, prompt_tokens, replay, None),
            Prefix.CUT: self._read_hit(stored, text, prompt_tokens, cut, None),
        }
        assert torch.equal(read[Prefix.WINDOW], cold), "a hit with window state gave other bits"
        return read

    def _read_hit(
        self,
        stored: SequenceState,
        text: NDArray[np.int64],
        prompt_tokens: int,
        plan: HitPlan,
        window: bytes | None,
    ) -> torch.Tensor:
        """Logits of the answer after a hit; None for a window that is cut off at its end."""
        with self._opened() as state:
            count = plan.stored_blocks
            memory = self._blocks.memory
            memory[state.block_ids[:count]] = memory[stored.block_ids[:count]]
            recent_ids = self._model.recent_ids_of(text[: plan.hit_tokens].tolist())
            state.start_at(plan.hit_tokens, recent_ids)
            if window is not None:
                restore_window(state, window)
            logits = self._answer(state, text, prompt_tokens, entries_first=count * BLOCK_TOKENS)
            assert self._are_equal(state, stored, count), "blocks of the hit were written"
        return logits

    def _answer(
        self,
        state: SequenceState,
        text: NDArray[np.int64],
        prompt_tokens: int,
        *,
        entries_first: int,
    ) -> torch.Tensor:
        """Run the rest of `text` but its last token; logits float32 [answer, V]."""
        end = len(text) - 1
        logits = []
        for begin in range(state.length, end, CHUNK_TOKENS):
            chunk = Chunk(
                state=state,
                token_ids=text[begin : min(begin + CHUNK_TOKENS, end)].tolist(),
                decoder_first=decoder_first(prompt_tokens, DECODER_TAIL_TOKENS),
                entries_first=entries_first,
            )
            logits += self._model.forward([chunk], wants_all_logits=True).logits
        return torch.cat(logits)[prompt_tokens - len(text) :]

    def _are_equal(self, one: SequenceState, other: SequenceState, blocks: int) -> bool:
        """Whether two sequences' first blocks hold the same bytes."""
        memory = self._blocks.memory
        return torch.equal(memory[one.block_ids[:blocks]], memory[other.block_ids[:blocks]])

    @contextmanager
    def _opened(self) -> Iterator[SequenceState]:
        """A new state with blocks, given back at the end."""
        state = self._states.allocate()
        state.block_ids = self._blocks.allocate(self._blocks_each)
        yield state
        self._blocks.release(state.block_ids)
        self._states.release(state)


def read_answer(
    logits_TV: torch.Tensor, cold_TV: torch.Tensor, ids_T: NDArray[np.int64]
) -> Reading:
    """Tokens int64 [T], each by the logits [T, V] in front of it, beside those of a cold prompt."""
    scores_TV = logits_TV.double().log_softmax(dim=1)
    cold_scores_TV = cold_TV.double().log_softmax(dim=1)
    nats = -scores_TV.gather(1, torch.from_numpy(ids_T[:, None])).sum()
    divergence = (cold_scores_TV.exp() * (cold_scores_TV - scores_TV)).sum()
    return Reading(float(nats) / math.log(2), float(divergence) / math.log(2))
