"""One that was preempted is next: nobody who waits is before it."""

from tests.engine.llm_engine.engine_bench import answer_alone, bench, llama, prompt_of, request_of


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
