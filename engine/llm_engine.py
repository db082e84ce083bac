"""An engine without a network: requests go in, steps are taken, tokens come out.

    add_request -> [ admission ] -> prefill -> decode -> last event
                                       ^          |
                                       +----------+  preempted: prompt and answer are prefilled

One thread has the engine; only `wake` and `status` are for others too. A step computes a token of
every answer and, as its budget allows, chunks of prompts. What is slow to come from a store makes
its own request late; a step waits for it in the first pass over a prefix that is arriving only, and
no longer than the source allows a pass. What a request answers does not depend on its company
(docs/decisions/0030, 0032).
"""

import time
from collections.abc import Callable, Generator
from itertools import count
from threading import Event

from kvstore.key import KeyChain
from kvstore.policy import MISS

from .admission import Admission
from .engine_config import EngineConfig
from .engine_status import EngineCounts, EngineStatus, EngineTimes
from .errors import EngineBusy, EngineClosed
from .job import Costs, Job, Phase
from .keeping import Keeper
from .model_runner import ModelRunner
from .passes import Passes
from .prefix_index import PrefixIndex
from .prefix_knowledge import PrefixKnowledge
from .prefix_source import PrefixSource
from .request import Request, TokenEvent
from .request_checks import PreparedRequest, check_id, check_request, is_whole, tokens_max_of
from .request_report import RequestReport
from .save_receipt import SaveReceipt
from .save_sink import SaveSink
from .schedule import Schedule
from .scheduler.blocks import blocks_needed, may_begin
from .scheduler.step_plan import Prefill, plan_step
from .sequence import Sequence
from .sequence_memory import SequenceMemory
from .window_snapshots import WindowSnapshots

STREAM_WAIT_S = 1.0
"""Between two looks of a stream that has nothing to do and is not woken."""

DEFAULT_CONFIG = EngineConfig()


class LLMEngine:
    """Answers requests with one runner. Close it, or use it as a context manager.

    `source` and `sink` are the engine's: it closes them, and has itself told by the source and by
    the runner's pool when something changes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        source: PrefixSource | None = None,
        sink: SaveSink | None = None,
        config: EngineConfig = DEFAULT_CONFIG,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self._source = source
        self._sink = sink
        self._config = config
        self._clock = clock
        self._counts = EngineCounts()
        self.times = EngineTimes()
        """May be read from any thread."""
        self._saves = SaveReceipt()
        self._orders = count()
        self._changed = Event()
        self._is_closed = False
        self._memory = SequenceMemory(runner, sink, sequences_max=config.sequences_max)
        index = PrefixIndex(runner.pool)
        snapshots = WindowSnapshots(config.window_snapshots_max)
        self._admission = Admission(
            runner,
            self._memory,
            source,
            PrefixKnowledge(index, snapshots, has_windows=runner.window_layout is not None),
            config=config,
            counts=self._counts,
            clock=clock,
        )
        self._keeper = Keeper(runner, index, snapshots, sink)
        self._schedule = Schedule(
            self._admission,
            self._memory,
            self._keeper,
            room_deadline_s=config.room_deadline_s,
            counts=self._counts,
            clock=clock,
        )
        self._passes = Passes(
            runner, self._schedule, counts=self._counts, times=self.times, clock=clock
        )
        runner.pool.on_free = self.wake
        if source is not None:
            source.on_change = self.wake

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Requests -------------------------------------------------------------------------------------

    def add_request(self, asked: Request | PreparedRequest) -> None:
        """Take a request; its events come from `step`. One that was prepared by another thread
        (`prepare_request`) is taken in a short time, however long its prompt is.

        Raises EngineBusy if as many wait as may, InvalidRequest for one that this engine could
        never answer.
        """
        self._check_open("add_request")
        request, chain = self._check(asked)
        is_over = is_whole(request, self.runner.context_tokens)
        if not is_over and self._admission.waiting >= self._config.queue_requests_max:
            self._counts.refused += 1
            raise EngineBusy(waiting_requests=self._admission.waiting)
        job = self._job_of(request, Sequence(request), chain)
        self._schedule.add(job)
        self._counts.requests += 1
        if is_over:
            self._schedule.end(job, "length")

    def abort(self, request_id: str) -> None:
        """End a request: its last event comes from the next step. Nothing happens if there is none
        of this id, which may have just ended."""
        job = self._schedule.jobs.get(request_id)
        if job is not None:
            self._schedule.end(job, "aborted")

    def step(self, wait_s: float = 0.0) -> list[TokenEvent]:
        """Compute one token of every answer, and of prompts what the budget allows.

        If there is nothing to compute or to tell, waits until something changes, `wait_s` at most.
        """
        self._check_open("step")
        self._step(wait_s)
        events, self._schedule.events = self._schedule.events, []
        return events

    def stream(self, request: Request) -> Generator[TokenEvent]:
        """Add a request and step until it ends: its events. Those of others that come meanwhile are
        returned by later steps. Closed early, the request is aborted."""
        self.add_request(request)
        is_over = False
        try:
            while not is_over:
                self._check_open("stream")
                self._step(STREAM_WAIT_S)
                for event in self._take_events(request.request_id):
                    is_over = event.finish_reason is not None or event.is_prefilled
                    yield event
        finally:
            if not is_over and not self._is_closed:
                self.abort(request.request_id)
                self._take_events(request.request_id)

    def wake(self) -> None:
        """Let a step that waits look again. May be called from any thread."""
        self._changed.set()

    @property
    def has_requests(self) -> bool:
        """Whether a step can bring anything: there is a request that did not end, or an event."""
        return bool(self._schedule.jobs or self._schedule.events)

    def decoding_ids(self) -> list[str]:
        """Requests that can be detached because they decode."""
        decoding = self._schedule.decoding
        return [job.request_id for job in decoding if job.phase is Phase.DECODING]

    def ending_ids(self) -> list[str]:
        """Requests whose answer is complete: they end with one of the next steps."""
        decoding = self._schedule.decoding
        return [job.request_id for job in decoding if job.phase is Phase.ENDING]

    def waiting_line(self) -> list[tuple[str, bool]]:
        """Requests that wait for their turn or for room, in order, and whether each was preempted:
        it had both before."""
        return [(job.request_id, job.costs.preemptions > 0) for job in self._admission.line()]

    def report(self, request_id: str) -> RequestReport:
        """What a request that has not ended has cost so far."""
        return self._schedule.jobs[request_id].report(self._clock())

    @property
    def status(self) -> EngineStatus:
        """May be read from any thread; the numbers are then of nearly one moment."""
        return EngineStatus(
            counts=self._counts,
            waiting=self._admission.waiting,
            entering=self._admission.entering,
            prefilling=len(self._schedule.ready),
            decoding=len(self._schedule.decoding),
            held=len(self._memory.held),
            free_blocks=self.runner.pool.free_blocks,
            pool_blocks=self.runner.pool.capacity_blocks,
            free_states=self.runner.free_states,
            saves=self._saves.summary(),
            dropped_windows=self._keeper.dropped_windows
            + (0 if self._sink is None else self._sink.dropped_windows),
        )

    def flush(self, deadline_s: float) -> bool:
        """Wait for saves; False if some were still under way after `deadline_s`."""
        return self._sink is None or self._sink.flush(deadline_s)

    def close(self) -> bool:
        """End everything that runs, without events, and close source and sink.

        False if something could not be saved within `close_deadline_s`, or hung. May be called
        again.
        """
        if not self._is_closed:
            self._is_closed = True
            for job in list(self._schedule.jobs.values()):
                self._schedule.end(job, "aborted")
            for sequence in list(self._memory.held):
                self.release(sequence)
            self._schedule.events.clear()
        deadline_s = self._config.close_deadline_s
        has_ended = self._source is None or self._source.close(deadline_s)
        has_saved = self._sink is None or self._sink.close(deadline_s)
        return has_ended and has_saved

    # Hand-over ------------------------------------------------------------------------------------

    @property
    def on_last_chunk(self) -> Callable[[Sequence], None]:
        """Called before the last pass over the prompt of a request that `ends_after_prefill`,
        unless a part of its blocks is still arriving. May be set."""
        return self._passes.on_last_chunk

    @on_last_chunk.setter
    def on_last_chunk(self, callback: Callable[[Sequence], None]) -> None:
        self._passes.on_last_chunk = callback

    def detach(self, request_id: str) -> Sequence:
        """Take a sequence that decodes, or that ended after prefill, out of the engine, with its
        blocks and state; no event of it comes any more. `release` gives them back.

        The id must be one of `decoding_ids`, or of an event that `is_prefilled`.
        """
        job = self._schedule.jobs[request_id]
        assert job.phase in (Phase.DECODING, Phase.PREFILLED), f"{request_id} is {job.phase}"
        if job.phase is Phase.DECODING:
            self._schedule.hold(job)
        del self._schedule.jobs[request_id]
        self._counts.detached += 1
        return job.sequence

    def release(self, sequence: Sequence) -> None:
        """Give back what a sequence has that was detached, or opened and not attached."""
        assert sequence in self._memory.held, "the sequence is not held"
        self._memory.give_back(sequence)

    def open_for_handover(self, asked: Request | PreparedRequest) -> Sequence | None:
        """Blocks and state for a sequence that comes from another engine: its tokens are prompt and
        `answered_ids`. None if there is no room for it now, or somebody waits in line for room.

        It is held until it is attached or released. Raises InvalidRequest as `add_request` does.
        """
        self._check_open("open_for_handover")
        request, _ = self._check(asked)
        assert not is_whole(request, self.runner.context_tokens), "nothing is to be decoded"
        if self._admission.is_short:
            return None
        tokens_max = tokens_max_of(request, self.runner.context_tokens)
        sequence = Sequence(request)
        blocks = blocks_needed(len(sequence.token_ids), tokens_max)
        has_blocks = may_begin(
            free_blocks=self.runner.pool.free_blocks,
            needed_blocks=blocks,
            growing_sequences=self._memory.growing_sequences,
        )
        if not (has_blocks and self._memory.has_state):
            return None
        self._memory.open(sequence, [], blocks)
        self._memory.held.add(sequence)
        return sequence

    def attach(self, sequence: Sequence, chain: KeyChain | None = None) -> None:
        """Let a sequence that was opened for a hand-over decode: all its tokens but the last are
        computed by now. The engine that it comes from has saved what was complete. `chain`: as it
        was prepared, if it was."""
        assert sequence.computed_tokens == len(sequence.token_ids) - 1, sequence.computed_tokens
        check_id(sequence.request, self._schedule.jobs)
        self._memory.held.remove(sequence)
        job = self._job_of(sequence.request, sequence, chain)
        is_dense = self.runner.window_layout is None
        job.attach_here(is_cold=is_dense or sequence.hit == MISS)
        self._schedule.add(job)
        self._counts.attached += 1

    # One step -------------------------------------------------------------------------------------

    def _step(self, wait_s: float) -> None:
        if not self._work() and not self._schedule.events and wait_s > 0:
            self._changed.wait(wait_s)
            # Only here: a call of `wake` before the wait has ended it at once, and none is lost.
            self._changed.clear()
            self._work()

    def _work(self) -> bool:
        """Whether anything was computed."""
        schedule, config = self._schedule, self._config
        for job in self._admission.advance():
            schedule.make_ready(job)
        answers = schedule.give_blocks()
        schedule.end_overdue()
        arriving = self._admission.arriving()
        plan = plan_step(
            [job.sequence.computed_tokens for job in answers],
            map(_prefill_of, schedule.ready),
            None if arriving is None else _prefill_of(arriving),
            cost=config.cost,
            budget_s=config.step_budget_s,
        )
        if not plan.passes and not plan.alone_ends:
            return False
        self._counts.steps += 1
        start_s = self._clock()
        self._passes.run(plan, answers, arriving)
        self.times.step.add(self._clock() - start_s)
        return True

    def _check(self, asked: Request | PreparedRequest) -> tuple[Request, KeyChain | None]:
        """The request, and its keys if they are known. Raises InvalidRequest."""
        chain: KeyChain | None = None
        if isinstance(asked, PreparedRequest):
            chain = asked.chain
            asked = asked.request
        else:
            check_request(asked, self.runner)
        check_id(asked, self._schedule.jobs)
        return asked, chain

    def _job_of(self, request: Request, sequence: Sequence, chain: KeyChain | None) -> Job:
        return Job(
            request=request,
            sequence=sequence,
            order=next(self._orders),
            tokens_max=tokens_max_of(request, self.runner.context_tokens),
            chain=KeyChain(self.runner.namespace) if chain is None else chain,
            costs=Costs(arrived_s=self._clock()),
            counts=self._counts,
            receipt=SaveReceipt(self._saves),
            replay_first=request.replay_first,
        )

    def _take_events(self, request_id: str) -> list[TokenEvent]:
        events = self._schedule.events
        self._schedule.events = [e for e in events if e.request_id != request_id]
        return [e for e in events if e.request_id == request_id]

    def _check_open(self, operation: str) -> None:
        if self._is_closed:
            raise EngineClosed(operation)


def _prefill_of(job: Job) -> Prefill:
    sequence = job.sequence
    return Prefill(sequence.computed_tokens, len(sequence.token_ids), job.borders)
