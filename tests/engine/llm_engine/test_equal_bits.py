"""Logits, bit for bit, of an engine that does many things, against those of a request alone.

Tokens are a coarse measure: most changes of bits change none of the few that a test asks for.
"""

from collections.abc import Sequence as Run
from dataclasses import replace

import pytest

from engine.model_runner import Part, WaitForSection, wait_for_nothing
from engine.request import Request
from engine.sampling import FloatArray
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    MakeRunner,
    bench,
    llama,
    nano,
    prompt_of,
    request_of,
)
from tests.engine.llm_engine.moving import move

FAMILIES = [llama, nano]

Bits = dict[tuple[str, int], bytes]
"""Of the logits behind so many tokens of a request."""


def record(one: EngineBench) -> Bits:
    """Whatever the engine computes from now on. What it computes again has the same bits."""
    found: Bits = {}
    compute = one.runner.compute

    def recording(
        parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        rows = compute(parts, wait_for_section=wait_for_section)
        for part, logits in zip(parts, rows, strict=True):
            if logits is not None:
                place = part.sequence.request.request_id, part.end
                assert found.setdefault(place, logits.tobytes()) == logits.tobytes(), place
        return rows

    one.runner.compute = recording  # type: ignore[method-assign]
    return found


def bits_alone(make_runner: MakeRunner, *requests: Request) -> Bits:
    found: Bits = {}
    for request in requests:
        with bench(make_runner, has_source=False) as one:
            alone = record(one)
            one.add(request)
            one.finish()
            found |= alone
    return found


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_batch_chunks_and_preemption_leave_the_bits(make_runner: MakeRunner) -> None:
    requests = [request_of(f"r{i}", prompt_of(250 + 2 * i, i), 8) for i in range(3)]
    with bench(make_runner, pool_blocks=8, step_budget_s=0.1, has_source=False) as tight:
        found = record(tight)
        for request in requests:
            tight.add(request)
        tight.finish()
        assert tight.engine.status.counts.preemptions > 0
    assert found == bits_alone(make_runner, *requests)


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_turns_from_the_store_have_the_bits_of_cold_ones(make_runner: MakeRunner) -> None:
    """Each turn is asked of an engine that knows nothing; its prompt has earlier answers in it."""
    kept, prompt = Kept(), prompt_of(263)
    hits = []
    for number in range(3):
        turn = request_of(f"turn {number}", prompt, 9)
        with bench(make_runner, kept=kept) as one:
            found = record(one)
            one.add(turn)
            one.finish()
            report = one.report(turn.request_id)
            assert report.replay_tokens == 0
            hits.append(report.hit_tokens)
            assert found == bits_alone(make_runner, turn)
            prompt = [*prompt, *one.tokens(turn.request_id), *prompt_of(134, number)]
    # Of what the turn before has left nothing is computed again but an open block.
    assert hits == [0, 256, 384]


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_shared_prefix_leaves_the_bits(make_runner: MakeRunner) -> None:
    first, second = request_of("first", prompt_of(400), 3), request_of("second", prompt_of(400), 9)
    with bench(make_runner, has_source=False) as one:
        found = record(one)
        one.add(first)
        one.finish()
        one.add(second)
        one.finish()
        assert one.report("second").shared_tokens > 0
    assert found == bits_alone(make_runner, first, second)


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_hand_over_and_rerun_leave_the_bits(make_runner: MakeRunner) -> None:
    request = request_of("r", prompt_of(252), 9)
    with (
        bench(make_runner) as prefill,
        bench(make_runner) as decode,
        bench(make_runner) as elsewhere,
    ):
        found, there, again = record(prefill), record(decode), record(elsewhere)
        prefill.add(replace(request, ends_after_prefill=True))
        prefill.step_until(lambda: prefill.answers["r"].is_prefilled)
        sequence = prefill.engine.detach("r")
        assert move(prefill, sequence, decode)
        prefill.engine.release(sequence)
        decode.finish()
        elsewhere.add(replace(request, answered_ids=tuple(decode.tokens("r")[:6])))
        elsewhere.finish()
    alone = bits_alone(make_runner, request)
    assert found | there == alone
    assert again
    assert again.items() <= alone.items()
