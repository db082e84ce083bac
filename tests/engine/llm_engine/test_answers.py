"""What a request answers does not depend on its company, on budgets, on memory or on the store."""

from dataclasses import replace

import pytest

from engine.engine_config import EngineConfig
from engine.errors import InvalidRequest
from engine.sampling import GREEDY
from kvstore.key import KeyChain
from tests.engine.llm_engine.engine_bench import (
    MakeRunner,
    answer_alone,
    bench,
    llama,
    nano,
    prompt_of,
    request_of,
)

FAMILIES = [llama, nano]
LENGTHS = [1, 127, 128, 130, 263]


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_answers_in_a_batch_are_those_of_requests_alone(make_runner: MakeRunner) -> None:
    requests = [
        request_of(f"r{i}", prompt_of(length, i), 3 + i, sampling=GREEDY if i % 2 else WARM_OF[i])
        for i, length in enumerate(LENGTHS)
    ]
    with bench(make_runner, pool_blocks=24) as many:
        for request in requests:
            many.add(request)
        many.finish()
        for request in requests:
            assert many.tokens(request.request_id) == answer_alone(make_runner, request)
            assert many.answers[request.request_id].finish_reason == "length"


WARM_OF = {i: replace(GREEDY, temperature=1.0, seed=i) for i in range(0, len(LENGTHS), 2)}


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_answers_are_equal_when_the_budget_moves_the_chunks(make_runner: MakeRunner) -> None:
    request = request_of("r", prompt_of(300), 3)
    answers, steps = [], []
    for budget_s in (0.0, 0.2, 100.0):
        with bench(make_runner, step_budget_s=budget_s) as one:
            one.add(request)
            one.finish()
            answers.append(one.tokens("r"))
            steps.append(one.engine.status.counts.steps)
    assert answers[0] == answers[1] == answers[2] == answer_alone(make_runner, request)
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize("has_source", [True, False])
@pytest.mark.parametrize("make_runner", FAMILIES)
def test_answers_are_equal_when_requests_are_preempted(
    make_runner: MakeRunner, has_source: bool
) -> None:
    requests = [request_of(f"r{i}", prompt_of(252 + i, i), 8) for i in range(2)]
    with bench(make_runner, pool_blocks=5, has_source=has_source) as tight:
        for request in requests:
            tight.add(request)
        tight.finish()
        counts = tight.engine.status.counts
        assert counts.preemptions > 0
        assert counts.changed_prefixes == 0
        assert sum(tight.report(r.request_id).preemptions for r in requests) == counts.preemptions
        for request in requests:
            assert tight.tokens(request.request_id) == answer_alone(make_runner, request)


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_answers_are_equal_when_the_prefix_comes_from_the_store(make_runner: MakeRunner) -> None:
    prompt = prompt_of(380)
    first = request_of("first", prompt, 8)
    with bench(make_runner) as cold:
        cold.add(first)
        cold.finish()
    turn = request_of("turn", [*prompt, *cold.tokens("first"), *prompt_of(135, 3)], 3)
    with bench(make_runner, kept=cold.kept) as warm:
        warm.add(turn)
        warm.finish()
        report = warm.report("turn")
        # v41 goes on where a window was kept while the answer crossed a border of blocks.
        assert (report.matched_tokens, report.hit_tokens, report.replay_tokens) == (384, 384, 0)
        assert (report.fetch_s, report.swap_in_s, report.match_s) == (0.5, 0.125, 0.25)
        assert warm.tokens("turn") == answer_alone(make_runner, turn)


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_answer_goes_on_where_another_engine_left_it(make_runner: MakeRunner) -> None:
    whole = request_of("r", prompt_of(200), 9)
    tokens = answer_alone(make_runner, whole)
    rest = replace(whole, answered_ids=tuple(tokens[:5]))
    with bench(make_runner) as other:
        other.add(rest)
        other.finish()
        assert other.tokens("r") == tokens


def test_answer_ends_with_a_stop_token() -> None:
    request = request_of("r", prompt_of(40), 12)
    tokens = answer_alone(llama, request)
    stop = tokens[5]
    with bench() as one:
        one.add(replace(request, stop_ids=frozenset({stop})))
        one.finish()
        assert one.tokens("r") == tokens[: tokens.index(stop) + 1]
        assert one.answers["r"].finish_reason == "stop"


def test_answer_ends_with_the_context() -> None:
    with bench() as one:
        one.add(request_of("r", prompt_of(1020), 50))
        one.finish()
        assert len(one.tokens("r")) == 4
        assert one.answers["r"].finish_reason == "length"


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_last_token_is_computed_when_it_fills_a_block(make_runner: MakeRunner) -> None:
    """So that a follow-up finds the block."""
    prompt = prompt_of(120)
    with bench(make_runner) as one:
        one.add(request_of("r", prompt, 8))
        one.finish()
        keys = KeyChain(one.runner.namespace).append([*prompt, *one.tokens("r")])
        assert list(one.kept.blocks) == keys
        assert one.report("r").receipt.summary().stored == 1


def test_blocks_are_saved_once_and_under_the_class_of_the_request() -> None:
    with bench() as one:
        one.add(request_of("r", prompt_of(300), 90, ttl_class="agent"))
        one.finish()
        assert one.report("r").receipt.summary().stored == len(one.kept.blocks) == 3
        assert set(one.sink.ttl_classes) == {"agent"}


def test_stream_gives_the_events_of_its_request_only() -> None:
    with bench() as one:
        one.add(request_of("other", prompt_of(10, 1), 3))
        events = list(one.engine.stream(request_of("mine", prompt_of(10, 2), 5)))
        assert {event.request_id for event in events} == {"mine"}
        assert [event.position for event in events] == [0, 1, 2, 3, 4]
        one.finish()
        assert len(one.tokens("other")) == 3


def test_stream_that_is_closed_aborts_its_request() -> None:
    with bench() as one:
        stream = one.engine.stream(request_of("mine", prompt_of(10), 5))
        next(stream)
        stream.close()
        assert not one.engine.has_requests
        assert one.engine.status.counts.aborted == 1


@pytest.mark.parametrize(
    "setting", [{"sequences_max": 0}, {"loads_max": 0}, {"step_budget_s": -1.0}]
)
def test_config_refuses_what_is_no_bound(setting: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(setting))):
        EngineConfig(**setting)  # type: ignore[arg-type]
