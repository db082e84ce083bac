"""Whatever happens to an engine in whatever order: its books are right, and its answers too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import EngineBusy
from engine.sequence import Sequence
from tests.engine.llm_engine.driven import DrivenLoad, Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    MakeRunner,
    answer_alone,
    llama,
    nano,
    prompt_of,
    references_of,
    request_of,
)
from tests.engine.llm_engine.moving import move


@cache
def stored_blocks() -> dict[bytes, bytes]:
    """What a store has of the prompts of `EngineMachine` from earlier."""
    bench = EngineBench(llama)
    for number, (tokens, seed) in enumerate(EngineMachine.prompts):
        bench.add(request_of(f"r{number}", prompt_of(tokens, seed), 1))
    bench.finish()
    bench.engine.close()
    return bench.kept.blocks


class EngineMachine(RuleBasedStateMachine):
    """One engine with a small pool. `detached` are the sequences that have left its schedule."""

    make_runner: MakeRunner = staticmethod(llama)
    prompts: tuple[tuple[int, int], ...] = (
        (125, 1),
        (252, 0),
        (253, 2),
        (381, 0),
        (381, 3),
        (300, 4),
        (3, 5),
    )
    has_source = True
    state_slots = 5
    longest_answer = 150

    @initialize(
        pool_blocks=st.integers(5, 8),
        loads_max=st.integers(1, 3),
        step_budget_s=st.sampled_from([0.256, 0.0]),
    )
    def open_engine(self, pool_blocks: int, loads_max: int, step_budget_s: float) -> None:
        self.bench = EngineBench(
            self.make_runner,
            pool_blocks=pool_blocks,
            state_slots=self.state_slots,
            has_source=self.has_source,
            kept=Kept(dict(stored_blocks())) if self.has_source else None,
            loads_max=loads_max,
            step_budget_s=step_budget_s,
            sequences_max=5,
            queue_requests_max=4,
            window_snapshots_max=3,
        )
        self.detached: list[Sequence] = []
        self.number = 0

    # Requests -------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 6),
        max_tokens=st.sampled_from([1, 3, 9, 150]),
        ends_after_prefill=st.sampled_from([False, False, False, False, False, True]),
    )
    def add(self, which: int, max_tokens: int, ends_after_prefill: bool) -> None:
        tokens, seed = self.prompts[which % len(self.prompts)]
        self.number += 1
        request = request_of(
            f"r{self.number}",
            prompt_of(tokens, seed),
            min(max_tokens, self.longest_answer),
            ends_after_prefill=ends_after_prefill,
        )
        try:
            self.bench.add(request)
        except EngineBusy:
            assert self.bench.engine.status.waiting == 4

    @rule(times=st.sampled_from([1, 1, 2, 5, 40]))
    def step(self, times: int) -> None:
        self.bench.step(times)

    @precondition(lambda self: len(self.running()) > 3)
    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        name = self.running()[number % len(self.running())]
        self.bench.engine.abort(name)
        self.bench.step()
        assert self.bench.answers[name].finish_reason == "aborted"

    @precondition(lambda self: self.detachable())
    @rule(number=st.integers(0, 20))
    def detach(self, number: int) -> None:
        name = self.detachable()[number % len(self.detachable())]
        self.detached.append(self.bench.engine.detach(name))

    @precondition(lambda self: self.detached)
    @rule(goes_on=st.booleans())
    def release(self, goes_on: bool) -> None:
        """Give a sequence that left back, after a copy of it has come to the same engine."""
        sequence = self.detached.pop(0)
        if goes_on:
            move(self.bench, sequence, self.bench)
        self.bench.engine.release(sequence)

    # Source, sink and time ------------------------------------------------------------------------

    @rule(is_held=st.booleans())
    def hold_source(self, is_held: bool) -> None:
        self.bench.source.is_held = is_held

    @precondition(lambda self: any(load.found is None for load in self.loads()))
    @rule(is_lost=st.booleans())
    def answer_match(self, is_lost: bool) -> None:
        next(load for load in self.loads() if load.found is None).answer(is_lost=is_lost)

    @precondition(lambda self: any(load.is_begun for load in self.loads()))
    @rule(sections=st.integers(0, 2), comes=st.booleans(), number=st.integers(0, 3))
    def bring_sections(self, sections: int, comes: bool, number: int) -> None:
        begun = [load for load in self.loads() if load.is_begun]
        load = begun[number % len(begun)]
        load.comes_while_waited_for = comes
        if sections:
            load.bring(sections)

    @precondition(lambda self: any(load.is_begun for load in self.loads()))
    @rule(number=st.integers(0, 3), lost_blocks=st.integers(0, 2))
    def end_load(self, number: int, lost_blocks: int) -> None:
        begun = [load for load in self.loads() if load.is_begun]
        load = begun[number % len(begun)]
        if load.is_whole:
            # A pass may have gone on with what came.
            load.end()
        else:
            load.end_short(max(0, len(load.references) - lost_blocks))

    @rule(is_held=st.booleans())
    def hold_sink(self, is_held: bool) -> None:
        self.bench.sink.is_held = is_held

    @precondition(lambda self: self.bench.sink.jobs)
    @rule()
    def save(self) -> None:
        self.bench.sink.save_next()

    @rule(seconds=st.sampled_from([0.1, 1.5]))
    def pass_time(self, seconds: float) -> None:
        self.bench.clock.now_s += seconds

    # What must hold -------------------------------------------------------------------------------

    @invariant()
    def references_add_up(self) -> None:
        holders = Counter(self.bench.source.references) + Counter(self.bench.sink.references)
        schedule = self.bench.engine._schedule
        open_sequences = {job.sequence for job in schedule.jobs.values()} | self.held
        for sequence in open_sequences:
            holders.update(sequence.block_ids)
        pool = self.bench.runner.pool
        assert references_of(pool) == dict(holders)
        assert pool.free_blocks + len(holders) == pool.capacity_blocks

    @invariant()
    def states_add_up(self) -> None:
        runner = self.bench.runner
        if runner.window_layout is not None:
            used = self.bench.engine._memory.open_sequences
            assert runner.free_states + used == self.state_slots

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        schedule = self.bench.engine._schedule
        status = self.bench.engine.status
        in_places = status.waiting + status.entering + status.prefilling + status.decoding
        assert in_places + len(self.parked()) == len(schedule.jobs)
        assert set(self.detached) <= self.held

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.source.is_held = bench.sink.is_held = False
        for load in self.loads():
            if load.found is None:
                load.answer()
            elif load.is_begun:
                load.bring()
                load.end()
        bench.sink.flush(1.0)
        for sequence in self.detached:
            bench.engine.release(sequence)
        bench.step_until(self.is_over)
        for name, answer in bench.answers.items():
            self.check_answer(name, answer.token_ids)
        assert bench.engine.close()
        bench.assert_all_is_free()

    def check_answer(self, name: str, token_ids: list[int]) -> None:
        """Equal to that of a request alone, as far as it came."""
        request = self.bench.requests[name]
        alone = answer_alone(self.make_runner, replace(request, max_tokens=self.longest_answer))
        assert token_ids == alone[: len(token_ids)]
        if self.bench.answers[name].finish_reason == "length":
            assert len(token_ids) == request.max_tokens

    # What there is --------------------------------------------------------------------------------

    def loads(self) -> list[DrivenLoad]:
        return [load for load in self.bench.source.loads if load.outcome is None]

    def is_over(self) -> bool:
        """Whether all requests have ended; those that wait to be detached end here."""
        for name in self.parked():
            self.bench.engine.abort(name)
        return not self.bench.engine.has_requests

    def running(self) -> list[str]:
        return list(self.bench.engine._schedule.jobs)

    def detachable(self) -> list[str]:
        return [*self.bench.engine.decoding_ids(), *self.parked()]

    def parked(self) -> list[str]:
        """Those that ended after prefill and wait to be detached."""
        jobs = self.bench.engine._schedule.jobs
        return [name for name, job in jobs.items() if job.sequence in self.held]

    @property
    def held(self) -> set[Sequence]:
        return self.bench.engine._memory.held


class NanoMachine(EngineMachine):
    """With window state, and no store: so every answer has the bits of a cold run."""

    make_runner = staticmethod(nano)
    prompts = ((126, 0), (270, 1), (300, 1), (253, 2))
    has_source = False
    longest_answer = 9


@pytest.mark.slow
def test_books_and_answers_are_right_after_any_operations() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(max_examples=60, stateful_step_count=40, **QUIET),  # type: ignore[arg-type]
    )


@pytest.mark.slow
def test_books_and_answers_are_right_after_any_operations_with_window_state() -> None:
    run_state_machine_as_test(
        NanoMachine,
        settings=settings(max_examples=4, stateful_step_count=20, **QUIET),  # type: ignore[arg-type]
    )


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
