"""Takes the time of passes over a model: prompts cut in several ways, and a few tokens behind them,
of one sequence and of several in one pass.

For the cost that an engine plans with. Not a benchmark: nothing is served, stored or fetched.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

import torch

from kvstore.layout import BLOCK_TOKENS

from .model_runner import ModelRunner, Part
from .request import Request
from .scheduler.fit import Sample
from .sequence import Sequence

PROMPT_TOKENS_MAX = 4096
"""What attention costs at greater lengths is extrapolated."""
CHUNKS_TOKENS = (4 * BLOCK_TOKENS, BLOCK_TOKENS, 16 * BLOCK_TOKENS)
GROWTH = 4
"""From one length of a prompt to the next."""
ANSWER_TOKENS = 3
"""Passes of one token behind each prompt: those of decode."""
COMPANIES = (2, 4, 8)
"""Sequences that are answered together."""
COMPANY_BLOCKS = 2
"""Of each of them: its prompt is a block long and a little."""
ROUNDS_MAX = 3


@dataclass(frozen=True, slots=True)
class Walk:
    """A prompt of so many tokens, run in chunks of so many. Of several `sequences`, which are
    answered together, each prompt is a token longer than the one before, so that they stand at
    several places of a block."""

    prompt_tokens: int
    chunk_tokens: int
    sequences: int = 1


def plan_walks(tokens_max: int) -> list[Walk]:
    """Prompts of 2 blocks, 8, 32 ... and of `tokens_max`, each in every size of chunk it can have.
    The cheap ones come first. Pure."""
    lengths = []
    length = 2 * BLOCK_TOKENS
    while length < tokens_max:
        lengths.append(length)
        length *= GROWTH
    return [
        Walk(length, chunk)
        for length in (*lengths, tokens_max)
        for chunk in CHUNKS_TOKENS
        if chunk <= length or chunk == min(CHUNKS_TOKENS)
    ]


def plan_companies(sequences_max: int) -> list[Walk]:
    """Walks of several sequences, as many as there may be. Pure."""
    return [
        Walk(BLOCK_TOKENS, BLOCK_TOKENS, sequences)
        for sequences in COMPANIES
        if sequences <= sequences_max
    ]


def plan_ends(prompt_tokens: int, chunk_tokens: int, borders: list[int]) -> list[int]:
    """Where the passes over the prompt end: `borders` are those that no pass may cross. Pure."""
    ends = {*range(chunk_tokens, prompt_tokens, chunk_tokens), prompt_tokens}
    return sorted(ends | {border for border in borders if 0 < border < prompt_tokens})


def choose_prompt_tokens_max(runner: ModelRunner) -> int:
    """The longest prompt: bounded by the model's context, and by the pool, with room to answer."""
    room = min(
        runner.context_tokens,
        runner.pool.capacity_blocks * BLOCK_TOKENS,
        PROMPT_TOKENS_MAX + ANSWER_TOKENS,
    )
    return room - ANSWER_TOKENS


def choose_clock(device: torch.device, clock: Callable[[], float]) -> Callable[[], float]:
    """The clock for passes on that device. On a GPU a pass over a part of a prompt returns when all
    of it is queued, so there the clock is read when the device has done it."""
    if device.type == "cpu":
        return clock

    def read_when_done() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return read_when_done


def measure_passes(
    runner: ModelRunner,
    *,
    time_s: float,
    clock: Callable[[], float],
    on_pass: Callable[[int, float], None],
) -> list[Sample]:
    """Times of passes, until `time_s` is over or the walks are done. The first walk and those of
    several sequences, which are short, are always finished, and the first is run once before to
    warm up. `on_pass` is told the number of passes so far and the seconds since the beginning."""
    begun_s = clock()
    first, *others = plan_walks(choose_prompt_tokens_max(runner))
    companies = plan_companies(
        min(runner.free_states, runner.pool.capacity_blocks // COMPANY_BLOCKS)
    )
    list(_walk(runner, first, clock))
    samples: list[Sample] = []
    for number, walk in enumerate([first, *companies, *others] * ROUNDS_MAX):
        with closing(_walk(runner, walk, clock)) as passes:
            for sample in passes:
                samples.append(sample)
                on_pass(len(samples), clock() - begun_s)
                if number > len(companies) and clock() - begun_s >= time_s:
                    return samples
    return samples


def _walk(runner: ModelRunner, walk: Walk, clock: Callable[[], float]) -> Generator[Sample]:
    """Run the prompts and a few tokens behind them; a sample for each pass, but where there are
    several sequences, whose prompts are too much alike to count."""
    sequences: list[Sequence] = []
    try:
        for number in range(walk.sequences):
            sequences.append(_open(runner, walk.prompt_tokens + number))
            borders = runner.chunk_borders(sequences[-1])
            for end in plan_ends(sequences[-1].prompt_tokens, walk.chunk_tokens, borders):
                sample = _run(runner, [Part(sequences[-1], end)], clock)
                if walk.sequences == 1:
                    yield sample
        for _ in range(ANSWER_TOKENS):
            for sequence in sequences:
                sequence.token_ids.append(_token_id(runner, len(sequence.token_ids)))
            yield _run(runner, [Part(one, len(one.token_ids)) for one in sequences], clock)
    finally:
        for sequence in sequences:
            runner.close(sequence)
            runner.pool.release(sequence.block_ids)


def _open(runner: ModelRunner, prompt_tokens: int) -> Sequence:
    request = Request(
        request_id=f"{prompt_tokens}",
        prompt_ids=[_token_id(runner, index) for index in range(prompt_tokens)],
        max_tokens=ANSWER_TOKENS,
    )
    sequence = Sequence(request)
    sequence.block_ids = runner.pool.allocate(-(-(prompt_tokens + ANSWER_TOKENS) // BLOCK_TOKENS))
    runner.open(sequence)
    return sequence


def _token_id(runner: ModelRunner, index: int) -> int:
    """Any ids do, as long as they differ: equal tokens would all choose the same experts."""
    return (7919 * index + 13) % runner.vocabulary


def _run(runner: ModelRunner, parts: list[Part], clock: Callable[[], float]) -> Sample:
    """One pass, of parts that are equally long."""
    cached_tokens = [part.sequence.computed_tokens for part in parts]
    tokens = parts[0].end - cached_tokens[0]
    begun_s = clock()
    runner.compute(parts)
    took_s = clock() - begun_s
    return Sample(tokens, sum(cached_tokens) // len(parts), took_s, len(parts))
