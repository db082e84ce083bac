"""What is asked of an engine, and what it says as it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .request_report import RequestReport
from .sampling import GREEDY, Sampling

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "no_room"]
"""`stop`: a stop token; `length`: `max_tokens`, or the context's end; `aborted`: nobody wants more;
`no_room`: saves that hang kept it from the blocks that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt to answer.

    `request_id`: unique among those that an engine has at one time. `max_tokens`: longest answer,
    `answered_ids` included. `stop_ids`: an answer ends with the first of them.

    A request that was answered in part elsewhere goes on with `answered_ids`, which are not given
    out again; `replay_first` is then the position at which the first run began a bounded replay,
    None if it had none. An engine that can takes its prefix in the same way, so that the answer
    goes on with the same bits.

    `ends_after_prefill`: this engine computes the first token only. The sequence is then kept, out
    of its schedule, until it is detached, released or aborted.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    ttl_class: str = "chat"
    answered_ids: tuple[int, ...] = ()
    replay_first: int | None = None
    ends_after_prefill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """An answer grew: `token_ids` are its tokens number `position` (from 0) and on.

    `finish_reason` is None until the last event of a request, which may be without tokens. The
    last event has the `report`; so has the one that says `is_prefilled`: the request ends after
    prefill, its first token is this event's, and no other event comes unless it is aborted.
    `replay_first` is what another engine needs to go on with the same bits (`Request`).
    """

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    replay_first: int | None = None
    is_prefilled: bool = False
    report: RequestReport | None = None
