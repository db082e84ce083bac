"""What a DeepSeek-V4.1 model needs for documents, in bits: its prefill, run as the engine runs it.

With the cache's quantisers on and window by window, so the number is that of the model as served,
not that of the training code.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.checkpoint.folder import load_weights
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.engram_vocabulary import read_compressed_ids
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.model import DeepseekV41
from engine.models.deepseek_v41.rows import Chunk
from engine.models.deepseek_v41.state import StatePool
from engine.models.deepseek_v41.weights import ModelWeights
from kvstore.layout import BLOCK_TOKENS

CHUNK_TOKENS = 512
"""Tokens of one forward pass; the bits do not depend on it."""


class DocumentScorer:
    """A model with room for one document of at most `tokens_max` tokens at a time."""

    def __init__(
        self,
        config: DeepseekV41Config,
        weights: ModelWeights,
        compressed_ids_V: torch.Tensor,
        *,
        tokens_max: int,
    ) -> None:
        self._tokens_max = min(tokens_max, config.positions_max)
        self._blocks = BlockPool(
            block_bytes=block_layout(config).block_bytes,
            capacity_blocks=-(-self._tokens_max // BLOCK_TOKENS),
        )
        self._states = StatePool(config, slots=1)
        self._model = DeepseekV41(
            config, weights, compressed_ids_V=compressed_ids_V, pool=self._blocks
        )

    def bits(self, ids: NDArray[np.int64]) -> float:
        """Bits of ids[1:], each given all before it; int64 [1 + T].

        Raises ValueError if the document is longer than the model's positions or than the room.
        """
        if len(ids) - 1 > self._tokens_max:
            raise ValueError(
                f"document: given {len(ids) - 1} tokens, expected at most {self._tokens_max}"
            )
        state = self._states.allocate()
        state.block_ids = self._blocks.allocate(-(-(len(ids) - 1) // BLOCK_TOKENS))
        nats = 0.0
        for begin in range(0, len(ids) - 1, CHUNK_TOKENS):
            given = ids[begin : min(begin + CHUNK_TOKENS, len(ids) - 1)]
            chunk = Chunk(state=state, token_ids=given.tolist())
            (logits_TV,) = self._model.forward([chunk], wants_all_logits=True).logits
            wanted = torch.from_numpy(ids[begin + 1 : begin + 1 + len(given)])
            scores_TV = logits_TV.double().log_softmax(dim=1)
            nats -= float(scores_TV.gather(1, wanted[:, None]).sum())
        self._blocks.release(state.block_ids)
        self._states.release(state)
        return nats / math.log(2)


def model_bits(
    folder: Path, documents: Sequence[NDArray[np.int64]], progress: Callable[[str], None]
) -> list[float]:
    """Bits that the model of a folder needs for each document of ids, int64 [1 + T], after its BOS.

    Raises what opening a model's folder raises, and ValueError for a document that is too long.
    """
    config, weights = load_weights(folder)
    scorer = DocumentScorer(
        config,
        weights,
        read_compressed_ids(folder, config),
        tokens_max=max(len(ids) for ids in documents) - 1,
    )
    bits = []
    for number, ids in enumerate(documents, 1):
        bits.append(scorer.bits(ids))
        progress(f"{folder.name}: {number} of {len(documents)} files")
    return bits
