"""What all sources have alike: threads that match, threads that bring, and the loads under way.

A store that answers nothing costs a request no more than a deadline that others ran into before it,
and one of its own, for its match and again for its load. After the first one nobody asks for
`rest_s`: whoever is in line or comes then has missed at once. Then one asks, and the others with it
if it is answered.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

from kvstore.key import Namespace
from kvstore.policy import MISS, HitPlan

from ..block_pool import BlockPool
from ..kv.mover import ComputeMark
from ..prefix_source import PrefixFound
from ..store_faults import STORE_ERRORS, StoreFaults
from ..work_threads import WorkThreads
from .circuit_breaker import CircuitBreaker
from .load import ThreadedLoad, mark_nothing

MATCH_THREADS = 2
"""One match that nobody answers must not hold back the next one."""

LATE_PART = 0.9
"""Of a deadline: a store that gives up by itself does so a little before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """What a source may take, in time and in number."""

    loads_max: int = 4
    """Loads that are brought at one time."""

    match_deadline_s: float = 1.0
    fetch_deadline_s: float = 2.0
    """From the moment a load's turn has come until what is there by then is all."""

    rest_s: float = 2.0
    """Nobody asks for so long after somebody has waited for a deadline, and nothing came."""

    section_wait_s: float = 0.1
    """Longest time that all sections of a pass may keep it waiting, together."""

    lease_blocks_max: int = 8192
    """Blocks of a prompt that are brought at most; 2^20 tokens."""


def notify_nobody() -> None:
    """No engine is there yet."""


class ThreadedSource(ABC):
    """A `PrefixSource` whose `_match` and `_bring` may block, each in a thread of its own kind.

    The line of those that wait is as long as the engine lets it be.
    """

    def __init__(
        self,
        *,
        namespace: Namespace,
        pool: BlockPool,
        faults: StoreFaults,
        limits: LoadLimits,
        clock: Callable[[], float],
        mark_compute: Callable[[], ComputeMark] = mark_nothing,
    ) -> None:
        """`mark_compute`: a mover's, if it is one that brings the bytes."""
        self.on_change: Callable[[], None] = notify_nobody
        self._namespace = namespace
        self._pool = pool
        self._faults = faults
        self._limits = limits
        self._clock = clock
        self._mark_compute = mark_compute
        self._lock = Lock()
        self._loads: set[ThreadedLoad] = set()
        """Begun, and not finished."""
        self._match_breaker = CircuitBreaker(rest_s=limits.rest_s, clock=clock)
        self._load_breaker = CircuitBreaker(rest_s=limits.rest_s, clock=clock)
        self._matching = WorkThreads("prefix-match", count=MATCH_THREADS, clock=clock)
        self._bringing = WorkThreads("prefix-load", count=limits.loads_max, clock=clock)

    @abstractmethod
    def _match(self, load: ThreadedLoad) -> tuple[int, HitPlan]:
        """Leading blocks that are stored, and the plan for them. May raise STORE_ERRORS."""

    @abstractmethod
    def _bring(self, load: ThreadedLoad) -> None:
        """Bring what is ordered, each wait for the store `_within` its deadline; ends with
        `load.finish`. Raises nothing that a store raises."""

    def look_up(self, prompt_ids: Sequence[int], keys: Sequence[bytes]) -> ThreadedLoad:
        """See PrefixSource."""
        load = ThreadedLoad(
            prompt_ids,
            keys,
            sections=len(self._namespace.layout.sections),
            pool=self._pool,
            section_wait_s=self._limits.section_wait_s,
            bring=self._put_in_line,
            on_change=self._tell_engine,
            clock=self._clock,
            mark_compute=self._mark_compute,
        )
        if not keys or not self._matching.submit(partial(self._settle_match, load)):
            load.settle_match(PrefixFound(matched_blocks=0, plan=MISS, match_s=0.0))
        return load

    def close(self, deadline_s: float) -> bool:
        """See PrefixSource. Loads that are under way are given up; the store stays open."""
        end_s = self._clock() + deadline_s
        with self._lock:
            loads = list(self._loads)
        for load in loads:
            load.give_up()
        has_matched = self._matching.close(deadline_s)
        return self._bringing.close(max(0.0, end_s - self._clock())) and has_matched

    @contextmanager
    def _within(self, load: ThreadedLoad, deadline_s: float) -> Iterator[float]:
        """Around a wait for the store, which has so long for it; the load says if it took that."""
        due_s = self._clock() + LATE_PART * deadline_s
        try:
            yield deadline_s
        finally:
            if self._clock() >= due_s:
                load.has_met_deadline = True

    def _tell_engine(self) -> None:
        self.on_change()

    def _settle_match(self, load: ThreadedLoad) -> None:
        start_s = self._clock()
        matched_blocks, plan = 0, MISS
        try:
            if not load.is_given_up and self._match_breaker.may_ask():
                matched_blocks, plan = self._match_and_note(load)
        except STORE_ERRORS as error:
            self._faults.note("match", error)
        finally:  # also if the thread ends here: nobody is to wait for it
            end_s = self._clock()
            load.note("match", None, start_s, end_s)
            load.settle_match(
                PrefixFound(matched_blocks=matched_blocks, plan=plan, match_s=end_s - start_s)
            )

    def _match_and_note(self, load: ThreadedLoad) -> tuple[int, HitPlan]:
        due_s = self._clock() + LATE_PART * self._limits.match_deadline_s
        matched_blocks = 0
        try:
            matched_blocks, plan = self._match(load)
        finally:
            self._match_breaker.note(is_late=matched_blocks == 0 and self._clock() >= due_s)
        return matched_blocks, plan

    def _put_in_line(self, load: ThreadedLoad) -> bool:
        with self._lock:
            self._loads.add(load)
        if self._bringing.submit(partial(self._bring_in_turn, load)):
            return True
        self._forget(load)
        return False

    def _bring_in_turn(self, load: ThreadedLoad) -> None:
        try:
            if load.take():  # else it was given up, and ends by whoever gave it up
                self._bring_to_its_end(load)
        finally:
            self._forget(load)

    def _bring_to_its_end(self, load: ThreadedLoad) -> None:
        if not self._load_breaker.may_ask():
            load.finish()
            return
        try:
            self._bring(load)
        finally:
            if load.outcome is None:  # the thread ends here: nobody is to wait for it
                load.finish()
            self._load_breaker.note(is_late=load.is_late)

    def _forget(self, load: ThreadedLoad) -> None:
        with self._lock:
            self._loads.discard(load)
