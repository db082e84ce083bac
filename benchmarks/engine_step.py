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
12 local nodes, code 10+2, and by a second engine without one, the control, which shows what the
machine does by itself. They answer in turns of some seconds, in an order that changes. The steps of
an answer are the same in all: each is taken at its median over the rounds, so that what befalls
some steps of some rounds counts for nothing, and given is the ratio of the sums, by the clock and
by the engine's thread's time on its core, each with its interval of 95 % (resampled rounds); the
99th percentile of all steps; and the share of the time that the thread spent in the sink. 1 % is
the goal. That thread, which computes, has a core of its own, as it has on a GPU host: nodes, agent
and the thread that saves share the others. With `--share-cores` all run wherever they are put; then
the ratio also tells of the work of the store.
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
from collections.abc import Mapping
from collections.abc import Sequence as Run
from contextlib import ExitStack
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
from .median_interval import FloatTable, describe_ratio

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
    """An answer: seconds of each of its steps by the clock and on the core, waiting not counted."""

    took_s: list[float]
    cpu_s: list[float]


def answer_once(engine: LocalEngine, seed: int) -> Turn:
    """Answer a prompt that the store does not have."""
    rng = random.Random(seed)
    ids = [rng.randrange(300, engine.runner.vocabulary - 64) for _ in range(SAVE_PROMPT_TOKENS)]
    engine.engine.add_request(
        Request(request_id=f"{seed}", prompt_ids=ids, max_tokens=SAVE_ANSWER_TOKENS)
    )
    turn, is_answered = Turn([], []), False
    while not is_answered:
        passes = len(engine.runner.passes)
        begun_s, cpu_begun_s = clock(), time.thread_time()
        events = engine.engine.step(wait_s=1.0)
        if len(engine.runner.passes) > passes:
            turn.took_s.append(clock() - begun_s)
            turn.cpu_s.append(time.thread_time() - cpu_begun_s)
        is_answered = any(event.finish_reason is not None for event in events)
    engine.runner.forget()
    return turn


WITHOUT, AGAIN, SAVING = range(3)
"""No sink; another engine without one, the control; one that saves."""


def measure_saves(model: str, socket: Path, rounds: int, own_core: int | None) -> dict[str, object]:
    """The same load without a sink, without one again and with one, in turns that change order."""
    pool_blocks = 8 * ((SAVE_PROMPT_TOKENS + SAVE_ANSWER_TOKENS) // BLOCK_TOKENS + 2)
    config = EngineConfig()
    turns: dict[int, list[Turn]] = {WITHOUT: [], AGAIN: [], SAVING: []}
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                open_local_engine(
                    model,
                    socket if way == SAVING else None,
                    pool_blocks=pool_blocks,
                    config=config,
                )
            )
            for way in turns
        }
        sink = engines[SAVING].sink
        assert sink is not None
        if own_core is not None:  # of this thread alone
            os.sched_setaffinity(0, {own_core})
        for number in range(rounds + 1):
            if number == 1:  # the first round touches all memory
                sink.took_s = 0.0
                turns = {way: [] for way in turns}
            for way in random.Random(number).sample(list(turns), len(turns)):
                turns[way].append(answer_once(engines[way], number))
                engines[SAVING].flush()
        sink_s = sink.took_s
    return describe_saves(turns, sink_s) | {
        "model": engines[SAVING].model,
        "own_core": own_core is not None,
    }


def describe_saves(turns: Mapping[int, Run[Turn]], sink_s: float) -> dict[str, object]:
    """What saving does to steps, beside what a second engine of the same does."""
    took_s = {way: np.array([turn.took_s for turn in some]) for way, some in turns.items()}
    cpu_s = {way: np.array([turn.cpu_s for turn in some]) for way, some in turns.items()}
    rounds, steps = took_s[SAVING].shape
    ratios: dict[str, float] = {}
    for name, way in (("of_without", SAVING), ("control_of_without", AGAIN)):
        ratios |= describe_ratio(name, took_s[way], took_s[WITHOUT])
        ratios |= describe_ratio(f"cpu_{name}", cpu_s[way], cpu_s[WITHOUT])
    p99_ms = {way: round(float(np.percentile(it, 99)) * 1e3, 2) for way, it in took_s.items()}
    return {
        "benchmark": "engine_save_delay",
        "rounds": rounds,
        "steps": steps,
        "without_sink_ms": _typical_ms(took_s[WITHOUT]),
        "with_sink_ms": _typical_ms(took_s[SAVING]),
        **ratios,
        "step_p99_ms": {
            "without": p99_ms[WITHOUT],
            "control": p99_ms[AGAIN],
            "saving": p99_ms[SAVING],
        },
        "in_sink_share": round(sink_s / float(took_s[SAVING].sum()), 6),
        "in_sink_us_per_step": in_us(sink_s / took_s[SAVING].size),
        "goal_of_without": 1.01,
    }


def _typical_ms(times_s: FloatTable) -> float:
    """Of all steps of an answer, each at its median."""
    return round(float(np.median(times_s, axis=0).sum()) * 1e3, 1)


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
