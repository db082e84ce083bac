"""From a client's message to a request of an engine."""

from __future__ import annotations

from ..request import Request
from ..sampling import Sampling
from .messages import Submit, unpack_tokens


def read_submission(message: Submit, request_id: str) -> Request:
    """The request of a message. Raises InvalidRequest, MalformedMessage."""
    return Request(
        request_id=request_id,
        prompt_ids=unpack_tokens(message.prompt_ids),
        max_tokens=message.max_tokens,
        sampling=Sampling(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            seed=message.seed,
        ),
        stop_ids=frozenset(message.stop_ids),
        ttl_class=message.ttl_class,
        answered_ids=unpack_tokens(message.answered_ids),
        replay_first=message.replay_first,
    )
