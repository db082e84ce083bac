"""Who gives way when the pool is short: also one that has blocks and no answer yet."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.job import Phase
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    answer_alone,
    bench,
    dense_summing,
    prompt_of,
    request_of,
)

LONG = request_of("long", prompt_of(126, 1), 200)
"""It is given a block when it has 2 tokens of its answer, and one more at 130."""
LATE = request_of("late", prompt_of(500, 2), 2)


@contextmanager
def long_answer_beside_a_load() -> Iterator[EngineBench]:
    """All blocks are theirs when the long answer has its second one."""
    kept = Kept()
    with bench(dense_summing, kept=kept) as other:
        other.add(LATE)
        other.finish()
    with bench(dense_summing, kept=kept, pool_blocks=6, step_budget_s=0.0) as one:
        one.add(LONG)
        one.step_until(lambda: "long" in one.order)
        one.source.is_held = True
        one.add(LATE)
        one.step()
        one.source.loads[-1].answer()
        one.step()
        assert one.engine._schedule.jobs["late"].phase is Phase.LOADING
        yield one
        one.source.is_held = False
        for load in one.source.loads:
            if load.found is None:
                load.answer()
        one.finish()
        assert (one.report("long").preemptions, one.report("late").preemptions) == (0, 1)
        for request in (LONG, LATE):
            assert one.tokens(request.request_id) == answer_alone(dense_summing, request)


def test_request_whose_prefix_is_arriving_gives_way_to_an_answer() -> None:
    with long_answer_beside_a_load() as one:
        one.step_until(lambda: one.answers["long"].finish_reason is not None, steps_max=200)
        assert one.engine._schedule.jobs["late"].costs.preemptions == 1


def test_request_whose_prompt_is_being_computed_gives_way_to_an_answer() -> None:
    with long_answer_beside_a_load() as one:
        one.step_until(lambda: len(one.tokens("long")) == 129)
        one.source.loads[-1].end_short(1)
        one.step()
        job = one.engine._schedule.jobs["late"]
        assert (job.phase, job.sequence.computed_tokens) == (Phase.PREFILL, 256)
        one.step()
        assert len(one.tokens("long")) == 131
        assert job.costs.preemptions == 1
