"""Where each request of an engine stands, and the ways between: each is in one place at a time.

    admission -> ready (prefill) -> decoding -> ended
        ^------------ preempted -------'  '---> held, for another engine

Not for what a step computes of them; that is `passes`.
"""

from bisect import insort
from collections.abc import Callable

from .admission import Admission, order_of
from .engine_status import EngineCounts
from .job import Job, Phase
from .keeping import Keeper
from .request import FinishReason, TokenEvent
from .scheduler.blocks import blocks_needed
from .scheduler.preemption import choose_victim
from .sequence_memory import SequenceMemory


class Schedule:
    """Requests by phase, and the events that are to be told. Belongs to the engine's thread."""

    def __init__(
        self,
        admission: Admission,
        memory: SequenceMemory,
        keeper: Keeper,
        *,
        room_deadline_s: float,
        counts: EngineCounts,
        clock: Callable[[], float],
    ) -> None:
        self.admission = admission
        self.memory = memory
        self.keeper = keeper
        self.jobs: dict[str, Job] = {}
        self.ready: list[Job] = []
        """In order of the line."""
        self.decoding: list[Job] = []
        self.events: list[TokenEvent] = []
        self._room_deadline_s = room_deadline_s
        self._counts = counts
        self._clock = clock

    def add(self, job: Job) -> None:
        """Put a new request at the end of the line, or among those that decode."""
        self.jobs[job.request_id] = job
        if job.phase is Phase.DECODING:
            self.decoding.append(job)
        else:
            self.admission.add(job)

    def make_ready(self, job: Job) -> None:
        """Its prefix is there."""
        insort(self.ready, job, key=order_of)

    def begin_decoding(self, job: Job) -> None:
        """Its prompt is computed."""
        self.ready.remove(job)
        self.decoding.append(job)
        job.phase = Phase.DECODING

    def hold(self, job: Job) -> None:
        """Take it out of the schedule, with its blocks and its state, for another engine."""
        self._leave(job)
        self.keeper.at_end(job)
        job.drop_load()
        job.phase = Phase.PREFILLED
        self.memory.held.add(job.sequence)

    def end(self, job: Job, reason: FinishReason, token_ids: tuple[int, ...] = ()) -> None:
        """Its last event, with the newest `token_ids` of its answer; everything is given back."""
        self._leave(job)
        job.drop_load()
        if self.memory.is_open(job.sequence):
            self.keeper.at_end(job)
            self.memory.give_back(job.sequence)
        del self.jobs[job.request_id]
        self._count_end(reason)
        self.events.append(
            TokenEvent(
                request_id=job.request_id,
                position=job.answer_tokens - len(token_ids),
                token_ids=token_ids,
                finish_reason=reason,
                replay_first=job.sequence.replay_first,
                report=job.report(self._clock()),
            )
        )

    def give_blocks(self) -> list[Job]:
        """Those that decode, each with the blocks for its next token: others are preempted for
        them. Who can have none now waits for the next step."""
        short = [job for job in self.decoding if _missing_blocks(job) > 0]
        for job in sorted(short, key=_strength_of, reverse=True):
            if job.phase is Phase.DECODING:
                self._grow(job)
        if not short:
            return self.decoding[:]
        return [job for job in self.decoding if _missing_blocks(job) <= 0]

    def end_overdue(self) -> None:
        """End the one request that blocks are kept from by nothing but saves, for too long."""
        open_sequences = self.memory.open_sequences
        if open_sequences == 0:
            job = self.admission.overdue()
        elif open_sequences == 1 and self.decoding:
            (job,) = self.decoding
            waits_s = job.short_for_s(self._clock())
            job = job if waits_s > 2 * self._room_deadline_s else None
        else:
            return
        if job is not None:
            self.end(job, "no_room")

    def _grow(self, job: Job) -> None:
        while not self.memory.grow(job.sequence, _missing_blocks(job)):
            holders = [*self.admission.holders(), *self.ready, *self.decoding]
            number = choose_victim([holder.standing for holder in holders])
            if number is None:
                if job.short_since_s is None:
                    job.short_since_s = self._clock()
                return
            self._preempt(holders[number])
            if holders[number] is job:
                return
        job.short_since_s = None

    def _preempt(self, job: Job) -> None:
        """Take its blocks and its state; it begins anew, next in line."""
        if job.finish_reason is not None:
            self.end(job, job.finish_reason)
            return
        sequence = job.sequence
        if job.phase is Phase.DECODING:
            job.note_begun()
        self._leave(job)
        job.drop_load()
        self.memory.give_back(sequence)
        job.begin_anew()
        job.costs.preemptions += 1
        self._counts.preemptions += 1
        self.admission.add_first(job)

    def _leave(self, job: Job) -> None:
        match job.phase:
            case Phase.PREFILL:
                self.ready.remove(job)
            case Phase.DECODING | Phase.ENDING:
                self.decoding.remove(job)
            case Phase.PREFILLED:
                self.memory.held.remove(job.sequence)
            case _:
                self.admission.remove(job)

    def _count_end(self, reason: FinishReason) -> None:
        match reason:
            case "stop" | "length":
                self._counts.finished += 1
            case "aborted":
                self._counts.aborted += 1
            case "no_room":
                self._counts.no_room += 1


def _missing_blocks(job: Job) -> int:
    if job.phase is not Phase.DECODING:
        return 0
    needed = blocks_needed(len(job.sequence.token_ids), job.tokens_max)
    return needed - len(job.sequence.block_ids)


def _strength_of(job: Job) -> tuple[int, int]:
    return job.standing.strength
