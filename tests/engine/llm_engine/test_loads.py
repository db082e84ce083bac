"""Prefixes arrive behind the engine's back: nobody waits for another's, and what comes is used."""

import pytest

from kvstore.layout import BLOCK_TOKENS
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    MakeRunner,
    answer_alone,
    bench,
    dense_summing,
    llama,
    nano,
    prompt_of,
    request_of,
    summing,
)

FAMILIES = [llama, nano]


def stored(make_runner: MakeRunner, *prompts: list[int]) -> Kept:
    """What is in a store after other engines have answered the prompts."""
    kept = Kept()
    for prompt in prompts:
        with bench(make_runner, kept=kept) as other:
            other.add(request_of("r", prompt, 1))
            other.finish()
    return kept


def test_slow_load_does_not_hold_back_the_requests_behind_it() -> None:
    slow = prompt_of(300, 1)
    with bench(kept=stored(llama, slow)) as one:
        one.source.is_held = True
        one.add(request_of("slow", slow))
        for number in range(3):
            one.add(request_of(f"r{number}", prompt_of(50, number)))
        one.step_until(lambda: all(len(one.tokens(f"r{n}")) == 4 for n in range(3)))
        assert one.order == ["r0", "r1", "r2"]
        (load,) = one.source.loads
        load.answer()
        one.step(2)
        assert load.is_begun
        load.bring()
        load.end()
        one.finish()
        assert one.report("slow").hit_tokens == 256
        assert one.tokens("slow") == answer_alone(llama, request_of("slow", slow))


def test_first_in_line_passes_nobody_and_is_passed_only_while_it_is_matched() -> None:
    """Those behind come first as long as its match is out, and not a moment longer."""
    with bench(pool_blocks=5) as one:
        one.source.is_held = True
        one.add(request_of("first", prompt_of(500, 1), 8))
        one.add(request_of("short", prompt_of(100, 2), 40))
        one.step()
        assert one.order == ["short"]
        (load,) = one.source.loads
        load.answer()
        one.add(request_of("late", prompt_of(101, 3), 2))
        one.step(3)
        # `first` has its match and lacks a block: `late`, for which there is room, waits behind it.
        assert one.order == ["short"]
        assert one.engine.status.entering == 2
        one.finish()
        assert one.order == ["short", "first", "late"]


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_pass_runs_while_the_prefix_arrives(make_runner: MakeRunner) -> None:
    prompt = prompt_of(400)
    kept = stored(make_runner, prompt[:270], prompt)
    with bench(make_runner, kept=kept) as one:
        one.source.is_held = True
        request = request_of("r", prompt)
        one.add(request)
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        load.comes_while_waited_for = True
        assert one.engine.status.counts.steps == 0
        load.bring(1)
        one.step_until(lambda: "r" in one.order)
        assert load.outcome is None
        load.end()
        one.finish()
        assert one.report("r").hit_tokens == (384 if make_runner is llama else 256)
        assert one.engine.status.counts.short_loads == 0
        assert one.tokens("r") == answer_alone(make_runner, request)


def test_pass_over_an_arriving_prefix_yields_to_prompts_that_are_there() -> None:
    """Its copying is hidden behind their passes then."""
    prompt = prompt_of(300)
    with bench(kept=stored(llama, prompt), step_budget_s=0.1) as one:
        one.source.is_held = True
        one.add(request_of("arriving", prompt))
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        load.comes_while_waited_for = True
        load.bring(1)
        # Its own match is out: it comes in by a source that answers nothing of it.
        one.add(request_of("there", prompt_of(120, 5)))
        one.step()
        assert one.order == ["there"]
        one.step()
        assert one.order == ["there", "arriving"]
        load.end()
        one.finish()


@pytest.mark.parametrize("make_runner", FAMILIES)
@pytest.mark.parametrize("blocks", [0, 1])
def test_prefix_that_falls_short_in_a_pass_is_planned_anew(
    make_runner: MakeRunner, blocks: int
) -> None:
    prompt = prompt_of(400)
    request = request_of("r", prompt)
    with bench(make_runner, kept=stored(make_runner, prompt[:270], prompt)) as one:
        one.source.is_held = True
        one.add(request)
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        load.bring(1)
        one.step(3)
        assert one.order == []
        # It was tried once; then it waits for the end.
        assert one.engine.status.counts.steps == 1
        assert one.engine.status.entering == 1
        load.bring()
        load.end(blocks)
        one.finish()
        assert one.engine.status.counts.short_loads == 1
        # One block is too few for v41: there is no window state, and none to replay from.
        assert one.report("r").hit_tokens == (blocks * BLOCK_TOKENS if make_runner is llama else 0)
        assert one.tokens("r") == answer_alone(make_runner, request)


@pytest.mark.parametrize("make_runner", FAMILIES)
@pytest.mark.parametrize("blocks", [0, 3])
def test_pass_over_a_prefix_that_is_not_confirmed_counts_for_nothing(
    make_runner: MakeRunner, blocks: int
) -> None:
    """All of its sections came, and then nobody knew whose bytes they were."""
    prompt = prompt_of(400)
    request = request_of("r", prompt)
    with bench(make_runner, kept=stored(make_runner, prompt[:270], prompt)) as one:
        one.source.is_held = True
        one.add(request)
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        load.comes_while_waited_for = load.is_lost_in_the_pass = True
        load.bring(1)
        one.step(3)
        assert one.order == []
        assert load.confirmations == 1
        load.end(blocks)
        one.finish()
        assert one.tokens("r") == answer_alone(make_runner, request)


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_prefix_that_falls_short_before_its_first_pass_is_planned_anew(
    make_runner: MakeRunner,
) -> None:
    """It could have begun while it arrived, but others took the steps until its load failed."""
    prompt = prompt_of(400)
    request = request_of("r", prompt)
    kept = stored(make_runner, prompt[:270], prompt)
    with bench(make_runner, kept=kept, step_budget_s=0.0) as one:
        one.source.is_held = True
        one.add(request)
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        one.add(request_of("there", prompt_of(300, 5), 1))
        one.step()
        one.source.loads[1].answer()
        load.bring(1)
        one.step()
        assert load.is_startable
        assert one.order == []
        load.end(0)
        one.finish()
        assert one.engine.status.counts.short_loads == 1
        assert one.report("r").hit_tokens == 0
        assert one.tokens("r") == answer_alone(make_runner, request)


def test_window_that_does_not_come_makes_the_hit_a_replay() -> None:
    prompt = prompt_of(400)
    with bench(nano, kept=stored(nano, prompt[:380], prompt)) as one:
        one.source.is_held = True
        one.add(request_of("r", prompt))
        one.step()
        (load,) = one.source.loads
        load.answer()
        assert load.found is not None
        assert load.found.plan.window_anchor == 256
        one.step()
        load.bring()
        load.end(with_window=False)
        one.finish()
        report = one.report("r")
        assert (report.hit_tokens, report.replay_tokens) == (128, 128)


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_lost_store_costs_a_request_its_hit_only(make_runner: MakeRunner) -> None:
    request = request_of("r", prompt_of(300))
    with bench(make_runner, kept=stored(make_runner, prompt_of(300))) as one:
        one.source.is_held = True
        one.add(request)
        one.step()
        one.source.loads[0].answer(is_lost=True)
        one.finish()
        assert one.report("r").hit_tokens == one.report("r").matched_tokens == 0
        assert one.tokens("r") == answer_alone(make_runner, request)


@pytest.mark.parametrize("make_runner", [dense_summing, summing])
def test_requests_that_need_no_store_pass_all_that_wait_for_it(make_runner: MakeRunner) -> None:
    """A store that answers nothing has a full line, and more that wait to stand in it."""
    here = prompt_of(300, 9)
    with bench(make_runner, loads_max=2) as one:
        one.add(request_of("before", here, 1))
        one.finish()
        one.source.is_held = True
        for number in range(5):
            one.add(request_of(f"slow {number}", prompt_of(300, number), 1))
        for number in range(3):
            one.add(request_of(f"short {number}", prompt_of(50, number), 2))
        one.add(request_of("here", here, 2))
        one.add(request_of("last", prompt_of(60), 2))
        passing = ["short 0", "short 1", "short 2", "here", "last"]
        one.step_until(lambda: all(one.answers[name].finish_reason for name in passing))
        assert one.order == ["before", *passing]
        assert (one.engine.status.entering, one.engine.status.waiting) == (2, 3)
        one.source.is_held = False
        for load in one.source.loads[1:]:
            load.answer()
        one.finish()
        assert one.order[6:] == [f"slow {number}" for number in range(5)]


def test_request_that_needs_no_store_is_not_passed_by_those_behind_it() -> None:
    """It waits for blocks, and nobody passes one that does."""
    with bench(pool_blocks=4, loads_max=1) as one:
        one.source.is_held = True
        one.add(request_of("long", prompt_of(120, 1), 200))
        one.step()
        one.add(request_of("asks", prompt_of(300, 2), 1))
        one.add(request_of("waits", prompt_of(126, 3), 200))
        one.add(request_of("waits too", prompt_of(126, 4), 1))
        one.add(request_of("later", prompt_of(10, 5), 1))
        one.step_until(lambda: len(one.engine._schedule.jobs) == 1)
        assert one.order == ["long", "waits", "waits too", "later"]
        one.source.loads[-1].answer()
        one.source.is_held = False
        one.finish()


def test_store_is_asked_after_all_when_the_pool_loses_the_prefix_of_one_that_waits() -> None:
    """All of it was here when it came to its turn; then one before it was given the blocks."""
    prompt = prompt_of(300)
    with bench(dense_summing, pool_blocks=6) as one:
        one.add(request_of("first", prompt, 1))
        one.finish()
        one.add(request_of("large", prompt_of(700, 2), 1))
        one.add(request_of("again", prompt, 1))
        one.finish()
        report = one.report("again")
        assert (report.matched_tokens, report.hit_tokens, report.shared_tokens) == (256, 256, 0)


def test_loads_under_way_are_bounded_and_begun_in_order() -> None:
    prompts = {f"r{n}": prompt_of(130 + n, n) for n in range(5)}
    with bench(loads_max=2) as one:
        one.source.is_held = True
        for name, prompt in prompts.items():
            one.add(request_of(name, prompt, 1))
        seen = []
        while one.engine.has_requests:
            one.step()
            waiting = [load for load in one.source.loads if load.found is None]
            assert len(waiting) <= 2
            if waiting:
                seen.append(len(one.source.loads))
                waiting[0].answer()
        assert seen == [2, 3, 4, 5, 5]
        assert one.order == list(prompts)


def test_blocks_of_an_aborted_load_are_not_used_while_they_are_written() -> None:
    prompt = prompt_of(300)
    with bench(kept=stored(llama, prompt), pool_blocks=3) as one:
        one.source.is_held = True
        one.add(request_of("gone", prompt))
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        # As a source does that still writes: references of its own.
        written = list(load.references)
        one.runner.pool.retain(written)
        one.engine.abort("gone")
        one.add(request_of("next", prompt_of(100, 2), 1))
        one.finish()
        assert one.answers["gone"].finish_reason == "aborted"
        assert one.tokens("next") == answer_alone(llama, request_of("next", prompt_of(100, 2), 1))
        one.runner.pool.release(written)


def test_load_is_given_up_when_its_request_is_prefilled_before_it_has_ended() -> None:
    """All of it was there for the pass, and nobody looks at it any more."""
    prompt = prompt_of(300)
    with bench(dense_summing, kept=stored(dense_summing, prompt)) as one:
        one.source.is_held = True
        one.add(request_of("r", prompt, 9, ends_after_prefill=True))
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        load.bring()
        one.step_until(lambda: one.answers["r"].is_prefilled, steps_max=3)
        assert load.is_given_up
        one.engine.release(one.engine.detach("r"))


@pytest.mark.parametrize("is_shared", [False, True])
def test_blocks_that_were_there_are_not_saved_again(is_shared: bool) -> None:
    prompt = prompt_of(300)
    kept = None if is_shared else stored(dense_summing, prompt)
    with bench(dense_summing, kept=kept) as one:
        if is_shared:
            one.add(request_of("before", prompt, 1))
            one.finish()
        one.add(request_of("r", prompt, 100))
        one.finish()
        assert one.report("r").hit_tokens == 256
        assert one.report("r").receipt.summary().stored == 1
