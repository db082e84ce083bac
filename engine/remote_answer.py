"""An answer of engine workers, as text. Only the tokenizer of the model is needed here."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from .answer_text import AnswerText
from .client import AnswerPart, AnswerReport, ClientDeadlines, EngineClient, EnginePlaces
from .model_identity import ModelIdentity
from .request import FinishReason
from .sampling import Sampling
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAnswer:
    """`token_ids` ends with the stop token if `finish_reason` is "stop"; `text` is without it."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    report: AnswerReport

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate after the first token; 0 if there was only one."""
        decoded = len(self.token_ids) - 1
        return decoded / self.report.decode_s if decoded else 0.0


def ask_engines(
    places: EnginePlaces,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    model: ModelIdentity,
    deadlines: ClientDeadlines,
    on_text: Callable[[str], None],
    on_stall: Callable[[str], None],
) -> RemoteAnswer:
    """Ask the workers, in an event loop that is made for it. `on_text` gets the text as it comes,
    `on_stall` what `EngineClient` says.

    Raises what `EngineClient.generate` raises.
    """
    client = EngineClient(places, model=model, deadlines=deadlines, on_stall=on_stall)
    parts = client.generate(
        prompt_ids, max_tokens=max_tokens, sampling=sampling, stop_ids=tokenizer.stop_ids
    )
    return asyncio.run(_collect(parts, prompt_ids, AnswerText(tokenizer, on_text)))


async def _collect(
    parts: AsyncGenerator[AnswerPart, None], prompt_ids: Sequence[int], answer: AnswerText
) -> RemoteAnswer:
    token_ids: list[int] = []
    async with aclosing(parts):
        async for part in parts:
            token_ids += part.token_ids
            answer.push(part.token_ids, is_last=part.finish_reason is not None)
            last = part
    assert last.finish_reason is not None
    assert last.report is not None
    return RemoteAnswer(
        prompt_ids=list(prompt_ids),
        token_ids=token_ids,
        text=answer.text,
        finish_reason=last.finish_reason,
        report=last.report,
    )
