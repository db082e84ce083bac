"""A sequence writes to blocks of its own only, also when less of its prefix comes than it had
counted on."""

from engine.job import Phase
from engine.prefix_source import PrefixLoad
from engine.request import Request
from tests.engine.llm_engine.after_replays import PROMPT, what_a_replay_left
from tests.engine.llm_engine.driven import DrivenLoad, Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    answer_alone,
    bench,
    request_of,
    summing,
)

LONG = request_of("long", PROMPT, 40)


def begin_beside(one: EngineBench, request: Request) -> DrivenLoad:
    """A request that shares all blocks of its hit with `LONG`, and whose window is on its way."""
    one.add(LONG)
    one.step_until(lambda: len(one.tokens("long")) == 2)
    one.source.is_held = True
    one.add(request)
    one.step()
    load = one.source.loads[-1]
    load.answer()
    one.step()
    assert load.is_begun
    assert load.references == []
    assert one.engine._schedule.jobs[request.request_id].shared_blocks == 4
    return load


def answer_beside_nobody(kept: Kept) -> list[int]:
    with bench(summing, kept=kept) as one:
        one.add(LONG)
        one.finish()
        assert one.report("long").hit_tokens == 512
        return one.tokens("long")


def test_answer_whose_window_is_lost_writes_to_no_block_that_it_shared() -> None:
    kept = what_a_replay_left()
    expected = answer_beside_nobody(kept)
    tokens = answer_alone(summing, LONG)
    again = request_of("again", PROMPT, 40, answered_ids=tuple(tokens[:3]))
    with bench(summing, kept=kept) as one:
        load = begin_beside(one, again)
        load.end(with_window=False)
        one.source.is_held = False
        one.finish()
        assert one.engine.status.counts.short_loads == 1
        assert one.tokens("long") == expected
        assert one.tokens("again") == tokens


def test_answer_whose_window_is_lost_waits_for_blocks_of_its_own() -> None:
    kept = what_a_replay_left()
    again = request_of("again", PROMPT, 40, answered_ids=tuple(answer_alone(summing, LONG)[:3]))
    with bench(summing, kept=kept, pool_blocks=11) as one:
        load = begin_beside(one, again)
        load.end(with_window=False)
        one.step(2)
        job = one.engine._schedule.jobs["again"]
        # Five are left to it, and it needs six of its own.
        assert (job.phase, job.sequence.block_ids) == (Phase.MATCHED, [])
        loads: list[PrefixLoad] = [*one.source.loads]
        one.finish()
        assert one.tokens("again") == answer_alone(summing, LONG)
        # A store that did not keep its word is not asked again.
        assert one.source.loads == loads


def test_new_request_with_a_nearer_window_here_writes_to_no_block_that_it_shared() -> None:
    """Its own window at 384 is as good as a replay from there, and leaves the block behind it."""
    kept = what_a_replay_left()
    expected = answer_beside_nobody(kept)
    with bench(summing, kept=kept) as one:
        one.source.is_held = True
        one.add(request_of("turn", PROMPT[:500], 1))
        one.step()
        one.source.loads[-1].answer(is_lost=True)
        one.finish()
        one.source.is_held = False
        load = begin_beside(one, request_of("again", PROMPT, 4))
        load.end(with_window=False)
        one.source.is_held = False
        one.finish()
        assert one.report("again").hit_tokens == 384
        assert one.tokens("long") == expected
