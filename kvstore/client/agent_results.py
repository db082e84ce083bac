"""What an `AgentClient` returns beside the results that it shares with `StoreClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..agent_messages import PromptMatched
from ..layout import BLOCK_TOKENS
from ..policy import WINDOW_TOKENS, HitPlan

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMatch:
    """What of a prompt can be had: `kvstore.policy.HitPlan`, where its window state is, and where
    the time went. Positions and lengths are in tokens."""

    matched_blocks: int
    """Leading blocks that are stored; more than the plan uses."""
    hit_tokens: int
    replay_tokens: int
    window_anchor: int | None
    window_host: str
    """Address of the agent that has the window state; empty if it is this host's, or none is
    used."""
    keys: list[bytes] = field(repr=False)
    """Of all full blocks of the prompt: what `fetch` and `save` want."""
    hash_s: float
    match_s: float
    """What the agent took to ask the storage nodes."""
    lookup_s: float
    """What it took to find the window state."""

    @property
    def plan(self) -> HitPlan:
        return HitPlan(
            hit_tokens=self.hit_tokens,
            replay_tokens=self.replay_tokens,
            window_anchor=self.window_anchor,
        )


def find_match_problem(found: PromptMatched, *, blocks: int) -> str:
    """What of an agent's answer about a prompt of so many full blocks cannot be; empty if all of
    it can."""
    hit_tokens, replay_tokens = found.hit_tokens, found.replay_tokens
    used_tokens = hit_tokens + replay_tokens
    if found.matched_blocks > blocks:
        return f"{found.matched_blocks} blocks of {blocks} are there"
    if hit_tokens % BLOCK_TOKENS or replay_tokens not in (0, WINDOW_TOKENS):
        return f"a hit of {hit_tokens} tokens and {replay_tokens} to replay"
    if used_tokens > found.matched_blocks * BLOCK_TOKENS:
        return f"{used_tokens} tokens of {found.matched_blocks} blocks"
    if found.window_anchor not in (None, hit_tokens) or found.window_anchor == 0:
        return f"window state at {found.window_anchor} for a hit of {hit_tokens} tokens"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOffer:
    """A run that was offered, as another engine must know it to take it. Whoever knows the ticket
    can."""

    ticket: bytes
    """16 random bytes."""
    host: str
    """"ip:port" at which the agents of other hosts reach the one that has the run."""
    namespace_id: bytes
    layout: bytes
    """Fingerprint of the layout of the run's blocks, 32 bytes."""
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFetch:
    """`is_found`: the window record lies, verified, where it was wanted."""

    is_found: bool
    host: str
    """Address of the agent that had it; empty if it was this host's."""
    elapsed_s: float


class RunOperation(Generic[ResultT]):
    """A fetch into a run, or a save out of one, that goes on while its caller does other things.

    It runs already. `await` it in an event loop, or `join` it in a thread, for its result; as often
    as wanted. Either raises AgentError if the agent refused, or has gone.
    """

    def __init__(self, future: Future[ResultT], what: str) -> None:
        """`what`: a name for people."""
        self._future = future
        self._what = what

    def __repr__(self) -> str:
        if not self._future.done():
            state = "running"
        elif (error := self._future.exception()) is not None:
            state = f"failed: {error}"
        else:
            state = repr(self._future.result())
        return f"<RunOperation {self._what}: {state}>"

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have something called once, when `join` need not wait any more; at once if that is so. It
        is called in the client's event loop, or here, so it must be short and never wait."""
        self._future.add_done_callback(lambda _: call())

    def join(self) -> ResultT:
        """Wait in this thread. It ends with the operation's deadline, or, if a worker or the agent
        stands still, four seconds later. Not for the thread of the client's event loop."""
        return self._future.result()

    def __await__(self) -> Generator[Any, None, ResultT]:
        # Shielded: who gives up waiting does not give up the operation.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()
