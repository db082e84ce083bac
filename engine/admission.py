"""The way of a request from the queue to its first pass: matched, given blocks, loaded, begun.

    queue -> MATCHING -> MATCHED -> LOADING -> PREFILL
              (look up)   (blocks)   (bytes)

Requests are looked up in order, and get blocks in order among those that are matched: one whose
match is late is passed meanwhile, and nobody passes one that waits for blocks. Loads end when they
end. A bounded number of requests asks the source at one time, and those that need nothing of it do
not stand in that line: what is slow holds back nobody but those that ask too. What they wait at
most, `sources.threaded_source` says.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import HitPlan

from .engine_config import EngineConfig
from .engine_status import EngineCounts
from .job import Job, Phase
from .model_runner import ModelRunner, Window
from .prefix_knowledge import PrefixKnowledge
from .prefix_source import PrefixSource
from .scheduler.blocks import blocks_needed, may_begin
from .scheduler.prefix_choice import keeps_bits
from .sequence_memory import SequenceMemory


def order_of(job: Job) -> int:
    return job.order


class Admission:
    """Requests before their first pass. Belongs to the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: SequenceMemory,
        source: PrefixSource | None,
        prefixes: PrefixKnowledge,
        *,
        config: EngineConfig,
        counts: EngineCounts,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._source = source
        self._prefixes = prefixes
        self._config = config
        self._counts = counts
        self._clock = clock
        self._queue: deque[Job] = deque()
        self._entering: list[Job] = []

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def entering(self) -> int:
        return len(self._entering)

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def add_first(self, job: Job) -> None:
        """One that was preempted: nobody is before it but those that are on their way already. It
        keeps its place in line, which is before all that were never looked up."""
        job.phase = Phase.WAITING
        insort(self._queue, job, key=order_of)

    def remove(self, job: Job) -> None:
        """It goes on elsewhere, or ends. Its load is the caller's to give up, its blocks too."""
        if job.phase is Phase.WAITING:
            self._queue.remove(job)
        else:
            self._entering.remove(job)

    def line(self) -> list[Job]:
        """Those that have no blocks, in order."""
        entering = [job for job in self._entering if job.phase is not Phase.LOADING]
        return [*entering, *self._queue]

    def holders(self) -> list[Job]:
        """Those that have blocks already."""
        return [job for job in self._entering if job.phase is Phase.LOADING]

    @property
    def is_short(self) -> bool:
        """Whether somebody waits for blocks or for a state, whom nobody is to pass."""
        is_next_preempted = bool(self._queue) and self._queue[0].costs.preemptions > 0
        return is_next_preempted or any(job.phase is Phase.MATCHED for job in self._entering)

    def advance(self) -> list[Job]:
        """Bring everybody as far as they can come now; those that are ready for a pass leave."""
        self._look_up()
        for job in self._entering:
            if job.phase is Phase.MATCHING:
                self._take_match(job)
        for job in self._entering:
            if job.phase is Phase.MATCHED and not self._admit(job):
                break
        for job in self._entering:
            if job.phase is Phase.LOADING:
                self._take_load(job)
        ready = [job for job in self._entering if job.phase is Phase.PREFILL]
        if ready:
            self._entering = [job for job in self._entering if job.phase is not Phase.PREFILL]
            self._look_up()
        return ready

    def arriving(self) -> Job | None:
        """The first request whose pass may run while its prefix arrives, begun."""
        for job in self._entering:
            if job.phase is not Phase.LOADING or job.waits_for_end:
                continue
            assert job.load is not None
            if job.load.is_startable:
                if not job.is_started:
                    window = job.load.window if job.window is None else job.window
                    self._start(job, job.plan, window)
                return job
        return None

    def has_arrived(self, job: Job) -> None:
        """A pass over it went through, so all sections had come: it is as ready as any."""
        self._entering.remove(job)
        self._let_go_on(job)

    def fell_short(self, job: Job) -> None:
        """A pass over it was ended because its prefix did not come in time."""
        self._take_back_start(job)
        job.waits_for_end = True

    def overdue(self) -> Job | None:
        """The request that would be next, if it lacks blocks for longer than it may."""
        for job in self._entering:
            if job.phase is Phase.MATCHED:
                waits_s = job.short_for_s(self._clock())
                return job if waits_s > 2 * self._config.room_deadline_s else None
        return None

    # From phase to phase --------------------------------------------------------------------------

    def _look_up(self) -> None:
        """In order; but those that need nothing of the source pass those that wait to ask it."""
        asking = sum(job.load is not None for job in self._entering)
        asking_left = self._config.loads_max - asking
        others_left = self._config.loads_max - (len(self._entering) - asking)
        # Nobody would come farther than behind these, so nobody is looked for.
        is_passing = all(job.phase is not Phase.MATCHED for job in self._entering)
        for job in list(self._queue):
            # One that was preempted is not kept behind newer ones that wait for blocks; there are
            # no more of them than sequences.
            is_free_to_enter = job.costs.preemptions > 0
            if not is_free_to_enter and max(asking_left, others_left) <= 0:
                return
            needs_source = self._source is not None and not self._prefixes.is_all_here(job)
            if not is_free_to_enter and (asking_left if needs_source else others_left) <= 0:
                if needs_source and is_passing:
                    continue
                return
            asking_left -= needs_source
            others_left -= not needs_source
            self._enter(job, needs_source=needs_source)

    def _enter(self, job: Job, *, needs_source: bool) -> None:
        self._queue.remove(job)
        insort(self._entering, job, key=order_of)
        job.phase = Phase.MATCHED
        if needs_source:
            self._ask(job)

    def _ask(self, job: Job) -> None:
        assert self._source is not None
        token_ids = job.sequence.token_ids[: self._prefixes.tokens_to_match(job)]
        job.load = self._source.look_up(token_ids, self._prefixes.keys_to_match(job))
        job.phase = Phase.MATCHING

    def _take_match(self, job: Job) -> None:
        assert job.load is not None
        found = job.load.found
        if found is None and job.load.outcome is None:
            return
        job.phase = Phase.MATCHED
        if found is not None and job.costs.first_token_s is None:
            job.costs.match_s = found.match_s
            job.costs.matched_tokens = found.matched_blocks * BLOCK_TOKENS
            self._counts.matched_tokens += found.matched_blocks * BLOCK_TOKENS

    def _admit(self, job: Job) -> bool:
        """Give it blocks and a state, if there are enough, and let its prefix come. False if those
        behind it wait with it."""
        memory = self._memory
        if not memory.has_state or not self._may_try(job):
            return False
        known = self._prefixes.known(job)
        plan = self._prefixes.choose(job, known)
        if self._should_ask(job, plan):
            self._ask(job)
            return True
        shared_blocks = min(known.shared_blocks, plan.stored_blocks)
        shared_keys = job.keys()[:shared_blocks]
        new_blocks = blocks_needed(len(job.sequence.token_ids), job.tokens_max) - shared_blocks
        needed_blocks = new_blocks + self._prefixes.index.count_free(shared_keys)
        if not self._has_room(needed_blocks):
            self._note_short(job, needed_blocks)
            # Saves that were given up may have been all that kept a shared block from being free.
            needed_blocks = new_blocks + self._prefixes.index.count_free(shared_keys)
            if not self._has_room(needed_blocks):
                return False
        memory.open(job.sequence, self._prefixes.index.take(shared_keys), new_blocks)
        job.short_since_s = None
        job.shared_blocks = shared_blocks
        if job.costs.admitted_s is None:
            job.costs.admitted_s = self._clock()
        self._begin_load(job, plan)
        return True

    def _should_ask(self, job: Job, plan: HitPlan) -> bool:
        """Whether the pool has lost, while it waited, what spared it the question."""
        may_ask = self._source is not None and job.load is None and not job.has_fallen_short
        return may_ask and not self._prefixes.is_longest(job, plan)

    def _begin_load(self, job: Job, plan: HitPlan) -> None:
        job.plan = plan
        job.window = self._prefixes.take_window(job, plan.window_anchor)
        needs_window = plan.window_anchor is not None and job.window is None
        if plan.stored_blocks == job.shared_blocks and not needs_window:
            job.drop_load()
            self._make_ready(job, plan, job.window)
            return
        assert job.load is not None
        wanted = plan if needs_window else replace(plan, window_anchor=None)
        job.load.begin(wanted, job.sequence.block_ids, job.shared_blocks)
        job.waits_for_end = False
        job.phase = Phase.LOADING

    def _take_load(self, job: Job) -> None:
        """Nothing more comes: go on with all of it, or with what did come."""
        assert job.load is not None
        outcome = job.load.outcome
        if outcome is None:
            return
        plan, window = job.plan, job.window
        if window is None and plan.window_anchor is not None:
            window = outcome.window
        is_whole = outcome.blocks >= plan.stored_blocks
        if not is_whole or (plan.window_anchor is not None and window is None):
            if job.is_started:
                self._take_back_start(job)
            self._counts.short_loads += 1
            plan = self._prefixes.choose(job, self._prefixes.come(job, outcome))
            window = self._prefixes.take_window(job, plan.window_anchor)
            if window is None and plan.window_anchor is not None:
                window = outcome.window
        job.drop_load()
        if plan.stored_blocks < job.shared_blocks:
            self._put_back(job)
        else:
            self._make_ready(job, plan, window)

    def _put_back(self, job: Job) -> None:
        """It would write where others read: blocks it shares lie behind the prefix that it is left
        with. It waits for blocks of its own instead, with what the pool alone has for it."""
        self._memory.give_back(job.sequence)
        job.begin_anew()
        job.has_fallen_short = True
        job.phase = Phase.MATCHED

    def _make_ready(self, job: Job, plan: HitPlan, window: Window | None) -> None:
        if not job.is_started:
            self._start(job, plan, window)
        self._let_go_on(job)

    def _let_go_on(self, job: Job) -> None:
        """Its prefix is there, as it was begun."""
        job.window = None
        job.phase = Phase.PREFILL
        if job.has_changed:
            self._counts.changed_prefixes += 1
            job.note_begun()

    def _start(self, job: Job, plan: HitPlan, window: Window | None) -> None:
        assert job.shared_blocks <= plan.stored_blocks, (job.shared_blocks, plan)
        sequence = job.sequence
        job.plan = plan
        job.is_cold = self._prefixes.is_cold(job, plan)
        if plan.hit_tokens:
            self._runner.start_after(sequence, plan, window)
        job.borders = (*self._runner.chunk_borders(sequence), sequence.prompt_tokens)
        job.indexed_blocks = 0
        job.window_blocks = plan.hit_tokens // BLOCK_TOKENS
        job.is_started = True
        begun = job.begun
        job.has_changed = begun is not None and not keeps_bits(begun, is_cold=job.is_cold)

    def _take_back_start(self, job: Job) -> None:
        """It was begun while its prefix arrived, and no pass over it went through."""
        self._memory.begin_anew(job.sequence)
        job.is_started = False

    # Short of blocks ------------------------------------------------------------------------------

    def _may_try(self, job: Job) -> bool:
        """Not at every step: when something was given back or more can be shared, and from time to
        time for the saves that may be given up for it."""
        if job.short_since_s is None or job.short_at != self._moment():
            return True
        return self._clock() - job.short_looked_s > self._config.room_deadline_s

    def _moment(self) -> tuple[int, ...]:
        """As long as it stays the same there is no more room than there was, and nobody needs less
        of it."""
        memory = self._memory
        return memory.pool.freed_blocks, memory.growing_sequences, self._prefixes.additions

    def _has_room(self, needed_blocks: int) -> bool:
        return may_begin(
            free_blocks=self._memory.pool.free_blocks,
            needed_blocks=needed_blocks,
            growing_sequences=self._memory.growing_sequences,
        )

    def _is_late(self, job: Job) -> bool:
        return job.short_for_s(self._clock()) > self._config.room_deadline_s

    def _note_short(self, job: Job, needed_blocks: int) -> None:
        """Saves are given up for one that has waited long: then there may be room."""
        job.short_at, job.short_looked_s = self._moment(), self._clock()
        if job.short_since_s is None:
            job.short_since_s = self._clock()
        elif self._is_late(job):
            self._memory.make_room(needed_blocks + self._memory.growing_sequences)
