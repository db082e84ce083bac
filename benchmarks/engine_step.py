"""What an engine adds to the model: microseconds of its own a step, and the delay of saving.

    python -m benchmarks.engine_step [--steps 500] [--sampled 20] [--model models/v41-mini]
        [--rounds 60] [--share-cores]

Prints JSON lines. `step`: the runner returns fixed logits at once, so a step of 1, 8 or 64 answers
is the engine's own work; `choosing` is what a bare loop over the same logits takes to choose as
many tokens, and `overhead` the step without the runner and without choosing: 1 ms at 64 is the
goal. `sampled`: what a step of 64 answers takes to choose its tokens from a vocabulary of 129,280,
greedy and sampled, from logits of which few stand out, as a model's do; and from flat ones, the
worst there are; as many steps as `--sampled` says. `save_delay`: the same request answered by the
model of the folder, without a sink and with one that saves blocks and window state by an agent into
12 local nodes, code 10+2, in turns of some seconds, so that a machine that gets slower and
faster by the minute does so for both; now the one first and now the other. Given are the medians
over the rounds of two ratios, of the time of all steps and of the engine's thread's time on its
core in them, each with the interval of 95 % of that median (resampled rounds), and the share of the
time that the thread spent in the sink; 1 % is the goal. That thread, which computes, has a core of
its own, as it has on a GPU host: nodes, agent and the thread that saves share the others. With
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
import time
from collections.abc import Sequence as Run
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

from engine.block_pool import BlockPool
from engine.engine_config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_runner import Buffer, Part, WaitForSection, Window, wait_for_nothing
from engine.request import Request
from engine.sampling import GREEDY, FloatArray, Sampling, choose_token
from engine.sequence import Sequence
from engine.window_record import WindowRecord
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
from .median_interval import describe_median

ANSWERS = (1, 8, 64)
SAMPLED_ANSWERS, SAMPLED_VOCABULARY = 64, 129_280
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=0.8, top_k=50),
    Sampling(temperature=0.8),
)
PROMPT_TOKENS = 100
SAVE_PROMPT_TOKENS, SAVE_ANSWER_TOKENS = 520, 140


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

    def start_after(self, sequence: Sequence, plan: HitPlan, window: Window | None) -> None:
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

    def copy_window(self, sequence: Sequence, anchor: int) -> WindowRecord:
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


def measure_sampled(steps: int) -> list[dict[str, object]]:
    """Microseconds of choosing in a step, for each way to choose and two shapes of logits."""
    rng = np.random.default_rng(1)
    shape = (SAMPLED_ANSWERS, SAMPLED_VOCABULARY)
    flat: FloatArray = rng.random(shape, np.float32)
    # Most far below: of a mass of 0.95 some tens are left.
    spread: FloatArray = 3 * rng.standard_normal(shape, np.float32)
    spread[:, :100] += np.linspace(16, 4, 100, dtype=np.float32)
    return [
        _measure_sampled(name, logits, sampling, steps)
        for name, logits in (("spread", spread), ("flat", flat))
        for sampling in SAMPLINGS
    ]


def _measure_sampled(
    name: str, logits: FloatArray, sampling: Sampling, steps: int
) -> dict[str, object]:
    times_s = []
    for position in range(steps):
        begun_s = clock()
        for seed, row in enumerate(logits):
            choose_token(row, replace(sampling, seed=seed), position)
        times_s.append(clock() - begun_s)
    return {
        "benchmark": "engine_sampled",
        "answers": len(logits),
        "steps": steps,
        "vocabulary": logits.shape[1],
        "logits": name,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "choosing_us": in_us(statistics.median(times_s)),
        "choosing_p99_us": in_us(float(np.percentile(times_s, 99))),
    }


def in_us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer: time of its steps by the clock and on the core, waiting not counted."""

    took_s: float
    cpu_s: float
    steps: int


def answer_once(engine: LocalEngine, seed: int) -> Turn:
    """Answer a prompt that the store does not have."""
    rng = random.Random(seed)
    ids = [rng.randrange(300, engine.runner.vocabulary - 64) for _ in range(SAVE_PROMPT_TOKENS)]
    engine.engine.add_request(
        Request(request_id=f"{seed}", prompt_ids=ids, max_tokens=SAVE_ANSWER_TOKENS)
    )
    steps, took_s, cpu_s, is_answered = 0, 0.0, 0.0, False
    while not is_answered:
        passes = len(engine.runner.passes)
        begun_s, cpu_begun_s = clock(), time.thread_time()
        events = engine.engine.step(wait_s=1.0)
        if len(engine.runner.passes) > passes:
            took_s += clock() - begun_s
            cpu_s += time.thread_time() - cpu_begun_s
            steps += 1
        is_answered = any(event.finish_reason is not None for event in events)
    engine.runner.forget()
    return Turn(took_s, cpu_s, steps)


def measure_saves(model: str, socket: Path, rounds: int, own_core: int | None) -> dict[str, object]:
    """The same load without and with a sink, in turns that change their order."""
    pool_blocks = 8 * ((SAVE_PROMPT_TOKENS + SAVE_ANSWER_TOKENS) // BLOCK_TOKENS + 2)
    config = EngineConfig()
    without: list[Turn] = []
    saved: list[Turn] = []
    with (
        open_local_engine(model, None, pool_blocks=pool_blocks, config=config) as plain,
        open_local_engine(model, socket, pool_blocks=pool_blocks, config=config) as saving,
    ):
        assert saving.sink is not None
        if own_core is not None:  # of this thread alone
            os.sched_setaffinity(0, {own_core})
        for number in range(rounds + 1):
            if number == 1:  # the first round touches all memory
                saving.sink.took_s = 0.0
                without.clear()
                saved.clear()
            if number % 2:
                without.append(answer_once(plain, number))
            saved.append(answer_once(saving, number))
            saving.flush()
            if number % 2 == 0:
                without.append(answer_once(plain, number))
        sink_s = saving.sink.took_s
    return {
        "benchmark": "engine_save_delay",
        "model": saving.model,
        "rounds": rounds,
        "own_core": own_core is not None,
        "steps": saved[0].steps,
        "without_sink_ms": round(statistics.median(turn.took_s for turn in without) * 1e3, 1),
        "with_sink_ms": round(statistics.median(turn.took_s for turn in saved) * 1e3, 1),
        **describe_median(
            "of_without", [a.took_s / b.took_s for a, b in zip(saved, without, strict=True)]
        ),
        **describe_median(
            "cpu_of_without", [a.cpu_s / b.cpu_s for a, b in zip(saved, without, strict=True)]
        ),
        "in_sink_share": round(sink_s / sum(turn.took_s for turn in saved), 6),
        "in_sink_us_per_step": in_us(sink_s / sum(turn.steps for turn in saved)),
        "goal_of_without": 1.01,
    }


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sampled", type=int, default=20, help="steps; 0 leaves it out")
    parser.add_argument("--vocabulary", type=int, default=2_048)
    parser.add_argument("--model", default="models/v41-mini", help="of which saving is measured")
    parser.add_argument("--rounds", type=int, default=60, help="of saving; 0 leaves it out")
    add_store_options(parser)
    parser.add_argument("--share-cores", action="store_true")
    options = parser.parse_args()
    set_thread_count(1)
    for answers in ANSWERS:
        line = measure_steps(answers, options.steps, options.vocabulary)
        print(json.dumps({**line, **describe_machine()}), flush=True)
    for line in measure_sampled(options.sampled) if options.sampled else ():
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
