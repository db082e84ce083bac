"""A bounded replay changes bits, so what it leads to is given to nobody who did not ask for it."""

from dataclasses import replace

from engine.request import Request
from engine.sequence import Sequence
from kvstore.key import KeyChain
from kvstore.policy import MISS
from tests.engine.llm_engine.after_replays import add_without_the_store
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    answer_alone,
    bench,
    nano,
    prompt_of,
    request_of,
    summing,
)

PROMPT = prompt_of(400)
LONGER = [*PROMPT[:384], *prompt_of(140, 2)]
"""Of what is stored of `PROMPT` a replay from 256 is its hit."""


def blocks_without_windows() -> Kept:
    kept = Kept()
    with bench(nano, kept=kept) as other:
        other.add(request_of("r", PROMPT, 1))
        other.finish()
    kept.windows.clear()
    return kept


def test_windows_that_a_replay_leads_to_are_not_shared() -> None:
    with bench(nano, kept=blocks_without_windows()) as one:
        one.add(request_of("replayed", LONGER, 1))
        one.finish()
        assert one.report("replayed").replay_tokens == 128
        add_without_the_store(one, request_of("cold", LONGER, 1))
        one.finish()
        assert one.report("cold").hit_tokens == 0


def test_blocks_that_a_replay_leads_to_are_not_shared() -> None:
    longest = [*LONGER[:512], *prompt_of(140, 3)]
    cold = Kept()
    with bench(nano, kept=cold) as alone:
        alone.add(request_of("r", longest, 1))
        alone.finish()
        keys = KeyChain(alone.runner.namespace).append(longest)
    with bench(nano, kept=blocks_without_windows()) as one:
        one.add(request_of("replayed", LONGER, 1))
        one.finish()
        assert one.kept.blocks[keys[3]] != cold.blocks[keys[3]], "the replay changes nothing"
        # A cold run leaves a window at 512, behind a block that the replay had computed too.
        add_without_the_store(one, request_of("cold", LONGER, 1))
        one.finish()
        add_without_the_store(one, request_of("shared", longest, 3))
        one.step_until(lambda: "shared" in one.order)
        block_ids = one.engine._schedule.jobs["shared"].sequence.block_ids
        found = [bytes(one.runner.pool.buffer(block_id)) for block_id in block_ids[:4]]
        one.finish()
        assert one.report("shared").shared_tokens == 512
        assert found == [cold.blocks[key] for key in keys[:4]]


def test_answer_that_was_begun_without_a_replay_goes_on_without_one() -> None:
    """Though blocks for one are stored: it is computed cold, with the bits that it had."""
    request = request_of("r", LONGER, 6)
    tokens = answer_alone(nano, request)
    rest = replace(request, answered_ids=tuple(tokens[:2]), replay_first=None)
    with bench(nano, kept=blocks_without_windows()) as one:
        one.add(rest)
        one.finish()
        assert (one.report("r").matched_tokens, one.report("r").hit_tokens) == (384, 0)
        assert one.engine.status.counts.changed_prefixes == 0
        assert one.tokens("r") == tokens


def preempted(
    one: EngineBench, request: Request, then_lost: dict[bytes, bytes] | None = None
) -> Sequence:
    """The sequence of a request that had its first token, was thrown out, and is computed again.
    After its first token the store has lost `then_lost`."""
    one.add(request_of("before", prompt_of(126, 5), 30))
    one.step_until(lambda: "before" in one.order)
    one.add(request)
    one.step_until(lambda: request.request_id in one.order)
    if then_lost is not None:
        then_lost.clear()
    one.step_until(lambda: one.engine.status.counts.preemptions == 1)
    job = one.engine._schedule.jobs[request.request_id]
    assert job.costs.preemptions == 1
    one.step_until(lambda: job.sequence.computed_tokens == len(job.sequence.token_ids) - 1)
    return job.sequence


TIGHT = request_of("r", [*LONGER[:384], *prompt_of(125, 4)], 8)
"""Its fifth block is wanted after four tokens of its answer."""


def test_preempted_replay_is_repeated() -> None:
    with bench(nano, kept=blocks_without_windows(), pool_blocks=6) as tight:
        assert preempted(tight, TIGHT).replay_first == 128
        tight.finish()
        # Its blocks may be others than before, for all that the engine knows.
        assert tight.engine.status.counts.changed_prefixes == 1


def test_preempted_answer_that_began_with_window_state_does_not_become_a_replay() -> None:
    kept = Kept()
    with bench(nano, kept=kept) as other:
        other.add(request_of("turn", LONGER[:300], 1))
        other.finish()
        other.add(request_of("r", TIGHT.prompt_ids, 1))
        other.finish()
    with bench(nano, kept=kept, pool_blocks=6, window_snapshots_max=1) as tight:
        sequence = preempted(tight, TIGHT, then_lost=kept.windows)
        assert tight.engine.status.counts.hit_tokens == 256
        assert sequence.hit == MISS
        tight.finish()
        # What it went on without came from a store, which may have had it of a replay.
        assert tight.engine.status.counts.changed_prefixes == 1
        assert tight.tokens("r") == answer_alone(nano, TIGHT)


LONG_PROMPT = prompt_of(637)
LATER = request_of("r", LONG_PROMPT, 8)
"""Its hit ends at 384 at the farthest, and its sixth block is wanted after four tokens."""


def what_a_replay_left() -> Kept:
    """Blocks of `LONG_PROMPT` up to 384, the last of them computed behind a replay."""
    kept = Kept()
    for tokens in (300, 420):
        with bench(summing, kept=kept) as other:
            other.add(request_of("r", LONG_PROMPT[:tokens], 1))
            other.finish()
        kept.windows.clear()
    return kept


def resumed(kept: Kept) -> EngineBench:
    """An engine that has begun `LATER` cold and has thrown it out, has handed out most of its
    blocks anew, and begins it again."""
    one = EngineBench(summing, kept=kept, pool_blocks=7)
    one.add(request_of("before", prompt_of(126, 5), 500))
    one.step_until(lambda: "before" in one.order)
    add_without_the_store(one, LATER)
    one.step_until(lambda: "r" in one.order)
    one.source.is_held = False
    one.step_until(lambda: one.answers["before"].finish_reason is not None)
    one.finish()
    assert one.report("r").preemptions == 1
    return one


def test_answer_begun_cold_takes_no_blocks_that_others_have_stored() -> None:
    """A window of its own was here, and the blocks before it in the store were not its own."""
    one = resumed(what_a_replay_left())
    counts = one.engine.status.counts
    assert counts.changed_prefixes == 0
    assert one.tokens("r") == answer_alone(summing, LATER)
    assert counts.prefill_tokens > 2 * 637


def test_answer_begun_cold_takes_the_blocks_that_it_has_stored_itself() -> None:
    one = resumed(Kept())
    counts = one.engine.status.counts
    assert counts.changed_prefixes == 0
    assert one.tokens("r") == answer_alone(summing, LATER)
    # The second time it computed no more than what is behind its hit.
    assert counts.prefill_tokens == 126 + 637 + 640 - 384


def test_answer_begun_elsewhere_that_goes_on_from_the_store_is_counted() -> None:
    """Nothing says whether it has seen the same state."""
    kept = Kept()
    with bench(summing, kept=kept) as first:
        for prompt in (LONG_PROMPT[:385], LONG_PROMPT):
            first.add(request_of(f"of {len(prompt)}", prompt, 1))
            first.finish()
    rest = replace(LATER, answered_ids=tuple(answer_alone(summing, LATER)[:2]))
    with bench(summing, kept=kept) as second:
        second.add(rest)
        second.finish()
        assert second.report("r").hit_tokens == 384
        assert second.engine.status.counts.changed_prefixes == 1
