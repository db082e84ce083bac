"""Drafts at places of a document, and what the model itself says of their guesses.

Each place is judged as a decoder with greedy choice would live it: one draft, one pass of the model
over its guesses, and the state as it was before. What a served model gains in time is not said.
"""

import torch

from engine.models.deepseek_v41.draft import Drafter
from engine.models.deepseek_v41.model import DeepseekV41
from engine.models.deepseek_v41.rows import Chunk
from engine.models.deepseek_v41.state import SequenceState

from .draft_scores import JudgedDraft


class DraftJudge:
    """Drafts with a model, which has draft stages, and asks the model about the guesses."""

    def __init__(self, model: DeepseekV41) -> None:
        self._model = model
        self._drafter = Drafter(model)

    def judge(self, state: SequenceState, token_id: int) -> JudgedDraft:
        """Draft after `token_id`, which comes right after the state's tokens.

        The state ends as it was; its blocks must have room for `token_id` and the guesses.
        """
        draft = self._drafter.draft(state, token_id)
        length = state.length
        chunk = Chunk(state=state, token_ids=[token_id, *draft.token_ids[:-1].tolist()])
        (logits_BV,) = self._model.forward([chunk], wants_all_logits=True).logits
        state.rewind(length)
        is_own_choice_B = logits_BV.argmax(dim=1) == draft.token_ids
        distributions = (logits.softmax(dim=1) for logits in (logits_BV, draft.logits))
        return JudgedDraft(
            accepted=int(is_own_choice_B.long().cumprod(dim=0).sum()),
            confidence=draft.confidence.sigmoid().tolist(),
            overlap=torch.minimum(*distributions).sum(dim=1).tolist(),
        )


def choose_places(tokens: int, count: int) -> list[int]:
    """At most `count` numbers 1 .. tokens - 1, evenly spread: tokens that stand before a draft."""
    spread = {number * tokens // (count + 1) for number in range(1, count + 1)}
    return sorted(spread - {0})
