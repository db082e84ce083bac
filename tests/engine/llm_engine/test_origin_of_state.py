"""What a store gives and what an engine has may differ for one key: an engine knows which it took.

In the store is what a cold run of 400 tokens has left, and what a replay of a longer prompt has led
to. Answers that went on from other state than they began with are counted.
"""

from collections.abc import Callable

import pytest

from engine.job import Job
from engine.request import Request
from tests.engine.llm_engine.after_replays import (
    PROMPT,
    add_without_the_store,
    what_a_replay_left,
)
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    answer_alone,
    bench,
    prompt_of,
    request_of,
    summing,
)
from tests.engine.llm_engine.moving import move

OTHER = prompt_of(650, 9)
ANSWER = request_of("b", PROMPT, 60)


def blocks_of_a_replay() -> Kept:
    kept = what_a_replay_left()
    kept.windows.clear()
    return kept


def windows_of_a_cold_run() -> Kept:
    kept = Kept()
    with bench(summing, kept=kept) as one:
        one.add(request_of("turn", PROMPT[:520], 1))
        one.finish()
    return kept


def compute_cold(one: EngineBench, request_id: str, prompt: list[int]) -> None:
    add_without_the_store(one, request_of(request_id, prompt, 1))
    one.step_until(lambda: one.answers[request_id].finish_reason is not None)


def engine_of(kept: Kept) -> EngineBench:
    """It has blocks of a cold run of `PROMPT`, and no window state behind them any more."""
    one = EngineBench(summing, kept=kept, pool_blocks=14, window_snapshots_max=2)
    compute_cold(one, "a", PROMPT)
    compute_cold(one, "d", OTHER)
    return one


def answer_begun(one: EngineBench, request: Request = ANSWER) -> Job:
    one.source.is_held = False
    one.add(request)
    one.step_until(lambda: len(one.answers[request.request_id].token_ids) >= 5)
    return one.engine._schedule.jobs[request.request_id]


def preempt(one: EngineBench, job: Job) -> None:
    """Others need its blocks, all of which are handed out anew before it is back."""
    one.engine._schedule._preempt(job)
    pool = one.runner.pool
    pool.release(pool.allocate(pool.free_blocks))


def test_window_of_a_store_is_no_cold_one_because_one_was_made_meanwhile() -> None:
    one = EngineBench(summing, kept=what_a_replay_left(), pool_blocks=32, window_snapshots_max=2)
    compute_cold(one, "a", PROMPT)
    compute_cold(one, "d", OTHER)
    one.add(ANSWER)
    one.step()
    load = one.source.loads[-1]
    load.answer()
    one.step()
    job = one.engine._schedule.jobs["b"]
    assert (job.shared_blocks, load.is_begun) == (4, True)
    compute_cold(one, "c", PROMPT)
    knowledge = one.engine._admission._prefixes
    assert knowledge._snapshots.is_cold(job.keys()[3])
    load.bring()
    load.end()
    one.source.is_held = False
    one.step_until(lambda: job.sequence.computed_tokens > 5 * 128)
    assert not job.is_cold
    one.finish()
    assert one.tokens("b") != answer_alone(summing, ANSWER), "the replay led to nothing else"


@pytest.mark.parametrize(
    "make_store", [what_a_replay_left, blocks_of_a_replay], ids=["exact", "replay"]
)
def test_answer_that_goes_on_from_other_blocks_of_the_same_prefix_is_counted(
    make_store: Callable[[], Kept],
) -> None:
    whole = engine_of(make_store())
    answer_begun(whole)
    whole.finish()
    one = engine_of(make_store())
    job = answer_begun(one)
    plan, shared_blocks = job.plan, job.shared_blocks
    preempt(one, job)
    one.finish()
    assert (job.plan, shared_blocks > 0, job.shared_blocks) == (plan, True, 0)
    assert one.tokens("b") != whole.tokens("b"), "the blocks are the same"
    assert one.engine.status.counts.changed_prefixes == 1


def test_answer_that_was_taken_over_and_goes_on_from_another_store_is_counted() -> None:
    first = EngineBench(summing, kept=windows_of_a_cold_run(), window_snapshots_max=1)
    compute_cold(first, "d", OTHER)
    job = answer_begun(first)
    assert job.plan.window_anchor == 512
    sequence = first.engine.detach("b")
    one = EngineBench(summing, kept=what_a_replay_left(), pool_blocks=14, window_snapshots_max=2)
    assert move(first, sequence, one)
    one.step(2)
    taken = one.engine._schedule.jobs["b"]
    preempt(one, taken)
    one.finish()
    assert taken.plan == job.plan
    assert one.engine.status.counts.changed_prefixes == 1


def test_answer_that_goes_on_from_a_window_stored_meanwhile_is_counted() -> None:
    kept = windows_of_a_cold_run()
    one = EngineBench(summing, kept=kept, pool_blocks=14, window_snapshots_max=1)
    compute_cold(one, "d", OTHER)
    job = answer_begun(one)
    kept.windows |= what_a_replay_left().windows
    compute_cold(one, "e", OTHER)
    preempt(one, job)
    one.source.is_held = False
    one.finish()
    assert job.plan.window_anchor == 512
    assert one.engine.status.counts.changed_prefixes == 1
