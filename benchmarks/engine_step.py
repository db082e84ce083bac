"""What an engine adds to the model: microseconds of its own a step, and the delay of saving.

    python -m benchmarks.engine_step [--steps 500] [--model models/v41-mini] [--rounds 9]
        [--share-cores]

Prints JSON lines. `step`: the runner returns fixed logits at once, so a step of 1, 8 or 64 answers
is the engine's own work; `choosing` is what a bare loop over the same logits takes to choose as
many tokens, and `overhead` the step without the runner and without choosing: 1 ms at 64 is the
goal. `save_delay`: the same requests answered by the model of the folder, without a sink and with
one that saves blocks and window state by an agent into 12 local nodes, code 10+2, in turns, now the
one first and now the other: the median over the rounds of the ratio of the time of all steps, with
the interval of 95 % of that median (resampled rounds), and the share of the time that the engine's
thread spent in the sink; 1 % is the goal. The engine's thread, which computes, has a core of its
own, as it has on a GPU host: nodes, agent and the thread that saves share the others. With
`--share-cores` all run wherever they are put; then the ratio also tells of the work of the store.
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Sequence as Run
from pathlib import Path

import numpy as np

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

from engine.block_pool import BlockPool
from engine.engine_config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_runner import Buffer, Part, WaitForSection, wait_for_nothing
from engine.request import Request
from engine.sampling import GREEDY, FloatArray, choose_token
from engine.sequence import Sequence
from kvstore.admin.machine import describe_machine
from kvstore.client import BlockLayout, Namespace, Section
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import MISS, HitPlan

from .local_engine import (
    LocalEngine,
    add_store_options,
    clock,
    open_local_engine,
    open_local_store,
)

ANSWERS = (1, 8, 64)
PROMPT_TOKENS = 100
SAVE_REQUESTS, SAVE_PROMPT_TOKENS, SAVE_ANSWER_TOKENS = 4, 520, 140


class FixedLogitsRunner:
    """A `ModelRunner` of a dense model that computes nothing: equal logits after every token."""

    window_layout: BlockLayout | None = None
    state_layout: BlockLayout | None = None

    def __init__(self, *, pool_blocks: int, context_tokens: int, vocabulary: int) -> None:
        layout = BlockLayout((Section("nothing", 1_024),))
        self.namespace = Namespace(model="fixed", weights="w", tokenizer="t", layout=layout)
        self.pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=pool_blocks)
        self.context_tokens = context_tokens
        self.vocabulary = vocabulary
        self.logits: FloatArray = np.random.default_rng(1).random(vocabulary, np.float32)
        self.took_s = 0.0

    @property
    def free_states(self) -> int:
        return self.pool.capacity_blocks

    def open(self, sequence: Sequence) -> None:
        sequence.computed_tokens, sequence.hit = 0, MISS

    def close(self, sequence: Sequence) -> None:
        """There is nothing to take back."""

    def start_after(self, sequence: Sequence, plan: HitPlan, window: Buffer | None) -> None:
        sequence.computed_tokens, sequence.hit = plan.hit_tokens, plan

    def chunk_borders(self, sequence: Sequence) -> list[int]:
        return []

    def compute(
        self, parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        begun_s = clock()
        logits: list[FloatArray | None] = []
        for part in parts:
            part.sequence.computed_tokens = part.end
            logits.append(self.logits if part.end == len(part.sequence.token_ids) else None)
        self.took_s += clock() - begun_s
        return logits

    def window_anchor(self, sequence: Sequence) -> int | None:
        return None

    def copy_window(self, sequence: Sequence, anchor: int, into: memoryview) -> None:
        raise AssertionError("there are no windows")

    def pack_state(self, sequence: Sequence, into: memoryview | None) -> bytes:
        raise AssertionError("nothing is handed over")

    def unpack_state(self, sequence: Sequence, marks: bytes, state: Buffer | None) -> None:
        raise AssertionError("nothing is handed over")

    def open_block_bytes(self, sequence: Sequence) -> bytes:
        raise AssertionError("nothing is handed over")


def measure_steps(answers: int, steps: int, vocabulary: int) -> dict[str, object]:
    """Microseconds of steps in which so many answers grow by a token each."""
    # They do not begin at one time; the first ones must not end before the last steps.
    answer_tokens = steps + 2 * answers + 8
    tokens = PROMPT_TOKENS + answer_tokens
    runner = FixedLogitsRunner(
        pool_blocks=answers * (tokens // BLOCK_TOKENS + 2),
        context_tokens=tokens,
        vocabulary=vocabulary,
    )
    config = EngineConfig(sequences_max=answers, step_budget_s=60.0)
    engine = LLMEngine(runner, config=config, clock=clock)
    rng = random.Random(answers)
    for number in range(answers):
        prompt_ids = [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        engine.add_request(
            Request(request_id=f"{number}", prompt_ids=prompt_ids, max_tokens=answer_tokens)
        )
    while engine.status.decoding < answers:
        engine.step()
    step_s, own_s = [], []
    for _ in range(steps):
        runner.took_s = 0.0
        begun_s = clock()
        events = engine.step()
        took_s = clock() - begun_s
        assert len(events) == answers, "an answer did not grow"
        step_s.append(took_s)
        own_s.append(took_s - runner.took_s)
    engine.close()
    choosing_s = measure_choosing(runner.logits, answers, steps)
    return {
        "benchmark": "engine_step",
        "answers": answers,
        "steps": steps,
        "vocabulary": vocabulary,
        "step_us": in_us(statistics.median(step_s)),
        "step_p99_us": in_us(float(np.percentile(step_s, 99))),
        "choosing_us": in_us(choosing_s),
        "overhead_us": in_us(statistics.median(own_s) - choosing_s),
        "goal_us": 1_000,
    }


def measure_choosing(logits: FloatArray, answers: int, rounds: int) -> float:
    """Seconds that choosing a token for each answer takes, the median."""
    times_s = []
    for position in range(rounds):
        begun_s = clock()
        for _ in range(answers):
            choose_token(logits, GREEDY, position)
        times_s.append(clock() - begun_s)
    return statistics.median(times_s)


def in_us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def answer_all(engine: LocalEngine, rng: random.Random, requests: int) -> tuple[float, int]:
    """Answer new requests together; seconds and number of their steps, waiting not counted."""
    for _ in range(requests):
        ids = [rng.randrange(300, engine.runner.vocabulary - 64) for _ in range(SAVE_PROMPT_TOKENS)]
        engine.engine.add_request(
            Request(request_id=f"{rng.random()}", prompt_ids=ids, max_tokens=SAVE_ANSWER_TOKENS)
        )
    left, steps, took_s = requests, 0, 0.0
    while left:
        passes = len(engine.runner.passes)
        begun_s = clock()
        events = engine.engine.step(wait_s=1.0)
        if len(engine.runner.passes) > passes:
            took_s += clock() - begun_s
            steps += 1
        left -= sum(event.finish_reason is not None for event in events)
    engine.runner.forget()
    return took_s, steps


def measure_saves(model: str, socket: Path, rounds: int, own_core: int | None) -> dict[str, object]:
    """The same load without and with a sink, in turns that change their order."""
    tokens = SAVE_PROMPT_TOKENS + SAVE_ANSWER_TOKENS
    pool_blocks = 2 * SAVE_REQUESTS * (tokens // BLOCK_TOKENS + 2)
    config = EngineConfig()
    without_s, with_s = [], []
    with (
        open_local_engine(model, None, pool_blocks=pool_blocks, config=config) as plain,
        open_local_engine(model, socket, pool_blocks=pool_blocks, config=config) as saving,
    ):
        assert saving.sink is not None
        if own_core is not None:  # of this thread alone
            os.sched_setaffinity(0, {own_core})
        for number in range(rounds + 1):
            rng = random.Random(number)
            if number == 1:
                saving.sink.took_s = 0.0
            if number % 2:
                without, _ = answer_all(plain, rng, SAVE_REQUESTS)
            took_s, steps = answer_all(saving, rng, SAVE_REQUESTS)
            saving.flush()
            if number % 2 == 0:
                without, _ = answer_all(plain, rng, SAVE_REQUESTS)
            if number:  # the first round touches all memory
                without_s.append(without)
                with_s.append(took_s)
        sink_s = saving.sink.took_s
    ratios = np.array(with_s) / np.array(without_s)
    low, high = interval_of_median(ratios)
    return {
        "benchmark": "engine_save_delay",
        "model": saving.model,
        "requests": SAVE_REQUESTS,
        "rounds": rounds,
        "own_core": own_core is not None,
        "steps": steps,
        "without_sink_ms": round(statistics.median(without_s) * 1e3, 1),
        "with_sink_ms": round(statistics.median(with_s) * 1e3, 1),
        "of_without": round(float(np.median(ratios)), 4),
        "of_without_low": round(low, 4),
        "of_without_high": round(high, 4),
        "in_sink_share": round(sink_s / sum(with_s), 6),
        "in_sink_us_per_step": in_us(sink_s / rounds / steps),
        "goal_of_without": 1.01,
    }


def interval_of_median(values: FloatArray, resamples: int = 10_000) -> tuple[float, float]:
    """The interval of 95 % of the median, by resampling the values."""
    drawn = np.random.default_rng(1).choice(values, (resamples, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--vocabulary", type=int, default=2_048)
    parser.add_argument("--model", default="models/v41-mini", help="of which saving is measured")
    parser.add_argument("--rounds", type=int, default=9, help="of saving; 0 leaves it out")
    add_store_options(parser)
    parser.add_argument("--share-cores", action="store_true")
    options = parser.parse_args()
    set_thread_count(1)
    for answers in ANSWERS:
        line = measure_steps(answers, options.steps, options.vocabulary)
        print(json.dumps({**line, **describe_machine()}), flush=True)
    if options.rounds == 0:
        return
    cores = sorted(os.sched_getaffinity(0))
    has_own_core = len(cores) > 1 and not options.share_cores
    if has_own_core:  # inherited by every process and thread that begins from here on
        os.sched_setaffinity(0, cores[1:])
    with open_local_store(options.k, options.m) as socket:
        own_core = cores[0] if has_own_core else None
        line = measure_saves(options.model, socket, options.rounds, own_core)
        print(json.dumps({**line, **describe_machine()}), flush=True)


if __name__ == "__main__":
    main()
