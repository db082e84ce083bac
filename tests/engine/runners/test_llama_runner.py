"""Which rows of a dense model are run together, and that nothing else of a pool gets into them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.load import ComputeType
from engine.runners.llama_runner import plan_pieces
from tests.engine.runners.runner_bench import RunnerBench, llama_bench, same_bits

BLOCK = 128


@given(st.integers(0, 20), st.integers(1, 3000))
def test_prompt_is_run_in_whole_blocks_and_a_rest(first_block: int, tokens: int) -> None:
    start = first_block * BLOCK
    pieces = plan_pieces(start, start + tokens, start + tokens)
    assert [i for first, end in pieces for i in range(first, end)] == list(
        range(start, start + tokens)
    )
    assert all(first % BLOCK == 0 for first, _ in pieces)
    assert all(end - first == BLOCK for first, end in pieces[:-1])


@pytest.mark.parametrize(
    ("end", "planned"),
    [(1, (0, 1)), (127, (126, 127)), (128, (0, 128)), (129, (128, 129)), (256, (128, 256))],
)
def test_token_of_an_answer_runs_alone_unless_it_completes_a_block(
    end: int, planned: tuple[int, int]
) -> None:
    assert plan_pieces(end - 1, end, prompt_tokens=0 if end == 1 else 1) == [planned]


@pytest.mark.parametrize(
    ("first", "end", "prompt", "pieces"),
    [
        # A prompt of 100 and 3 tokens of its answer, begun anew.
        (0, 103, 100, [(0, 100), (100, 101), (101, 102), (102, 103)]),
        # The answer reached over the border: what was the prompt's part is in a complete block.
        (0, 130, 100, [(0, 128), (128, 129), (129, 130)]),
        (128, 131, 129, [(128, 129), (129, 130), (130, 131)]),
        (128, 130, 128, [(128, 129), (129, 130)]),
        # A block that is completed is run whole, from its beginning.
        (126, 130, 100, [(0, 128), (128, 129), (129, 130)]),
        (0, 256, 256, [(0, 128), (128, 256)]),
    ],
)
def test_prompt_with_its_answer_is_run_as_it_was_the_first_time(
    first: int, end: int, prompt: int, pieces: list[tuple[int, int]]
) -> None:
    assert plan_pieces(first, end, prompt) == pieces


@given(prompt=st.integers(1, 400), answer=st.integers(1, 300), rng=st.randoms())
def test_every_row_is_last_run_in_the_same_piece_however_it_was_asked_for(
    prompt: int, answer: int, rng: Random
) -> None:
    total = prompt + answer

    def last_pieces(ends: list[int]) -> dict[int, tuple[int, int]]:
        found = {}
        first = 0
        for end in ends:
            for piece in plan_pieces(first, end, prompt):
                found.update(dict.fromkeys(range(*piece), piece))
            first = end
        return found

    decoded = last_pieces([prompt, *range(prompt + 1, total + 1)])
    allowed = sorted({prompt, *range(BLOCK, total, BLOCK), *range(prompt, total)})
    ends = [end for end in allowed if rng.random() < 0.5]
    anew = last_pieces([*ends, total])
    assert anew == decoded


@pytest.mark.parametrize(("first", "end", "prompt"), [(5, 9, 20), (0, 9, 20), (5, 5, 1)])
def test_passes_that_end_within_a_block_of_the_prompt_are_refused(
    first: int, end: int, prompt: int
) -> None:
    with pytest.raises(AssertionError):
        plan_pieces(first, end, prompt)


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tiny_path: Path) -> RunnerBench:
    compute: ComputeType = request.param
    return llama_bench(tiny_path, compute)


def test_blocks_filled_by_an_answer_are_bitwise_those_of_a_prompt(bench: RunnerBench) -> None:
    token_ids = bench.tokens(300)
    grown = bench.begin(token_ids[:100], room_tokens=200)
    bench.run(grown)
    bench.append(grown, token_ids[100:])
    prompt = bench.begin(token_ids)
    bench.run(prompt)
    assert grown.complete_blocks == prompt.complete_blocks == 2
    assert bench.complete_blocks(grown) == bench.complete_blocks(prompt)


def test_logits_do_not_depend_on_what_a_block_held_before(bench: RunnerBench) -> None:
    token_ids = bench.tokens(200)
    found = []
    for filling in (0x00, 0xFF):
        sequence = bench.begin(token_ids, room_tokens=1)
        bench.runner.pool.memory.fill_(filling)
        found.append([bench.run(sequence), *bench.append(sequence, [5])])
        bench.end(sequence)
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))
