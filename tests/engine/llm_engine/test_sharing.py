"""Requests that begin alike share blocks of the pool, and answer as if they were alone."""

import pytest

from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    MakeRunner,
    answer_alone,
    bench,
    llama,
    nano,
    prompt_of,
    references_of,
    request_of,
)


def test_second_request_uses_the_blocks_of_the_first() -> None:
    prompt = prompt_of(300)
    first, second = request_of("first", prompt, 9), request_of("second", prompt, 3)
    with bench(has_source=False) as one:
        one.add(first)
        one.step(2)
        one.add(second)
        one.step()
        counts = references_of(one.runner.pool)
        # Two blocks have two users, the two open ones have one each.
        assert sorted(counts.values()) == [1, 1, 2, 2]
        one.finish()
        report = one.report("second")
        assert (report.hit_tokens, report.shared_tokens, report.matched_tokens) == (256, 256, 0)
        for request in (first, second):
            assert one.tokens(request.request_id) == answer_alone(llama, request)
        # The second computed the rest only: 300 - 256 tokens.
        assert one.engine.status.counts.prefill_tokens == 300 + 44


def test_blocks_are_shared_after_their_request_has_ended_until_they_are_used_anew() -> None:
    prompt = prompt_of(300)
    with bench(has_source=False, pool_blocks=4) as one:
        for name in ("first", "again"):
            one.add(request_of(name, prompt, 1))
            one.finish()
        assert one.report("again").shared_tokens == 256
        one.add(request_of("other", prompt_of(400, 2), 1))
        one.finish()
        one.add(request_of("late", prompt, 1))
        one.finish()
        assert one.report("late").shared_tokens == 0
        assert one.tokens("late") == one.tokens("first")


def test_deepest_block_is_used_anew_first() -> None:
    """A block is of no use without those before it."""
    prompt = prompt_of(390)
    with bench(has_source=False, pool_blocks=5) as one:
        one.add(request_of("first", prompt, 1))
        one.finish()
        one.add(request_of("other", prompt_of(300, 2), 1))
        one.finish()
        one.add(request_of("late", prompt, 1))
        one.finish()
        assert one.report("late").shared_tokens == 256


def test_what_the_pool_lacks_comes_from_the_store_and_the_rest_does_not() -> None:
    prompt = prompt_of(530)
    kept = Kept()
    with bench(kept=kept) as other:
        other.add(request_of("r", prompt, 1))
        other.finish()
    with bench(kept=kept) as one:
        one.add(request_of("begun", prompt[:300], 1))
        one.finish()
        one.source.is_held = True
        one.add(request_of("r", prompt))
        one.step()
        load = one.source.loads[-1]
        load.answer()
        one.step()
        assert len(load.references) == 2
        load.bring()
        load.end()
        one.finish()
        report = one.report("r")
        assert (report.matched_tokens, report.hit_tokens, report.shared_tokens) == (512, 512, 256)
        assert one.tokens("r") == answer_alone(llama, request_of("r", prompt))


def test_store_is_not_asked_for_what_is_in_the_pool() -> None:
    with bench() as one:
        for name in ("first", "again"):
            one.add(request_of(name, prompt_of(300), 1))
            one.finish()
        assert len(one.source.loads) == 1


@pytest.mark.parametrize("has_source", [True, False])
def test_windows_make_a_shared_prefix_exact(has_source: bool) -> None:
    """The same prompt again begins where the first run left a window state for it."""
    prompt = prompt_of(400)
    request = request_of("again", prompt, 3)
    with bench(nano, has_source=has_source) as one:
        one.add(request_of("first", prompt, 2))
        one.finish()
        one.add(request)
        one.finish()
        report = one.report("again")
        assert (report.hit_tokens, report.replay_tokens, report.shared_tokens) == (256, 0, 256)
        assert one.tokens("again") == answer_alone(nano, request)


def test_shared_blocks_without_a_window_do_not_make_a_replay() -> None:
    """What a request answers must not hang on what else this engine has done."""
    prompt = prompt_of(530)
    longer = request_of("longer", [*prompt[:300], *prompt_of(150, 2)], 2)
    with bench(nano, has_source=False) as one:
        one.add(request_of("first", prompt, 1))
        one.finish()
        one.add(longer)
        one.finish()
        # Two blocks are there; the first run left windows at 384 and 512 only.
        assert one.report("longer").hit_tokens == 0
        assert one.tokens("longer") == answer_alone(nano, longer)


def test_what_a_replay_leads_to_is_not_shared() -> None:
    prompt = prompt_of(400)
    kept = Kept()
    make_runner: MakeRunner = nano
    with bench(make_runner, kept=kept) as other:
        other.add(request_of("r", prompt, 1))
        other.finish()
    kept.windows.clear()
    longer = [*prompt[:384], *prompt_of(140, 2)]
    with bench(make_runner, kept=kept) as one:
        one.add(request_of("replayed", longer, 1))
        one.finish()
        assert one.report("replayed").replay_tokens == 128
        one.source.is_held = True
        cold = request_of("cold", longer, 2)
        one.add(cold)
        one.step()
        one.source.loads[-1].answer(is_lost=True)
        one.finish()
        assert one.tokens("cold") == answer_alone(make_runner, cold)


def test_shared_blocks_that_only_a_save_keeps_are_counted_when_it_is_given_up_for_room() -> None:
    """They are free then, so the one that takes them finds less room than that made."""
    prompt = prompt_of(257)
    late = request_of("late", [*prompt[:256], *prompt_of(140, 2)], 2)
    with bench(pool_blocks=6, has_source=False) as one:
        one.sink.is_held = True
        one.add(request_of("saved", prompt, 1))
        one.finish()
        one.add(request_of("long", prompt_of(300, 1), 60))
        one.step_until(lambda: "long" in one.order)
        one.sink.jobs.rotate(1)
        one.sink.save_next()
        # Two blocks wait to be saved, three are of the answer that runs, one is free.
        one.add(late)
        one.step()
        one.clock.now_s += 1.5
        one.step()
        assert "late" in one.engine._schedule.jobs
        one.sink.is_held = False
        one.finish()
        assert one.report("late").shared_tokens == 256
        assert one.tokens("late") == answer_alone(llama, late)
