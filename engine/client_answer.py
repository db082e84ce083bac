"""What a client knows of one answer, and what it asks next. Pure: no sockets, no clock.

Submit -> first token -> HandedOver(ticket) -> Resume -> tokens ... -> Finished
   ^                         | without a ticket             | lost, refused, failed
   +-------------------------+------------------------------+   with the tokens given so far
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .client_places import EnginePlaces, choose_worker
from .errors import EnginesUnavailable
from .request import FinishReason
from .sampling import Sampling
from .worker.address import WorkerAddress
from .worker.messages import (
    Failed,
    HandedOver,
    Refused,
    Resume,
    Submit,
    Tokens,
    pack_tokens,
)


class WorkerLost(Exception):
    """A worker is gone, silent, or says what cannot be; the request goes on elsewhere."""


@dataclass(slots=True, kw_only=True)
class AnswerProgress:
    """The answer so far. A position is given out once, and none is skipped."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    ttl_class: str
    token_ids: list[int] = field(default_factory=list)
    replay_first: int | None = None

    def accept(self, tokens: Tokens) -> tuple[int, ...]:
        """The tokens of a message that were not known before.

        Raises WorkerLost for a worker that leaves tokens out, says others than were given out
        before, or more than were asked for.
        """
        known = self.token_ids[tokens.position : tokens.position + len(tokens.token_ids)]
        new = tokens.token_ids[len(known) :]
        if tokens.position > len(self.token_ids):
            raise WorkerLost(
                f"it gave token {tokens.position} of the answer, expected {len(self.token_ids)}"
            )
        if known != list(tokens.token_ids[: len(known)]):
            raise WorkerLost(f"its tokens from {tokens.position} on differ from those before")
        if new and (self.finish_reason or len(self.token_ids) + len(new) > self.max_tokens):
            raise WorkerLost("it gave tokens behind the end of the answer")
        if not self.token_ids:
            self.replay_first = tokens.replay_first
        self.token_ids += new
        return new

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is whole, as far as that can be seen from its tokens."""
        if self.token_ids and self.token_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.max_tokens else None

    def submission(self) -> Submit:
        """The request as it is now."""
        return Submit(
            prompt_ids=pack_tokens(self.prompt_ids),
            max_tokens=self.max_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed,
            stop_ids=tuple(sorted(self.stop_ids)),
            ttl_class=self.ttl_class,
            answered_ids=pack_tokens(self.token_ids),
            replay_first=self.replay_first,
        )


@dataclass(slots=True, kw_only=True)
class Route:
    """Where a request goes, and where it has been. `failures_max`: faults after which it is given
    up; a worker that is busy or draining, and a hand-over, are none."""

    places: EnginePlaces
    failures_max: int
    moves: int = 0
    """Times that a sequence went from one worker to another with its cache."""
    tried: list[str] = field(default_factory=list)
    """What became of each attempt that did not end the answer."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """Of workers that ended their part of the answer."""
    ticket: bytes | None = None
    is_without_prefill: bool = False
    """It could not be handed over: a worker that decodes takes it from the store."""
    failures: Counter[WorkerAddress] = field(default_factory=Counter)
    refusals: Counter[WorkerAddress] = field(default_factory=Counter)
    """Of workers that do not take it now: since the answer last grew or was handed over."""
    refused_rounds: int = 0
    """Refusals in a row."""

    def next_worker(
        self, in_flight: Mapping[WorkerAddress, int], suspects: Collection[WorkerAddress] = ()
    ) -> WorkerAddress:
        """Whom to ask now. `suspects`: lost of late, perhaps to other requests.

        Raises EnginesUnavailable after too many faults.
        """
        if self.failures.total() >= self.failures_max:
            raise EnginesUnavailable(self.tried)
        return choose_worker(
            self._candidates(),
            in_flight=in_flight,
            failures=self.failures,
            refusals=self.refusals,
            suspects=suspects,
        )

    def next_message(self, progress: AnswerProgress) -> Submit | Resume:
        """What to ask of it."""
        if self.ticket is not None:
            return Resume(ticket=self.ticket)
        return progress.submission()

    def note_hand_over(self, place: WorkerAddress, message: HandedOver) -> None:
        """The worker has taken its hands off the request."""
        self.note_progress()
        # Who sends a sequence away will not take it back.
        self.refusals[place] += 1
        self.reports.append(message.report)
        self.ticket = message.ticket
        self.is_without_prefill = message.ticket is None
        if message.ticket is None:
            self.tried.append(f"{place}: no room to hand over")
        else:
            self.moves += 1

    def note_progress(self) -> None:
        """The request is taken care of."""
        self.refusals.clear()
        self.refused_rounds = 0

    def note_refusal(self, place: WorkerAddress, message: Refused) -> None:
        """The worker does not take it now, or not with this ticket."""
        self.tried.append(f"{place}: {message.reason}")
        if message.cause == "ticket":
            self.ticket = None
            self.is_without_prefill = False
            # A ticket is good once: it cannot be refused again and again, but a worker that only
            # refuses must be noticed.
            self.failures[place] += 1
        else:
            self.refusals[place] += 1
            self.refused_rounds += 1

    def note_fault(
        self, place: WorkerAddress, message: Failed | WorkerLost, *, was_begun: bool
    ) -> None:
        """The worker is lost, or lost the request. Unless it had begun, a ticket may still be good:
        if it is not, the next worker says so."""
        detail = message.reason if isinstance(message, Failed) else str(message)
        self.tried.append(f"{place}: {detail}")
        self.failures[place] += 1
        if was_begun:
            self.ticket = None
            self.is_without_prefill = False

    def _candidates(self) -> tuple[WorkerAddress, ...]:
        if self.ticket is not None or self.is_without_prefill:
            return self.places.for_sequences
        prompts = self.places.for_prompts
        if all(self.failures[place] for place in prompts):
            # A worker that decodes can prefill too, only not as well.
            return prompts + self.places.decode
        return prompts
