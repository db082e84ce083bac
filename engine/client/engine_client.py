"""Asks workers until an answer is whole: one that prefills, then with its ticket one that decodes.

A worker that is lost, or drains, costs the request time and none of its tokens: it goes on with a
ticket, or is run again from the store with the tokens that were given out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest, RefusedRequest, count_of
from ..model_identity import ModelIdentity, read_identity
from ..request import FinishReason
from ..sampling import GREEDY, Sampling
from ..worker.address import WorkerAddress
from ..worker.messages import (
    TOKENS_MAX,
    Failed,
    Finished,
    HandedOver,
    Refused,
    Tokens,
    Waiting,
)
from .answer import AnswerProgress, WorkerAbsent, WorkerLost, WorkerSilent
from .conversation import ClientDeadlines, ask_status, converse
from .places import EnginePlaces
from .route import Route

FAULTS_MAX = 6
SUSPECT_S = 10.0
"""For so long other workers are asked before one that was lost."""
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 1.0
STALL_SAID_S = 3.0
"""After so long in vain, who waits for an answer is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReport:
    """What an answer cost. `engines`: the reports of the workers that had it, in this order;
    `tried`: what became of attempts that did not end it."""

    ttft_s: float
    decode_s: float
    moves: int
    tried: tuple[str, ...]
    engines: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """Tokens number `position` and on of an answer; the last part has reason and report."""

    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    report: AnswerReport | None = None


class EngineClient:
    """Asks workers. Belongs to one event loop; requests may run concurrently.

    `model`: the model that the token ids are of. Each worker is asked which one it serves, once as
    long as it is not lost; without it, none is. `on_stall` is told in words, once each time, that
    for a while nobody goes on with a request, which is tried further.
    """

    def __init__(
        self,
        places: EnginePlaces,
        *,
        model: ModelIdentity | None = None,
        deadlines: ClientDeadlines | None = None,
        faults_max: int = FAULTS_MAX,
        on_stall: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._places = places
        self._model = model
        self._of_this_model: set[WorkerAddress] = set()
        """Workers that said so, or do not say which they serve."""
        self._deadlines = deadlines or ClientDeadlines()
        self._faults_max = faults_max
        self._on_stall = on_stall
        self._clock = clock
        self._sleep = sleep
        self._in_flight: Counter[WorkerAddress] = Counter()
        self._lost_at_s: dict[WorkerAddress, float] = {}
        self._has_met = False
        """Some worker was there, for whatever request."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: frozenset[int] = frozenset(),
        ttl_class: str = "chat",
    ) -> AsyncGenerator[AnswerPart, None]:
        """The answer to a prompt as it comes. Close the iterator to end the request early.

        Raises InvalidRequest for what workers refuse, and for a worker of another model;
        EnginesUnavailable after too many faults, if nobody has it or no token comes for too long,
        and at once if this client never met any worker.
        """
        _check_sizes(prompt_ids, max_tokens)
        progress = AnswerProgress(
            prompt_ids=tuple(prompt_ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            ttl_class=ttl_class,
        )
        route = Route(places=self._places, faults_max=self._faults_max)
        watch = _Watch(self._clock)
        async with aclosing(self._follow(route, progress, watch)) as parts:
            async for part in parts:
                yield part

    async def _follow(
        self, route: Route, progress: AnswerProgress, watch: _Watch
    ) -> AsyncGenerator[AnswerPart, None]:
        """Ask one worker after the other until the answer is whole."""
        while progress.finish_reason is None:
            left_s = await self._pause(route, watch)
            place = route.next_worker(self._in_flight, self._suspects())
            self._in_flight[place] += 1
            try:
                async with aclosing(self._ask(route, progress, place, watch, left_s)) as parts:
                    async for part in parts:
                        watch.note_token()
                        yield part
            finally:
                self._in_flight[place] -= 1
            watch.note_attempt(route.setbacks)
        yield AnswerPart(
            position=len(progress.token_ids),
            token_ids=(),
            finish_reason=progress.finish_reason,
            report=watch.report(route),
        )

    async def _ask(
        self,
        route: Route,
        progress: AnswerProgress,
        place: WorkerAddress,
        watch: _Watch,
        first_answer_s: float,
    ) -> AsyncGenerator[AnswerPart, None]:
        """New tokens from one worker, which is to say something within `first_answer_s`; what ended
        the attempt is noted."""
        message = route.next_message(progress)
        known = len(progress.token_ids)
        was_begun = False
        try:
            await self._check_model(place)
            conversation = converse(place, message, self._deadlines, first_answer_s=first_answer_s)
            async with aclosing(conversation) as answers:
                async for answer in answers:
                    self._has_met = True
                    # Of one that only waits, a ticket may still be good.
                    was_begun |= not isinstance(answer, Waiting)
                    position = len(progress.token_ids)
                    match answer:
                        case Waiting():
                            self._note_waiting(route, place, answer, watch)
                        case Tokens():
                            new = progress.accept(answer)
                            route.note_progress(len(progress.token_ids) - known)
                            yield AnswerPart(position=position, token_ids=new)
                        case Finished():
                            progress.finish(answer)
                            route.reports.append(answer.report)
                        case HandedOver():
                            route.note_hand_over(place, answer, has_grown=position > known)
                        case Refused(cause="invalid"):
                            raise RefusedRequest(answer.reason)
                        case Refused():
                            route.note_refusal(place, answer)
                        case Failed():
                            route.note_fault(place, answer, was_begun=True)
                        case _:
                            raise WorkerLost(f"it said {type(answer).__name__}")
        except WorkerLost as error:
            self._has_met |= not isinstance(error, WorkerAbsent)
            self._lost_at_s[place] = self._clock()
            self._of_this_model.discard(place)
            route.note_fault(place, error, was_begun=was_begun)

    async def _check_model(self, place: WorkerAddress) -> None:
        """Raises InvalidRequest for a worker of another model: what token ids mean is nothing that
        it could see; WorkerLost."""
        if self._model is None or place in self._of_this_model:
            return
        try:
            status = await ask_status(place, self._deadlines)
        except WorkerSilent as error:
            # It is there, and has nothing of the request.
            self._has_met = True
            raise WorkerAbsent(str(error)) from error
        served = read_identity(status.get("model"))
        if served is not None and served != self._model:
            raise InvalidRequest(
                "model",
                given=self._model.describe(),
                expected=f"{served.describe()}, which the engine at {place} serves",
            )
        self._of_this_model.add(place)

    def _suspects(self) -> set[WorkerAddress]:
        """Workers that were lost to some request a short time ago."""
        since_s = self._clock() - SUSPECT_S
        return {place for place, lost_at_s in self._lost_at_s.items() if lost_at_s > since_s}

    def _note_waiting(
        self, route: Route, place: WorkerAddress, waiting: Waiting, watch: _Watch
    ) -> None:
        """A worker has the request, and no token of it. Raises EnginesUnavailable after long."""
        watch.note_waiting()
        waiting_s = self._deadlines.waiting_s
        if watch.tokenless_for_s() >= waiting_s:
            route.trials.note(place, _describe_waiting(waiting))
            raise route.give_up(f"has given a token for {waiting_s:g} s")

    async def _pause(self, route: Route, watch: _Watch) -> float:
        """Wait a moment if everybody was asked in vain. How long the next worker may take to say
        something. Raises EnginesUnavailable after long."""
        if not route.vain_rounds:
            return math.inf
        if not self._has_met:
            raise route.give_up("is there")
        patience_s = self._deadlines.patience_s
        left_s = patience_s - watch.stalled_for_s()
        if left_s <= 0:
            raise route.give_up(f"goes on with it for {patience_s:g} s")
        if self._on_stall is not None and watch.is_stall_news():
            self._on_stall(str(route.give_up(f"goes on with it, trying for {patience_s:g} s")))
        pause_s = min(PAUSE_FIRST_S * 2.0 ** min(route.vain_rounds - 1, 16), PAUSE_MAX_S)
        await self._sleep(min(pause_s, left_s))
        # At least the time that it takes to say no.
        return max(left_s - pause_s, self._deadlines.connect_s)


class _Watch:
    """When the tokens of one answer came, and since when none do; of the client's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_s = self._grown_s = clock()
        self._first_s: float | None = None
        self._stalled_since_s: float | None = None
        """The first attempt in vain since the answer last grew, or waited at a worker."""
        self._said_stall_s: float | None = None
        """That of the stall that was told last."""

    def note_token(self) -> None:
        self._stalled_since_s = None
        self._grown_s = self._clock()
        if self._first_s is None:
            self._first_s = self._grown_s

    def note_waiting(self) -> None:
        """A worker has the request, and will go on with it."""
        self._stalled_since_s = None

    def note_attempt(self, setbacks: int) -> None:
        """An attempt has ended. `setbacks`: how many in a row were in vain."""
        if setbacks and self._stalled_since_s is None:
            self._stalled_since_s = self._clock()

    def stalled_for_s(self) -> float:
        return 0.0 if self._stalled_since_s is None else self._clock() - self._stalled_since_s

    def is_stall_news(self) -> bool:
        """Whether it stalls for long, and this is the first time in this stall that it is asked."""
        if self._said_stall_s == self._stalled_since_s or self.stalled_for_s() < STALL_SAID_S:
            return False
        self._said_stall_s = self._stalled_since_s
        return True

    def tokenless_for_s(self) -> float:
        return self._clock() - self._grown_s

    def report(self, route: Route) -> AnswerReport:
        now_s = self._clock()
        first_s = now_s if self._first_s is None else self._first_s
        return AnswerReport(
            ttft_s=first_s - self._start_s,
            decode_s=now_s - first_s,
            moves=route.moves,
            tried=route.trials.describe(),
            engines=tuple(route.reports),
        )


def _describe_waiting(waiting: Waiting) -> str:
    """Why a worker gives no token, in words."""
    if waiting.state == "begun":
        return "it works on it"
    before = f"it waits there behind {count_of(waiting.ahead, 'request')}"
    return before if waiting.state == "queued" else f"{before}, having given way to others"


def _check_sizes(prompt_ids: Sequence[int], max_tokens: int) -> None:
    """What no message can carry. Raises InvalidRequest; the rest is the worker's to judge."""
    if not 0 < len(prompt_ids) <= TOKENS_MAX:
        raise InvalidRequest("prompt tokens", given=len(prompt_ids), expected=f"1 to {TOKENS_MAX}")
    if not 0 < max_tokens <= TOKENS_MAX:
        raise InvalidRequest("max_tokens", given=max_tokens, expected=f"1 to {TOKENS_MAX}")
    strange = [token for token in prompt_ids if not 0 <= token < 2**31]
    if strange:
        raise InvalidRequest("token id", given=strange[0], expected="0 to 2147483647")
