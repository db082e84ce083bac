"""Runs a model over a sequence such that equal tokens always give equal bits.

Matrix kernels sum in an order that depends on the number of rows, so a token's K and V depend on
how many tokens were run together with it. Two rules take the choice away:

1. Prefill runs in chunks that begin at block borders: one chunk, one block, at most 128 tokens.
2. A step that completes a block runs the whole block again as such a chunk.

So the bytes of every complete block are a function of the weights and the tokens alone, whether
they were part of a prompt or of an answer, computed here or fetched, and the logits after any
sequence do not show how it came about. docs/decisions/0007 has the numbers.
"""

import torch

from kvstore.layout import BLOCK_TOKENS

from .block_pool import BlockPool
from .models.llama import LlamaModel
from .paged_kv import GatherBuffer, PagedKV
from .token_sequence import TokenSequence


def plan_chunks(start: int, end: int) -> list[tuple[int, int]]:
    """Chunks (first, end) of the tokens start .. end - 1; `start` is a block border.

    All but the last are whole blocks.
    """
    assert start % BLOCK_TOKENS == 0, start
    return [(first, min(first + BLOCK_TOKENS, end)) for first in range(start, end, BLOCK_TOKENS)]


def plan_step(token_count: int) -> tuple[int, int]:
    """Tokens (first, end) to run for the last of `token_count`: it alone, or the block it fills."""
    assert token_count > 0
    is_block_complete = token_count % BLOCK_TOKENS == 0
    return token_count - (BLOCK_TOKENS if is_block_complete else 1), token_count


class Runner:
    """Prefill and decode of one sequence at a time. Not for use by two threads at once."""

    def __init__(self, model: LlamaModel, pool: BlockPool) -> None:
        self._model = model
        self._pool = pool
        blocks_max = -(-model.config.context_tokens // BLOCK_TOKENS)
        self._gather_buffer = GatherBuffer(model.geometry, blocks_max=blocks_max)

    @torch.inference_mode()
    def prefill(self, sequence: TokenSequence) -> torch.Tensor:
        """Compute all tokens that are not computed yet; logits after the last, float32 [V]."""
        kv = PagedKV(self._pool, sequence.block_ids, self._gather_buffer)
        for first, end in plan_chunks(sequence.computed_tokens, len(sequence.token_ids)):
            hidden_E = self._run(sequence, kv, first, end)
        return self._model.logits(hidden_E)

    @torch.inference_mode()
    def step(self, sequence: TokenSequence) -> torch.Tensor:
        """Compute the one token appended since the last call; logits after it, float32 [V]."""
        assert sequence.computed_tokens == len(sequence.token_ids) - 1
        kv = PagedKV(self._pool, sequence.block_ids, self._gather_buffer)
        first, end = plan_step(len(sequence.token_ids))
        return self._model.logits(self._run(sequence, kv, first, end))

    def _run(self, sequence: TokenSequence, kv: PagedKV, first: int, end: int) -> torch.Tensor:
        token_ids_T = torch.tensor(sequence.token_ids[first:end])
        hidden_E = self._model.forward(token_ids_T, kv, first)
        sequence.computed_tokens = end
        return hidden_E
