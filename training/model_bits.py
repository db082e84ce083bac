"""What a DeepSeek-V4.1 model needs for documents, in bits: its prefill, run as the engine runs it.

With the cache's quantisers on and chunk by chunk, so the number is that of the model as served,
not that of the training code. On the way its drafts are judged, at some places of each document.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.block_pool import BlockPool
from engine.models.deepseek_v41.layout import block_layout
from engine.models.deepseek_v41.load import LoadedModel, load_model
from engine.models.deepseek_v41.rows import Chunk
from engine.models.deepseek_v41.state import SequenceState, StatePool
from kvstore.layout import BLOCK_TOKENS

from .command import InvalidInput
from .draft_judge import DraftJudge, choose_places
from .draft_scores import JudgedDraft

CHUNK_TOKENS = 512
"""Tokens of one forward pass, at most; the bits do not depend on it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`bits` of a document, and the drafts that were judged in it."""

    bits: float
    drafts: list[JudgedDraft]


class DocumentScorer:
    """A model with room for one document of at most `tokens_max` tokens at a time."""

    def __init__(self, loaded: LoadedModel, *, tokens_max: int) -> None:
        config = loaded.config
        self._tokens_max = min(tokens_max, config.positions_max)
        self._positions_max = config.positions_max
        self._draft_tokens = config.draft.block_tokens
        room = min(self._tokens_max + self._draft_tokens, self._positions_max)
        self._blocks = BlockPool(
            block_bytes=block_layout(config).block_bytes,
            capacity_blocks=-(-room // BLOCK_TOKENS),
        )
        self._states = StatePool(config, slots=1)
        self._model = loaded.build(self._blocks)
        self._judge = None if loaded.weights.draft is None else DraftJudge(self._model)

    def read(self, ids: NDArray[np.int64], *, drafts: int = 0) -> Reading:
        """Bits of ids[1:], each given all before it; int64 [1 + T]. `drafts`: judged ones, at most.

        Raises InvalidInput if the document is longer than the model's positions or than the room.
        """
        tokens = len(ids) - 1
        if tokens > self._tokens_max:
            raise InvalidInput(
                "document", given=f"{tokens} tokens", expected=f"at most {self._tokens_max}"
            )
        state = self._states.allocate()
        state.block_ids = self._blocks.allocate(self._blocks.free_blocks)
        places = self._places(tokens, drafts)
        bits, judged = 0.0, []
        for begin, end in pairwise(sorted({*range(0, tokens, CHUNK_TOKENS), *places, tokens})):
            bits += self._chunk_bits(state, ids[begin : end + 1])
            if end in places and self._judge is not None:
                judged.append(self._judge.judge(state, int(ids[end])))
        self._blocks.release(state.block_ids)
        self._states.release(state)
        return Reading(bits, judged)

    def _places(self, tokens: int, drafts: int) -> list[int]:
        """Numbers of tokens after which a draft is judged: its guesses have positions too."""
        if self._judge is None:
            return []
        last = self._positions_max - self._draft_tokens
        return [place for place in choose_places(tokens, drafts) if place <= last]

    def _chunk_bits(self, state: SequenceState, ids: NDArray[np.int64]) -> float:
        """Bits of ids[1:] when ids[:-1] come after the state's tokens."""
        chunk = Chunk(state=state, token_ids=ids[:-1].tolist())
        (logits_TV,) = self._model.forward([chunk], wants_all_logits=True).logits
        scores_TV = logits_TV.double().log_softmax(dim=1)
        nats = -scores_TV.gather(1, torch.from_numpy(ids[1:, None])).sum()
        return float(nats) / math.log(2)


def read_documents(
    folder: Path,
    documents: Sequence[NDArray[np.int64]],
    progress: Callable[[str], None],
    *,
    drafts: int,
) -> list[Reading]:
    """Read documents of ids, int64 [1 + T] from BOS on, with the model of a folder.

    Raises what opening a model's folder raises, and InvalidInput for a document that is too long.
    """
    loaded = load_model(folder)
    tokens_max = max(len(ids) for ids in documents) - 1
    if tokens_max > loaded.config.positions_max:
        raise InvalidInput(
            "documents",
            given=f"one of {tokens_max} tokens",
            expected=f"at most {loaded.config.positions_max}, the model's positions",
        )
    scorer = DocumentScorer(loaded, tokens_max=tokens_max)
    readings = []
    for number, ids in enumerate(documents, 1):
        readings.append(scorer.read(ids, drafts=drafts))
        progress(f"{folder.name}: {number} of {len(documents)} files")
    return readings
