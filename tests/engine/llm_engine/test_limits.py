"""Every queue has a bound, every request an end, and every block comes back."""

from dataclasses import replace

import pytest

from engine.errors import EngineBusy, EngineClosed, InvalidRequest
from engine.request import Request
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    answer_alone,
    bench,
    llama,
    nano,
    prompt_of,
    references_of,
    request_of,
)


def test_request_is_refused_when_the_queue_is_full_and_taken_later() -> None:
    with bench(queue_requests_max=2) as one:
        for number in range(2):
            one.add(request_of(f"r{number}", prompt_of(10)))
        with pytest.raises(EngineBusy, match="2 requests wait") as refusal:
            one.add(request_of("r2", prompt_of(10)))
        assert refusal.value.exit_code == 75
        one.step()
        one.add(request_of("r2", prompt_of(10)))
        one.finish()
        counts = one.engine.status.counts
        assert (counts.requests, counts.refused, counts.finished) == (3, 1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt tokens: given 0, expected 1 to 1023"),
        ({"prompt_ids": [5] * 1024}, "prompt tokens: given 1024"),
        ({"prompt_ids": [5, 100_000]}, "token id: given 100000"),
        ({"prompt_ids": [5, -1]}, "token id: given -1"),
        ({"max_tokens": 0}, "max_tokens: given 0, expected 1 or more"),
        ({"max_tokens": 2, "answered_ids": (4, 5)}, "max_tokens: given 2, expected 3 or more"),
        ({"prompt_ids": [5] * 1022, "answered_ids": (4, 5, 6)}, "answered tokens: given 1025"),
        ({"answered_ids": (4,), "stop_ids": frozenset({4})}, "answered_ids"),
        ({"replay_first": 128}, "replay_first: given 128, expected None for a dense model"),
        ({"max_tokens": 600}, "prompt tokens and max_tokens: given 610 together, expected at most"),
        ({"ttl_class": "chat\n"}, r"ttl_class: given 'chat\\n', expected 1 to 16 of"),
        ({"request_id": "taken"}, "request id: given taken"),
    ],
)
def test_request_that_can_never_be_answered_is_refused(
    change: dict[str, object], message: str
) -> None:
    with bench(pool_blocks=4) as one:
        one.add(request_of("taken", prompt_of(3), 9))
        with pytest.raises(InvalidRequest, match=message):
            one.engine.add_request(changed(request_of("r", prompt_of(10), 9), change))
        one.finish()
        assert one.engine.status.counts.requests == 1


@pytest.mark.parametrize("is_full", [False, True])
def test_answer_that_the_context_has_ended_elsewhere_ends_without_a_token(is_full: bool) -> None:
    """Its last token came, and what was behind it was lost."""
    with bench(pool_blocks=8, queue_requests_max=1) as one:
        if is_full:
            one.add(request_of("first", prompt_of(10), 1))
        whole = changed(request_of("r", prompt_of(1022), 9), {"answered_ids": (4, 5)})
        (event,) = one.engine.stream(whole)
        assert (event.position, event.token_ids, event.finish_reason) == (2, (), "length")
        assert event.report is not None
        assert (event.report.prompt_tokens, event.report.answer_tokens) == (1022, 2)
        one.finish()
        counts = one.engine.status.counts
        assert (counts.finished, counts.refused) == (1 + is_full, 0)


def changed(request: Request, change: dict[str, object]) -> Request:
    return replace(request, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 100, 256, 384])
def test_replay_that_no_hit_can_have_begun_is_refused(first: int) -> None:
    with bench(nano) as one, pytest.raises(InvalidRequest, match=f"replay_first: given {first}"):
        one.engine.add_request(request_of("r", prompt_of(450), replay_first=first))


def test_request_that_fills_the_whole_pool_is_answered() -> None:
    with bench(pool_blocks=3) as one:
        one.add(request_of("r", prompt_of(250), 134))
        one.finish()
        assert len(one.tokens("r")) == 134


def bench_in_each_phase() -> EngineBench:
    """One request in each phase: `decode`, `prefill`, `load`, `blocks`, `match`, `wait`."""
    stored = prompt_of(300, 9)
    with bench() as other:
        other.add(request_of("stored", stored, 1))
        other.finish()
    one = EngineBench(llama, pool_blocks=12, kept=other.kept, loads_max=3, step_budget_s=0.128)
    one.add(request_of("decode", prompt_of(20, 1), 400))
    one.step_until(lambda: "decode" in one.order)
    one.source.is_held = True
    one.add(request_of("load", stored, 2))
    one.step()
    one.source.loads[-1].answer()
    one.step()
    one.add(request_of("prefill", prompt_of(600, 3), 5))
    one.step()
    one.source.loads[-1].answer()
    one.step()
    one.add(request_of("blocks", prompt_of(500, 4), 5))
    one.step()
    one.source.loads[-1].answer()
    one.step()
    one.add(request_of("match", prompt_of(130, 5), 5))
    one.add(request_of("wait", prompt_of(131, 6), 5))
    return one


PHASES = {
    "decode": "DECODING",
    "prefill": "PREFILL",
    "load": "LOADING",
    "blocks": "MATCHED",
    "match": "MATCHING",
    "wait": "WAITING",
}


@pytest.mark.parametrize("name", PHASES)
def test_aborted_request_leaves_nothing_behind_in_any_phase(name: str) -> None:
    one = bench_in_each_phase()
    one.step()
    job = one.engine._schedule.jobs[name]
    assert job.phase.name == PHASES[name]
    one.engine.abort(name)
    one.step()
    assert one.answers[name].finish_reason == "aborted"
    for load in one.source.loads:
        if load.found is None and load.outcome is None:
            load.answer()
        if load.is_begun and load.outcome is None:
            load.bring()
            load.end()
    one.source.is_held = False
    one.finish()
    for other in PHASES:
        if other != name:
            assert one.answers[other].finish_reason == "length"
    one.assert_all_is_free()
    one.engine.close()


def test_closed_engine_has_everything_back_and_does_nothing_more() -> None:
    one = bench_in_each_phase()
    one.step()
    assert one.engine.close()
    one.assert_all_is_free()
    assert one.source.is_closed
    with pytest.raises(EngineClosed, match="step"):
        one.engine.step()
    with pytest.raises(EngineClosed, match="add_request"):
        one.add(request_of("late", prompt_of(3)))
    assert one.engine.close()


def test_abort_of_an_unknown_request_is_nothing() -> None:
    with bench() as one:
        one.engine.abort("nobody")
        assert one.engine.step() == []


def test_saves_are_looked_through_for_room_from_time_to_time_only() -> None:
    """Each look goes through all blocks of a request, and it would be one in every step."""
    with bench(pool_blocks=5, has_source=False) as one:
        one.add(request_of("long", prompt_of(260, 1), 100))
        one.add(request_of("late", prompt_of(300, 2), 1))
        one.step()
        one.clock.now_s += 1.1
        for _ in range(50):
            one.step()
            one.clock.now_s += 0.01
        assert one.sink.rooms_asked == 1
        one.clock.now_s += 0.6
        one.step(10)
        assert one.sink.rooms_asked == 2
        one.finish()
        assert one.order == ["long", "late"]


def test_saves_that_have_not_begun_give_way_to_an_answer() -> None:
    with bench(pool_blocks=3) as one:
        one.sink.is_held = True
        one.add(request_of("first", prompt_of(300, 1), 1))
        one.finish()
        assert one.runner.pool.free_blocks == 1
        one.add(request_of("next", prompt_of(300, 2), 1))
        one.step(3)
        assert one.order == ["first"]
        one.clock.now_s += 1.5
        one.step()
        one.finish()
        assert one.report("first").receipt.summary().dropped == 2
        assert one.tokens("next") == answer_alone(llama, request_of("next", prompt_of(300, 2), 1))
        one.sink.flush(1.0)


@pytest.mark.parametrize("prompt_tokens", [300, 127])
def test_request_ends_when_saves_that_hang_keep_all_blocks(prompt_tokens: int) -> None:
    """At its beginning, or where its answer needs one more."""
    with bench(pool_blocks=3) as one:
        hanging = one.runner.pool.allocate(2)
        one.add(request_of("r", prompt_of(prompt_tokens), 30))
        for _ in range(8):
            one.step()
            one.clock.now_s += 0.6
        assert one.answers["r"].finish_reason == "no_room"
        assert one.engine.status.counts.no_room == 1
        assert references_of(one.runner.pool) == dict.fromkeys(hanging, 1)
        one.runner.pool.release(hanging)


def test_state_slots_bound_what_runs() -> None:
    with bench(nano, state_slots=2) as one:
        for number in range(4):
            one.add(request_of(f"r{number}", prompt_of(20, number), 3))
        one.step()
        assert (one.engine.status.decoding, one.engine.status.free_states) == (2, 0)
        one.finish()
        assert one.order == ["r0", "r1", "r2", "r3"]
