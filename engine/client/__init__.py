"""The client of engine workers: one stream of tokens, whatever becomes of the workers behind it.

    client = EngineClient(find_places("D/engines"))
    async for part in client.generate(prompt_ids, max_tokens=100):
        print(part.token_ids, part.finish_reason)

Not for text: tokens in, tokens out. Nothing of the tensor library is loaded.
"""

from .conversation import ClientDeadlines
from .engine_client import AnswerPart, AnswerReport, EngineClient
from .places import EnginePlaces, find_places

__all__ = [
    "AnswerPart",
    "AnswerReport",
    "ClientDeadlines",
    "EngineClient",
    "EnginePlaces",
    "find_places",
]
