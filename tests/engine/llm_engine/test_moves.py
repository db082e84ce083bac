"""A sequence leaves an engine, comes to one, or is begun anew, and goes on with equal tokens."""

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest
from engine.request import Request
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    MakeRunner,
    answer_alone,
    bench,
    llama,
    nano,
    prompt_of,
    request_of,
)
from tests.engine.llm_engine.moving import move

FAMILIES = [llama, nano]


@pytest.mark.parametrize("make_runner", FAMILIES)
def test_prefill_here_and_decode_there_answer_as_one_engine(make_runner: MakeRunner) -> None:
    request = request_of("r", prompt_of(260), 8)
    begun: list[tuple[int, int]] = []
    with bench(make_runner) as prefill, bench(make_runner) as decode:
        prefill.engine.on_last_chunk = lambda sequence: begun.append(
            (sequence.computed_tokens, sequence.complete_blocks)
        )
        prefill.add(replace(request, ends_after_prefill=True))
        prefill.step_until(lambda: prefill.answers["r"].is_prefilled)
        assert begun == [(256, 2)]
        assert len(prefill.tokens("r")) == 1
        assert prefill.engine.status.held == 1
        sequence = prefill.engine.detach("r")
        assert move(prefill, sequence, decode)
        prefill.engine.release(sequence)
        assert not prefill.engine.has_requests
        decode.finish()
        assert decode.tokens("r") == answer_alone(make_runner, request)


@pytest.mark.parametrize("make_runner", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_answer_goes_on_elsewhere_from_any_token(make_runner: MakeRunner, tokens: int) -> None:
    request = request_of("r", prompt_of(125), 7)
    with bench(make_runner) as first, bench(make_runner) as second:
        first.add(request)
        first.step_until(lambda: len(first.tokens("r")) == tokens)
        assert first.engine.decoding_ids() == ["r"]
        sequence = first.engine.detach("r")
        assert first.engine.decoding_ids() == []
        assert move(first, sequence, second)
        first.engine.release(sequence)
        second.finish()
        assert second.tokens("r") == answer_alone(make_runner, request)
        # What the first engine had complete is not saved again.
        assert second.report("r").receipt.summary().stored == (1 if tokens < 4 else 0)


def test_prompt_of_one_token_ends_with_its_prefill() -> None:
    """What needs no other engine is not handed over."""
    with bench() as one:
        one.add(request_of("r", prompt_of(20), 1, ends_after_prefill=True))
        one.finish()
        assert not one.answers["r"].is_prefilled
        assert one.answers["r"].finish_reason == "length"


def test_prefilled_request_that_is_aborted_gives_everything_back() -> None:
    with bench() as one:
        one.add(request_of("r", prompt_of(20), 5, ends_after_prefill=True))
        one.step_until(lambda: one.answers["r"].is_prefilled)
        one.answers["r"].finish_reason = None
        one.engine.abort("r")
        one.finish()
        assert one.answers["r"].finish_reason == "aborted"


def test_nothing_is_opened_for_a_sequence_when_there_is_no_room() -> None:
    with bench(pool_blocks=4) as one:
        one.add(request_of("r", prompt_of(300), 100))
        one.step_until(lambda: "r" in one.order)
        arriving = request_of("a", prompt_of(120), 9, answered_ids=(5,))
        # One block is free, and the one that decodes needs it next.
        assert one.engine.open_for_handover(arriving) is None
        with pytest.raises(InvalidRequest, match="request id"):
            one.engine.open_for_handover(replace(arriving, request_id="r"))
        one.finish()
        opened = one.engine.open_for_handover(arriving)
        assert opened is not None
        assert one.engine.status.held == 1
        one.engine.release(opened)


def replayed(kept: Kept, prompt: list[int]) -> Request:
    """A request that begins with a bounded replay at 128, for lack of a window."""
    with bench(nano, kept=kept) as other:
        other.add(request_of("r", prompt, 1))
        other.finish()
    kept.windows.clear()
    return request_of("r", [*prompt[:384], *prompt_of(125, 2)], 8)


def test_replay_is_repeated_by_the_engine_that_goes_on() -> None:
    kept = Kept()
    request = replayed(kept, prompt_of(400))
    with bench(nano, kept=kept) as first:
        first.add(request)
        first.finish()
        tokens = first.tokens("r")
        assert (first.report("r").hit_tokens, first.report("r").replay_tokens) == (128, 128)
    rest = replace(request, answered_ids=tuple(tokens[:3]), replay_first=128)
    with bench(nano, kept=kept) as second:
        second.add(rest)
        second.finish()
        assert second.tokens("r") == tokens
        assert second.engine.status.counts.changed_prefixes == 1
    kept.blocks.clear()
    with bench(nano, kept=kept) as third:
        third.add(rest)
        third.finish()
        assert third.engine.status.counts.changed_prefixes == 1
        assert len(third.tokens("r")) == 8


def test_replay_is_repeated_when_it_is_preempted() -> None:
    kept = Kept()
    request = replayed(kept, prompt_of(400))
    with bench(nano, kept=kept) as alone:
        alone.add(request)
        alone.finish()
    with bench(nano, kept=kept, pool_blocks=6) as tight:
        tight.add(request_of("before", prompt_of(126, 5), 30))
        tight.step_until(lambda: "before" in tight.order)
        tight.add(request)
        tight.finish()
        counts = tight.engine.status.counts
        assert (counts.preemptions, counts.changed_prefixes) == (1, 1)
        assert tight.report("r").preemptions == 1
        assert tight.tokens("r") == alone.tokens("r")
