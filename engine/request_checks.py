"""Whether an engine could ever answer a request; a mistake of the caller is told before anything is
done.

What takes longer the longer a prompt is can be done for an engine's thread by another one.
"""

import re
from collections.abc import Container
from dataclasses import dataclass

from kvstore.key import KeyChain
from kvstore.layout import BLOCK_TOKENS

from .errors import InvalidRequest
from .model_runner import ModelRunner
from .request import Request
from .scheduler.blocks import blocks_of
from .scheduler.prefix_choice import is_replay_possible

TTL_CLASS = re.compile(r"[a-z0-9_-]{1,16}")
"""The store's rule: a block of another class would not be saved."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that was checked, and the keys of its full blocks. An engine looks at each of its
    tokens no more."""

    request: Request
    chain: KeyChain


def prepare_request(request: Request, runner: ModelRunner) -> PreparedRequest:
    """What an engine of this model takes in a short time. May be called in any thread; raises
    InvalidRequest, which names what is wrong."""
    check_request(request, runner)
    chain = KeyChain(runner.namespace)
    chain.append([*request.prompt_ids, *request.answered_ids])
    return PreparedRequest(request, chain)


def tokens_max_of(request: Request, context_tokens: int) -> int:
    """Tokens of prompt and answer at most: the context ends an answer too."""
    return min(len(request.prompt_ids) + request.max_tokens, context_tokens)


def is_whole(request: Request, context_tokens: int) -> bool:
    """Whether the context has ended the answer already, elsewhere, unknown to whoever asks."""
    return len(request.prompt_ids) + len(request.answered_ids) == context_tokens


def check_id(request: Request, taken_ids: Container[str]) -> None:
    """Raises InvalidRequest for an id that another request has."""
    if request.request_id in taken_ids:
        raise InvalidRequest("request id", given=request.request_id, expected="one not in use")


def check_request(request: Request, runner: ModelRunner) -> None:
    """Everything but the id. Raises InvalidRequest, which names what is wrong."""
    if not TTL_CLASS.fullmatch(request.ttl_class):
        given, expected = repr(request.ttl_class), "1 to 16 of a-z, 0-9, '_' and '-'"
        raise InvalidRequest("ttl_class", given=given, expected=expected)
    _check_lengths(request, runner)
    ids = (*request.prompt_ids, *request.answered_ids)
    if min(ids) < 0 or max(ids) >= runner.vocabulary:
        strange = next(number for number in ids if not 0 <= number < runner.vocabulary)
        raise InvalidRequest("token id", given=strange, expected=f"0 to {runner.vocabulary - 1}")
    if not request.stop_ids.isdisjoint(request.answered_ids):
        raise InvalidRequest(
            "answered_ids", given="an answer with a stop token", expected="one that goes on"
        )
    _check_replay(request, runner)


def _check_lengths(request: Request, runner: ModelRunner) -> None:
    prompt_tokens, answered = len(request.prompt_ids), len(request.answered_ids)
    if not 0 < prompt_tokens < runner.context_tokens:
        raise InvalidRequest(
            "prompt tokens",
            given=prompt_tokens,
            expected=f"1 to {runner.context_tokens - 1} (the model's context less one)",
        )
    if request.max_tokens <= answered:
        raise InvalidRequest(
            "max_tokens", given=request.max_tokens, expected=f"{answered + 1} or more"
        )
    if prompt_tokens + answered > runner.context_tokens:
        raise InvalidRequest(
            "prompt and answered tokens",
            given=prompt_tokens + answered,
            expected=f"at most {runner.context_tokens} (the model's context)",
        )
    tokens, blocks = tokens_max_of(request, runner.context_tokens), runner.pool.capacity_blocks
    if blocks_of(tokens) > blocks:
        raise InvalidRequest(
            "prompt tokens and max_tokens",
            given=f"{tokens} together",
            expected=f"at most {blocks * BLOCK_TOKENS} (the pool of the engine has {blocks} blocks"
            f" of {BLOCK_TOKENS})",
        )


def _check_replay(request: Request, runner: ModelRunner) -> None:
    first = request.replay_first
    if first is None:
        return
    if runner.window_layout is None:
        raise InvalidRequest("replay_first", given=first, expected="None for a dense model")
    if not is_replay_possible(len(request.prompt_ids), first):
        raise InvalidRequest(
            "replay_first",
            given=first,
            expected="a multiple of 128 where a hit of this prompt can end",
        )
