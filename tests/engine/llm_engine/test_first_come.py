"""One that was preempted is next: nobody who waits is before it. And who comes from another engine
passes nobody who waits for blocks."""

from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    answer_alone,
    bench,
    dense_summing,
    llama,
    prompt_of,
    request_of,
)
from tests.engine.llm_engine.moving import copy_into


def test_preempted_request_is_begun_anew_before_those_that_waited() -> None:
    victim = request_of("victim", prompt_of(126, 2), 30)
    with bench(pool_blocks=4, has_source=False, loads_max=1) as one:
        one.add(request_of("long", prompt_of(252, 1), 30))
        one.step_until(lambda: "long" in one.order)
        one.add(victim)
        one.step_until(lambda: "victim" in one.order)
        for number in range(2):
            one.add(request_of(f"waits {number}", prompt_of(300, number), 2))
        one.step_until(lambda: one.answers["victim"].finish_reason is not None)
        assert one.report("victim").preemptions == 1
        assert one.order == ["long", "victim"]
        assert one.tokens("victim") == answer_alone(llama, victim)
        one.finish()
        assert one.order == ["long", "victim", "waits 0", "waits 1"]


def test_sequence_from_elsewhere_does_not_pass_one_that_waits_for_blocks() -> None:
    arriving = request_of("a", prompt_of(20, 5), 9, answered_ids=(5,))
    with bench(pool_blocks=6, has_source=False) as one:
        one.add(request_of("long", prompt_of(252, 1), 30))
        one.step_until(lambda: "long" in one.order)
        opened = one.engine.open_for_handover(arriving)
        assert opened is not None, "there is room, and nobody waits for it"
        one.engine.release(opened)
        one.add(request_of("waits", prompt_of(508, 2), 2))
        one.step()
        assert one.engine.status.entering == 1
        assert one.engine.open_for_handover(arriving) is None
        one.finish()
        assert one.order == ["long", "waits"]
        opened = one.engine.open_for_handover(arriving)
        assert opened is not None
        one.engine.release(opened)


def test_sequence_from_elsewhere_does_not_pass_one_that_was_preempted() -> None:
    """Its blocks have just become free, and it has not been looked up anew yet."""
    arriving = request_of("a", prompt_of(20, 5), 9, answered_ids=(5,))
    with bench(pool_blocks=6, has_source=False) as one:
        one.add(request_of("long", prompt_of(380, 1), 30))
        one.step_until(lambda: "long" in one.order)
        one.add(request_of("victim", prompt_of(254, 2), 30))
        one.step_until(lambda: one.engine.status.counts.preemptions == 1)
        assert one.engine.status.waiting == 1
        assert one.runner.pool.free_blocks == 2
        assert one.engine.open_for_handover(arriving) is None
        one.finish()


def test_preempted_sequence_from_elsewhere_is_next_and_has_a_place_of_its_own() -> None:
    """It once got the place in line of another request: of equals none is the latest then."""
    elsewhere = request_of("elsewhere", prompt_of(126, 2), 30)
    with bench(pool_blocks=8) as source, bench(pool_blocks=4, has_source=False, loads_max=1) as one:
        source.add(elsewhere)
        source.step_until(lambda: "elsewhere" in source.order)
        one.add(request_of("long", prompt_of(252, 1), 30))
        one.step_until(lambda: "long" in one.order)
        sequence = source.engine.detach("elsewhere")
        opened = copy_into(source, sequence, one)
        source.engine.release(sequence)
        for number in range(3):
            one.add(request_of(f"waits {number}", prompt_of(300, number), 2))
        assert opened is not None
        one.engine.attach(opened)
        one.expect(opened.request)
        one.step_until(lambda: one.engine.status.counts.preemptions == 1)
        orders = [job.order for job in one.engine._schedule.jobs.values()]
        assert len(set(orders)) == len(orders) == 5
        one.finish()
        assert one.order == ["long", "elsewhere", "waits 0", "waits 1", "waits 2"]
        assert one.tokens("elsewhere") == answer_alone(llama, elsewhere)


def test_request_is_tried_again_when_more_of_its_prefix_can_be_shared() -> None:
    """It needs less room then, though nobody has given any back; once it waited for that."""
    prompt = prompt_of(3 * 128 + 5, 1)
    with bench(pool_blocks=7, has_source=False, step_budget_s=0.128) as one:
        one.add(request_of("first", prompt, 60))
        one.step()
        one.add(request_of("second", prompt, 60))
        one.step()
        assert one.engine.status.entering == 1, "it lacks blocks"
        one.step_until(lambda: "second" in one.order)
        assert one.answers["first"].finish_reason is None
        one.finish()
        assert one.report("second").shared_tokens == 2 * 128


def test_time_without_blocks_is_counted_anew_after_a_preemption() -> None:
    with bench() as one:
        one.add(request_of("r", prompt_of(20), 9))
        one.step()
        (job,) = one.engine._schedule.jobs.values()
        job.short_since_s = one.clock()
        one.clock.now_s += 10.0
        assert job.short_for_s(one.clock()) == 10.0
        one.engine._schedule._preempt(job)
        assert job.short_for_s(one.clock()) == 0.0
        one.finish()


def test_request_whose_prefix_came_late_is_computed_before_those_that_passed_it() -> None:
    kept, first = Kept(), request_of("first", prompt_of(300, 1), 1)
    with bench(dense_summing, kept=kept) as other:
        other.add(first)
        other.finish()
    with bench(dense_summing, kept=kept, step_budget_s=0.0) as one:
        one.source.is_held = True
        one.add(first)
        one.step()
        load = one.source.loads[0]
        load.answer()
        one.step()
        one.source.is_held = False
        # A block a step: this one takes five.
        one.add(request_of("second", prompt_of(600, 2), 1))
        one.step(2)
        assert one.engine.status.prefilling == 1
        load.end_short(0)
        one.finish()
        assert one.order == ["first", "second"]
