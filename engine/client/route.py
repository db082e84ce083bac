"""Whom a client asks next for an answer, and what. Pure: no sockets, no clock.

Submit -> first token -> HandedOver(ticket) -> Resume -> tokens ... -> Finished
   ^                         | without a ticket             | lost, refused, failed
   +-------------------------+------------------------------+   with the tokens given so far
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import EnginesUnavailable, count_of
from ..worker.address import WorkerAddress
from ..worker.messages import Failed, HandedOver, Refused, Resume, Submit
from .answer import AnswerProgress, WorkerAbsent, WorkerLost
from .places import EnginePlaces
from .trials import Trials

GROWTH_MIN_TOKENS = 2
"""What a worker gives that goes on with an answer. A prefill worker gives one, and if the rest is
lost each time, that is no progress: the prompt would be computed anew for every token."""


@dataclass(slots=True, kw_only=True)
class Route:
    """Where a request goes, and where it has been. `faults_max`: after so many faults in a row of
    workers that were there it is given up: it may be what ends them. A worker that is absent, busy
    or draining is no such fault, nor is a hand-over, unless it brought no token.
    """

    places: EnginePlaces
    faults_max: int
    moves: int = 0
    """Times that a sequence went from one worker to another with its cache."""
    trials: Trials = field(default_factory=Trials)
    """What became of attempts that did not end the answer."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """Of workers that ended their part of the answer."""
    ticket: bytes | None = None
    is_without_prefill: bool = False
    """It could not be handed over: a worker that decodes takes it from the store."""
    failures: Counter[WorkerAddress] = field(default_factory=Counter)
    """Faults, and times that a worker was absent."""
    refusals: Counter[WorkerAddress] = field(default_factory=Counter)
    """Of workers that do not take it now: since the answer last grew or was handed over."""
    draining: set[WorkerAddress] = field(default_factory=set)
    """Workers that will not take it, however long it waits."""
    setbacks: int = 0
    """Attempts in a row that brought nothing."""
    faults: int = 0
    """Of workers that were there, since one went on with the answer."""

    @property
    def vain_rounds(self) -> int:
        """How often in a row all whom it could ask were asked in vain."""
        return max(0, self.setbacks - len(self._candidates()) + 1)

    def next_worker(
        self, in_flight: Mapping[WorkerAddress, int], suspects: Collection[WorkerAddress] = ()
    ) -> WorkerAddress:
        """Whom to ask now. `suspects`: lost of late, perhaps to other requests.

        Raises EnginesUnavailable after too many faults.
        """
        if self.faults >= self.faults_max:
            raise self.give_up(f"answers after {count_of(self.faults, 'fault')}")
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

    def give_up(self, why: str) -> EnginesUnavailable:
        """The error that says why, and what was tried."""
        kind = "that decodes " if self._is_for_sequences else ""
        return EnginesUnavailable(kind + why, self.trials.describe())

    def note_progress(self, tokens: int) -> None:
        """A worker has given so many tokens in this attempt."""
        self.refusals.clear()
        self.setbacks = 0
        if tokens >= GROWTH_MIN_TOKENS:
            self.faults = 0

    def note_hand_over(self, place: WorkerAddress, message: HandedOver, *, has_grown: bool) -> None:
        """The worker has taken its hands off the request. `has_grown`: it gave a token before."""
        self.refusals.clear()
        # Who sends a sequence away will not take it back.
        self.refusals[place] += 1
        if not has_grown:
            # Rightly so if it drains; but workers that only pass it on must be noticed.
            self._note_fault(place)
        self.reports.append(message.report)
        self.ticket = message.ticket
        self.is_without_prefill = message.ticket is None
        if message.ticket is None:
            self.trials.note(place, f"not handed over: {message.reason or 'it does not say why'}")
            return
        self.moves += 1
        if not has_grown:
            self.trials.note(place, "handed over without a token")

    def note_refusal(self, place: WorkerAddress, message: Refused) -> None:
        """The worker does not take it now, or not with this ticket."""
        self.trials.note(place, message.reason)
        if message.cause == "ticket":
            self.ticket = None
            self.is_without_prefill = False
            # A ticket is good once: it cannot be refused again and again, but a worker that only
            # refuses must be noticed.
            self._note_fault(place)
            return
        self.setbacks += 1
        self.refusals[place] += 1
        if message.cause == "draining":
            self.draining.add(place)

    def note_fault(
        self, place: WorkerAddress, message: Failed | WorkerLost, *, was_begun: bool
    ) -> None:
        """The worker is lost, or lost the request. Unless it had begun, a ticket may still be good:
        if it is not, the next worker says so."""
        detail = message.reason if isinstance(message, Failed) else str(message)
        self.trials.note(place, detail)
        self._note_fault(place, is_there=not isinstance(message, WorkerAbsent))
        if was_begun:
            self.ticket = None
            self.is_without_prefill = False

    def _note_fault(self, place: WorkerAddress, *, is_there: bool = True) -> None:
        self.setbacks += 1
        self.failures[place] += 1
        self.faults += is_there

    @property
    def _is_for_sequences(self) -> bool:
        """Prefill workers have done what they can."""
        return self.ticket is not None or self.is_without_prefill

    def _candidates(self) -> tuple[WorkerAddress, ...]:
        if self._is_for_sequences:
            return self.places.for_sequences
        prompts = self.places.for_prompts
        if all(self.failures[place] or place in self.draining for place in prompts):
            # A worker that decodes can prefill too, only not as well.
            return prompts + self.places.decode
        return prompts


def choose_worker(
    places: Iterable[WorkerAddress],
    *,
    in_flight: Mapping[WorkerAddress, int],
    failures: Mapping[WorkerAddress, int],
    refusals: Mapping[WorkerAddress, int],
    suspects: Collection[WorkerAddress] = (),
) -> WorkerAddress:
    """The worker that failed this request least often; of those one that has not been lost of late
    to any request, of those the one that refused it least often, of those the one with the fewest
    requests of this client in flight, then the first."""

    def rank(place: WorkerAddress) -> tuple[int, bool, int, int]:
        refused = refusals.get(place, 0)
        return failures.get(place, 0), place in suspects, refused, in_flight.get(place, 0)

    return min(places, key=rank)
