"""Equal tokens give equal bits: however they came to be computed, and wherever their blocks lie."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.llm import LLM
from engine.load import ComputeType
from engine.runner import plan_chunks, plan_step
from engine.token_sequence import TokenSequence
from tests.engine.conftest import OpenTiny

COMPUTES: list[ComputeType] = ["float32", "bfloat16"]
BLOCK = 128


@given(st.integers(0, 20), st.integers(1, 3000))
def test_plan_chunks_covers_the_tokens_in_whole_blocks_but_for_the_last(
    first_block: int, tokens: int
) -> None:
    start = first_block * BLOCK
    chunks = plan_chunks(start, start + tokens)
    assert [i for first, end in chunks for i in range(first, end)] == list(
        range(start, start + tokens)
    )
    assert all(first % BLOCK == 0 for first, _ in chunks)
    assert all(end - first == BLOCK for first, end in chunks[:-1])


@pytest.mark.parametrize(
    ("token_count", "planned"),
    [(1, (0, 1)), (127, (126, 127)), (128, (0, 128)), (129, (128, 129)), (256, (128, 256))],
)
def test_plan_step_runs_the_whole_block_when_the_token_completes_it(
    token_count: int, planned: tuple[int, int]
) -> None:
    assert plan_step(token_count) == planned


def random_tokens(llm: LLM, rng: Random, count: int) -> list[int]:
    return [rng.randrange(llm.tokenizer.vocabulary) for _ in range(count)]


def block_bytes(llm: LLM, sequence: TokenSequence) -> list[bytes]:
    block_ids = sequence.block_ids[: sequence.complete_blocks]
    return [bytes(llm.pool.buffer(block_id)) for block_id in block_ids]


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("prompt_tokens", [129, 255, 256, 257, 383, 400])
def test_logits_after_a_hit_are_bitwise_those_of_a_cold_run(
    open_tiny: OpenTiny, rng: Random, compute: ComputeType, prompt_tokens: int
) -> None:
    llm = open_tiny(compute=compute)
    token_ids = random_tokens(llm, rng, prompt_tokens)
    cold = TokenSequence(token_ids=token_ids, block_ids=llm.pool.allocate(4))
    cold_logits = llm.runner.prefill(cold)
    stored = block_bytes(llm, cold)
    for hit_blocks in range(1, (prompt_tokens - 1) // BLOCK + 1):
        block_ids = llm.pool.allocate(4)
        # Other places in the pool and in another order, filled as a store would fill them.
        block_ids.reverse()
        for block_id, data in zip(block_ids, stored[:hit_blocks], strict=False):
            llm.pool.buffer(block_id)[:] = data
        hit = TokenSequence(token_ids=token_ids, block_ids=block_ids, hit_tokens=hit_blocks * BLOCK)
        assert torch.equal(llm.runner.prefill(hit), cold_logits)
        assert block_bytes(llm, hit) == stored
        llm.pool.release(block_ids)


@pytest.mark.parametrize("compute", COMPUTES)
def test_blocks_filled_by_an_answer_are_bitwise_those_of_a_prompt(
    open_tiny: OpenTiny, rng: Random, compute: ComputeType
) -> None:
    llm = open_tiny(compute=compute)
    token_ids = random_tokens(llm, rng, 300)
    grown = TokenSequence(token_ids=token_ids[:100], block_ids=llm.pool.allocate(3))
    llm.runner.prefill(grown)
    for token_id in token_ids[100:]:
        grown.token_ids.append(token_id)
        llm.runner.step(grown)
    prompt = TokenSequence(token_ids=token_ids, block_ids=llm.pool.allocate(3))
    llm.runner.prefill(prompt)
    assert grown.complete_blocks == prompt.complete_blocks == 2
    assert block_bytes(llm, grown) == block_bytes(llm, prompt)


def test_logits_do_not_depend_on_what_a_block_held_before(open_tiny: OpenTiny, rng: Random) -> None:
    llm = open_tiny()
    token_ids = random_tokens(llm, rng, 200)
    logits = []
    for filling in (b"\x00", b"\xff"):
        block_ids = llm.pool.allocate(2)
        for block_id in block_ids:
            llm.pool.buffer(block_id)[:] = filling * llm.namespace.layout.block_bytes
        sequence = TokenSequence(token_ids=list(token_ids), block_ids=block_ids)
        steps = [llm.runner.prefill(sequence)]
        sequence.token_ids.append(5)
        logits.append([*steps, llm.runner.step(sequence)])
        llm.pool.release(block_ids)
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    assert all(torch.isfinite(step).all() for step in logits[0])
