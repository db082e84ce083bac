"""Greedy continuation of a sequence, as two processes must do it alike."""

from __future__ import annotations

import torch

from engine.models.deepseek_v41.draft import Drafter
from engine.models.deepseek_v41.state import SequenceState
from kvstore.layout import BLOCK_TOKENS

from .model_bench import ModelBench

MODEL_ID = bytes(range(32))


def go_on(
    bench: ModelBench, state: SequenceState, rest: list[int], count: int
) -> tuple[list[int], torch.Tensor]:
    """Tokens chosen after `rest`, and all logits on the way, those of one draft at the end too."""
    needed = -(-(state.length + len(rest) + count) // BLOCK_TOKENS)
    state.block_ids += bench.blocks.allocate(max(needed - len(state.block_ids), 0))
    seen = [bench.run(state, rest)[-1]]
    tokens = [int(seen[-1].argmax())]
    while len(tokens) < count:
        seen.append(bench.run(state, tokens[-1:])[-1])
        tokens.append(int(seen[-1].argmax()))
    draft = Drafter(bench.model).draft(state, tokens[-1])
    return tokens, torch.cat((torch.stack(seen), draft.logits))
