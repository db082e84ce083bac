"""What an engine counts, by steps and by requests, for its status and its metrics."""

import pytest

from engine.save_receipt import SaveSummary
from kvstore.layout import BLOCK_TOKENS
from tests.engine.llm_engine.engine_bench import bench, llama, prompt_of, request_of
from tests.engine.llm_engine.test_loads import stored


def test_saves_of_all_requests_are_added_up() -> None:
    with bench(pool_blocks=3) as one:
        one.sink.is_held = True
        one.add(request_of("first", prompt_of(300, 1), 1))
        one.finish()
        assert one.engine.status.saves == SaveSummary(pending=2)
        one.add(request_of("next", prompt_of(300, 2), 1))
        one.step(3)
        one.clock.now_s += 1.5
        one.finish()
        one.sink.flush(1.0)
        assert one.engine.status.saves == SaveSummary(stored=2, dropped=2)


def test_steps_and_first_tokens_are_timed_and_tokens_are_not() -> None:
    with bench() as one:
        one.add(request_of("r", prompt_of(10), 6))
        one.clock.now_s += 1.5
        one.finish()
        one.step()
        times, counts = one.engine.times, one.engine.status.counts
        assert sum(times.step.counts) == counts.steps > 0
        assert sum(times.first_token.counts) == 1
        assert times.first_token.sum_s == pytest.approx(1.5)


def test_time_that_a_pass_stands_still_for_its_prefix_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = prompt_of(400)
    with bench(kept=stored(llama, prompt)) as one:
        one.source.is_held = True
        one.add(request_of("r", prompt))
        one.step()
        (load,) = one.source.loads
        load.answer()
        one.step()
        load.bring(1)
        load.comes_while_waited_for = True
        wait = load.wait_for_section

        def wait_slowly(section: int) -> None:
            one.clock.now_s += 0.25
            wait(section)

        monkeypatch.setattr(load, "wait_for_section", wait_slowly)
        one.step()
        counts = one.engine.status.counts
        sections = len(one.runner.namespace.layout.sections)
        assert counts.arrival_wait_s == pytest.approx(0.25 * sections)
        load.end()
        one.finish()
        assert counts.hit_tokens % BLOCK_TOKENS == 0
        assert counts.hit_tokens > 0
