"""What every runner promises: the bits depend on a sequence alone, however it came to be computed.

Each test is run by both families, llama in both compute types.
"""

from __future__ import annotations

from random import Random

import pytest

from engine.model_runner import Part
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import plan_dense_hit, plan_hit
from tests.engine.runners.runner_bench import RunnerBench, same_bits

LENGTHS = (129, 130, *range(133, 136), *range(255, 264))


def some_ends(length: int, rng: Random) -> list[int]:
    """Ends of passes as an engine may choose them."""
    borders = range(BLOCK_TOKENS, length, BLOCK_TOKENS)
    return [border for border in borders if rng.random() < 0.5]


@pytest.mark.parametrize("length", LENGTHS)
def test_cuts_into_passes_change_no_bit(bench: RunnerBench, length: int, rng: Random) -> None:
    token_ids = bench.tokens(length)
    whole, cut = bench.begin(token_ids), bench.begin(token_ids)
    logits = bench.run(whole)
    assert logits.shape == (bench.runner.vocabulary,)
    assert logits.dtype == "float32"
    assert same_bits(bench.run(cut, range(BLOCK_TOKENS, length, BLOCK_TOKENS)), logits)
    bench.check_same_state(cut, whole)
    bench.end(whole, cut)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [(1, 3), (126, 4), (127, 1), (128, 1), (254, 4)],
)
def test_prompt_and_answer_run_anew_have_the_bits_of_decoding(
    bench: RunnerBench, prompt: int, answer: int, rng: Random
) -> None:
    token_ids = bench.tokens(prompt + answer, seed=prompt)
    grown = bench.begin(token_ids[:prompt], room_tokens=answer)
    bench.run(grown)
    logits = bench.append(grown, token_ids[prompt:])[-1]
    anew = bench.begin(token_ids[:prompt], token_ids[prompt:])
    assert same_bits(bench.run(anew, some_ends(len(token_ids), rng)), logits)
    bench.check_same_state(anew, grown)
    bench.end(grown, anew)


def hit_borders(bench: RunnerBench, length: int) -> range:
    """Where a hit may end that leaves the bits as they are."""
    has_windows = bench.runner.window_layout is not None
    longest = plan_hit(length, 9, range(999)) if has_windows else plan_dense_hit(length, 9)
    return range(BLOCK_TOKENS, longest.hit_tokens + 1, BLOCK_TOKENS)


@pytest.mark.parametrize("length", [256, 257, 261, 262, 391])
def test_hit_at_each_block_has_the_bits_of_a_cold_run(
    bench: RunnerBench, length: int, rng: Random
) -> None:
    token_ids = bench.tokens(length, seed=length)
    cold = bench.begin(token_ids)
    windows = {}
    borders = hit_borders(bench, length)
    assert bool(borders) is (length >= 262 or bench.runner.window_layout is None)
    for border in borders:
        bench.run_to(cold, border)
        windows[border] = bench.window_if_any(cold, border)
    logits = bench.run(cold)
    stored = bench.complete_blocks(cold)
    for border in borders:
        hit = bench.begin_hit(token_ids, stored, bench.exact_hit(border), windows[border])
        assert (hit.computed_tokens, hit.hit.hit_tokens) == (border, border)
        assert same_bits(bench.run(hit, some_ends(length, rng)), logits)
        bench.check_same_state(hit, cold)
        bench.end(hit)
    bench.end(cold)


def test_company_changes_no_bit(bench: RunnerBench) -> None:
    """A prompt's part beside two sequences that decode, one of which completes a block."""
    ids = bench.tokens(600)
    alone = []
    for has_company in (False, True):
        first = bench.begin(ids[:127], room_tokens=1)
        second = bench.begin(ids[127:180], room_tokens=1)
        third = bench.begin(ids[200:500])
        bench.run(first)
        bench.run(second)
        first.token_ids.append(5)
        second.token_ids.append(6)
        parts = [Part(first, 128), Part(second, 54), Part(third, 256)]
        if has_company:
            found = bench.runner.compute(parts)
        else:
            found = [bench.runner.compute([part])[0] for part in parts]
        assert found[2] is None
        assert third.computed_tokens == 256
        found.append(bench.run(third))
        sequences = (first, second, third)
        alone.append((found, [bench.pack(sequence) for sequence in sequences]))
        bench.end(*sequences)
    (logits, states), (batched_logits, batched_states) = alone
    for index in (0, 1, 3):
        one, other = logits[index], batched_logits[index]
        assert one is not None
        assert other is not None
        assert same_bits(one, other)
    for state, batched in zip(states, batched_states, strict=True):
        assert state.complete == batched.complete
        assert state.open_block == batched.open_block
        assert state.slot == batched.slot


def test_sequence_may_be_closed_again(bench: RunnerBench) -> None:
    free = bench.runner.free_states
    sequence = bench.begin([1, 2, 3])
    bench.runner.close(sequence)
    bench.runner.close(sequence)
    assert bench.runner.free_states == free
    bench.end(sequence)


def test_token_ids_and_context_are_those_of_the_model(bench: RunnerBench) -> None:
    assert bench.runner.vocabulary in (268, 384)
    assert bench.runner.context_tokens in (1024, 4096)
    assert bench.runner.namespace.layout.block_bytes == bench.runner.pool.block_bytes
