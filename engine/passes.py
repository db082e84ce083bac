"""Runs what a step was planned to compute, and does with the results what follows from them."""

from collections.abc import Callable
from functools import partial

from kvstore.layout import BLOCK_TOKENS

from .engine_status import EngineCounts, EngineTimes
from .job import Job, Phase
from .model_runner import ModelRunner, Part
from .prefix_source import LoadFellShort, PrefixLoad
from .request import TokenEvent
from .sampling import FloatArray, choose_token
from .schedule import Schedule
from .scheduler.step_plan import StepPlan
from .sequence import Sequence


def begin_nothing(sequence: Sequence) -> None:
    """Nobody hands over."""


class Passes:
    """The passes of one engine. `on_last_chunk`: see LLMEngine."""

    def __init__(
        self,
        runner: ModelRunner,
        schedule: Schedule,
        *,
        counts: EngineCounts,
        times: EngineTimes,
        clock: Callable[[], float],
    ) -> None:
        self.on_last_chunk: Callable[[Sequence], None] = begin_nothing
        self._runner = runner
        self._schedule = schedule
        self._counts = counts
        self._times = times
        self._clock = clock

    def run(self, plan: StepPlan, answers: list[Job], arriving: Job | None) -> None:
        """Run a plan that was made for these answers, the schedule's ready ones, and the one whose
        prefix is arriving."""
        ready = self._schedule.ready[:]
        for chunks in plan.passes:
            jobs = answers + [ready[chunk.index] for chunk in chunks]
            ends = [len(job.sequence.token_ids) for job in answers]
            ends += [chunk.end for chunk in chunks]
            self._pass(jobs, ends)
            answers = []
        if arriving is not None:
            self._run_alone(arriving, plan.alone_ends)

    def _run_alone(self, job: Job, ends: tuple[int, ...]) -> None:
        """The first pass waits for the prefix section by section; then it is all there."""
        for end in ends:
            if job.phase is Phase.PREFILL:
                self._pass([job], [end])
                continue
            assert job.load is not None
            try:
                self._pass([job], [end], job.load)
            except LoadFellShort:
                self._schedule.admission.fell_short(job)
                return

    def _pass(self, jobs: list[Job], ends: list[int], load: PrefixLoad | None = None) -> None:
        """`load` is what arrives while the pass runs. Raises LoadFellShort."""
        first = [job.sequence.computed_tokens for job in jobs]
        parts = [Part(job.sequence, end) for job, end in zip(jobs, ends, strict=True)]
        for job, end in zip(jobs, ends, strict=True):
            is_last = job.phase is Phase.PREFILL and end == len(job.sequence.token_ids)
            if is_last and job.request.ends_after_prefill:
                self.on_last_chunk(job.sequence)
        start_s = self._clock()
        if load is None:
            rows = self._runner.compute(parts)
        else:
            wait = partial(self._wait_for_section, load)
            rows = self._runner.compute(parts, wait_for_section=wait)
            load.confirm()
        took_s = self._clock() - start_s
        for index, (job, logits) in enumerate(zip(jobs, rows, strict=True)):
            if job.phase is Phase.LOADING:
                self._schedule.admission.has_arrived(job)
                self._schedule.make_ready(job)
            if job.phase is Phase.PREFILL:
                job.costs.prefill_s += took_s
                self._counts.prefill_tokens += ends[index] - first[index]
            self._after_pass(job, logits)

    def _wait_for_section(self, load: PrefixLoad, section: int) -> None:
        start_s = self._clock()
        try:
            load.wait_for_section(section)
        finally:
            self._counts.arrival_wait_s += self._clock() - start_s

    def _after_pass(self, job: Job, logits: FloatArray | None) -> None:
        self._schedule.keeper.after_pass(job)
        if job.phase is Phase.ENDING:
            assert job.finish_reason is not None
            self._schedule.end(job, job.finish_reason)
        elif logits is not None:
            self._add_token(job, logits)

    def _add_token(self, job: Job, logits: FloatArray) -> None:
        sequence, request = job.sequence, job.request
        position = job.answer_tokens
        token_id = choose_token(logits, request.sampling, len(sequence.token_ids))
        sequence.token_ids.append(token_id)
        self._counts.answer_tokens += 1
        if job.costs.first_token_s is None:
            self._note_first_token(job)
        is_first_here = job.phase is Phase.PREFILL
        if is_first_here:
            self._schedule.begin_decoding(job)
        if token_id in request.stop_ids:
            job.finish_reason = "stop"
        elif len(sequence.token_ids) == job.tokens_max:
            job.finish_reason = "length"
        if job.finish_reason is None:
            self._tell(job, position, token_id, is_prefilled=self._is_prefilled(job, is_first_here))
        elif len(sequence.token_ids) % BLOCK_TOKENS:
            self._schedule.end(job, job.finish_reason, (token_id,))
        else:
            # One more token is computed, which fills the block, so that a follow-up finds it.
            job.phase = Phase.ENDING
            self._tell(job, position, token_id)

    def _is_prefilled(self, job: Job, is_first_here: bool) -> bool:
        if not (is_first_here and job.request.ends_after_prefill):
            return False
        self._schedule.hold(job)
        return True

    def _tell(self, job: Job, position: int, token_id: int, *, is_prefilled: bool = False) -> None:
        self._schedule.events.append(
            TokenEvent(
                request_id=job.request_id,
                position=position,
                token_ids=(token_id,),
                replay_first=job.sequence.replay_first,
                is_prefilled=is_prefilled,
                report=job.report(self._clock()) if is_prefilled else None,
            )
        )

    def _note_first_token(self, job: Job) -> None:
        job.costs.first_token_s = self._clock()
        job.note_hit()
        self._times.first_token.add(job.costs.first_token_s - job.costs.arrived_s)
        self._counts.hit_tokens += job.costs.hit_tokens
        self._counts.replay_tokens += job.costs.replay_tokens
        self._counts.shared_tokens += job.costs.shared_tokens
