"""A model with pools of its own, and sequences run through it in any cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.build_weights import build_weights
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.model import DeepseekV41
from engine.models.deepseek_v41.observing import Observer, ignore
from engine.models.deepseek_v41.random_weights import random_tensors
from engine.models.deepseek_v41.rows import Chunk, ImageRows
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import SequenceState, StatePool
from engine.models.deepseek_v41.weights import ModelWeights
from kernels.operations import REFERENCE, Operations
from kvstore.layout import BLOCK_TOKENS

from .borders import move_weights


@dataclass(eq=False)
class ModelBench:
    """A model, a block pool whose memory begins as zeros, and state slots."""

    model: DeepseekV41
    blocks: BlockPool
    states: StatePool

    @staticmethod
    def build(
        config: DeepseekV41Config,
        weights: ModelWeights,
        compressed_ids_V: torch.Tensor,
        *,
        blocks: int = 16,
        slots: int = 6,
        operations: Operations = REFERENCE,
    ) -> ModelBench:
        device = weights.embedding.device
        pool = BlockPool(
            block_bytes=block_layout(config).block_bytes, capacity_blocks=blocks, device=device
        )
        pool.memory.zero_()
        model = DeepseekV41(
            config,
            weights,
            compressed_ids_V=compressed_ids_V,
            pool=pool,
            operations=operations,
        )
        return ModelBench(model, pool, StatePool(config, slots=slots, device=device))

    def begin(self, tokens: int) -> SequenceState:
        """A fresh sequence with room for so many tokens."""
        blocks = self.blocks.allocate(-(-tokens // BLOCK_TOKENS))
        state = self.states.allocate()
        state.block_ids = blocks
        return state

    def end(self, state: SequenceState) -> None:
        self.blocks.release(state.block_ids)
        self.states.release(state)

    def run(
        self,
        state: SequenceState,
        token_ids: Sequence[int],
        cuts: Sequence[int] = (),
        *,
        decoder_first: int = 0,
        entries_first: int = 0,
        is_image: torch.Tensor | None = None,
        observe: Observer = ignore,
    ) -> torch.Tensor:
        """Logits [n, V] of all tokens that ran whole; `cuts` are lengths of the pieces, in order.

        What the cuts leave over is the last piece.
        """
        logits = []
        at = 0
        for count in [*cuts, len(token_ids)]:
            piece = list(token_ids[at : at + count])
            if not piece:
                continue
            image = None
            if is_image is not None:
                image = ImageRows(is_image_T=is_image[at : at + count])
            chunk = Chunk(
                state=state,
                token_ids=piece,
                decoder_first=decoder_first,
                entries_first=entries_first,
                image=image,
            )
            result = self.model.forward([chunk], wants_all_logits=True, observe=observe)
            logits.append(result.logits[0])
            at += len(piece)
        return torch.cat(logits)

    def cache_bytes(self, state: SequenceState) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the sequence's blocks and of its state slot, whole, with unused places."""
        return self.blocks.memory[state.block_ids].clone(), state.memory.clone()


def nano_bench(
    seed: int = 5,
    *,
    candidate_blocks: int | None = None,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    operations: Operations = REFERENCE,
) -> ModelBench:
    """The shipped nano model with random weights, which are the same on every device.

    `candidate_blocks`: another size of the pool. `noise_seed`: weights moved by 1e-7 of each.
    """
    config = shipped_config("v41-nano")
    if candidate_blocks is not None:
        config = replace(config, candidate_blocks=candidate_blocks)
    tensors = random_tensors(config, torch.Generator().manual_seed(seed))
    if noise_seed is not None:
        tensors = move_weights(tensors, noise_seed)
    assert config.engram is not None
    ids = torch.arange(config.vocabulary) % config.engram.compressed_vocabulary
    weights = build_weights(config, tensors, dtype, device=device)
    return ModelBench.build(config, weights, ids, operations=operations)
