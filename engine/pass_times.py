"""Takes the time of passes over a model: prompts cut in several ways, and a few tokens behind them.

For the cost that an engine plans with. Not a benchmark: nothing is served, stored or fetched.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

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
ROUNDS_MAX = 3


@dataclass(frozen=True, slots=True)
class Walk:
    """A prompt of so many tokens, run in chunks of so many."""

    prompt_tokens: int
    chunk_tokens: int


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


def plan_ends(walk: Walk, borders: list[int]) -> list[int]:
    """Where the passes over the prompt end: `borders` are those that no pass may cross. Pure."""
    ends = {*range(walk.chunk_tokens, walk.prompt_tokens, walk.chunk_tokens), walk.prompt_tokens}
    return sorted(ends | {border for border in borders if 0 < border < walk.prompt_tokens})


def choose_prompt_tokens_max(runner: ModelRunner) -> int:
    """The longest prompt: bounded by the model's context, and by the pool, with room to answer."""
    room = min(
        runner.context_tokens,
        runner.pool.capacity_blocks * BLOCK_TOKENS,
        PROMPT_TOKENS_MAX + ANSWER_TOKENS,
    )
    return room - ANSWER_TOKENS


def measure_passes(
    runner: ModelRunner,
    *,
    time_s: float,
    clock: Callable[[], float],
    on_pass: Callable[[int, float], None],
) -> list[Sample]:
    """Times of passes, until `time_s` is over or the walks are done. The first walk, which is
    short, is always finished, and run once before to warm up. `on_pass` is told the number of
    passes so far and the seconds since the beginning."""
    begun_s = clock()
    walks = plan_walks(choose_prompt_tokens_max(runner))
    list(_walk(runner, walks[0], clock))
    samples: list[Sample] = []
    for number, walk in enumerate(walks * ROUNDS_MAX):
        with closing(_walk(runner, walk, clock)) as passes:
            for sample in passes:
                samples.append(sample)
                on_pass(len(samples), clock() - begun_s)
                if number > 0 and clock() - begun_s >= time_s:
                    return samples
    return samples


def _walk(runner: ModelRunner, walk: Walk, clock: Callable[[], float]) -> Generator[Sample]:
    """Run one prompt and a few tokens behind it; a sample for each pass."""
    tokens = walk.prompt_tokens + ANSWER_TOKENS
    # Any ids do, as long as they differ: equal tokens would all choose the same experts.
    token_ids = [(7919 * index + 13) % runner.vocabulary for index in range(tokens)]
    request = Request(
        request_id=f"{walk.prompt_tokens} in {walk.chunk_tokens}",
        prompt_ids=token_ids[: walk.prompt_tokens],
        max_tokens=ANSWER_TOKENS,
    )
    sequence = Sequence(request)
    sequence.block_ids = runner.pool.allocate(-(-tokens // BLOCK_TOKENS))
    try:
        runner.open(sequence)
        for end in plan_ends(walk, runner.chunk_borders(sequence)):
            yield _run(runner, sequence, end, clock)
        for token_id in token_ids[walk.prompt_tokens :]:
            sequence.token_ids.append(token_id)
            yield _run(runner, sequence, len(sequence.token_ids), clock)
    finally:
        runner.close(sequence)
        runner.pool.release(sequence.block_ids)


def _run(runner: ModelRunner, sequence: Sequence, end: int, clock: Callable[[], float]) -> Sample:
    cached_tokens = sequence.computed_tokens
    begun_s = clock()
    runner.compute([Part(sequence, end)])
    return Sample(end - cached_tokens, cached_tokens, clock() - begun_s)
