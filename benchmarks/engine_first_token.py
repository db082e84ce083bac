"""Time to the first token of an answer: cold, after a hit, and after a hit with bounded replay.

Starts 12 local nodes, code 10+2, and an agent. One engine computes prompts and saves them, a second
one, whose pool is empty of them, finds them by the agent. Of a model with window state: `replay` is
the very prompt again, of whose hit the window state is not kept; `window` is a prompt behind whose
stored part it is, as in the next turn of a conversation. Of a dense model: `hit` is the very prompt
again. All prompts are new in each round; `rounds` are those whose hit came whole.

    python -m benchmarks.engine_first_token [--models models/v41-mini smollm2] [--rounds 5]

Prints JSON lines, medians in milliseconds: `first_token`, `queue`, `match`, `fetch` (from the order
until the last byte had come), `swap_in` (copies into the pool) and `compute` (passes, what they
waited for sections included, which is `waited` alone). The last three overlap: `fetch_hidden` and
`swap_in_hidden` are the shares of their time that lie within passes that did not stand still.
Baselines: `cold_first_token`, and `memcpy`, a bare copy of the hit's bytes.
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

from engine.engine_config import EngineConfig
from engine.request import Request
from engine.request_report import RequestReport
from kvstore.admin.machine import describe_machine
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import (
    WINDOW_RING_TOKENS,
    HitPlan,
    plan_dense_hit,
    plan_hit,
)

from .busy_time import Span, overlap_s, total_s
from .local_engine import (
    LocalEngine,
    add_store_options,
    clock,
    open_local_engine,
    open_local_store,
)

LENGTHS = (400, 700, 1_200, 1_900)
CONFIG = EngineConfig(step_budget_s=60.0)
"""A prompt is run in as few passes as its borders allow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer's first token; `hit_bytes` came from the store.

    `fetch` and `swap_in` are seconds: of the work, and of what of it was hidden.
    """

    report: RequestReport
    waited_s: float
    fetch: tuple[float, float]
    swap_in: tuple[float, float]
    hit_bytes: int


def ask(engine: LocalEngine, prompt_ids: list[int], name: str) -> Measured:
    """The first token of an answer, alone in the engine."""
    engine.runner.forget()
    _, report = engine.answer(Request(request_id=name, prompt_ids=prompt_ids, max_tokens=1))
    engine.flush()
    assert engine.source is not None
    events = engine.source.take_events()
    passes, waits = engine.runner.passes, engine.runner.waits
    fetches = [(e.start_s, e.end_s) for e in events if e.step == "fetch"]
    copies = [(e.start_s, e.end_s) for e in events if e.step == "copy"]
    stored_blocks = (report.hit_tokens + report.replay_tokens) // BLOCK_TOKENS
    return Measured(
        report=report,
        waited_s=total_s(waits),
        fetch=(total_s(fetches), hidden_s(fetches, passes, waits)),
        swap_in=(total_s(copies), hidden_s(copies, passes, waits)),
        hit_bytes=stored_blocks * engine.runner.namespace.layout.block_bytes,
    )


def hidden_s(work: list[Span], passes: list[Span], waits: list[Span]) -> float:
    """Seconds of `work` that lie in passes which were not waiting."""
    # A wait lies within its pass.
    return overlap_s(work, passes) - overlap_s(work, waits)


def hidden_share(work: list[tuple[float, float]]) -> float | None:
    """Of seconds of work, those that were hidden; None where there was none."""
    work_s, hidden = (sum(column) for column in zip(*work, strict=True))
    return round(hidden / work_s, 3) if work_s else None


def measure_round(
    writer: LocalEngine, reader: LocalEngine, length: int, rng: random.Random
) -> Iterator[tuple[str, Measured]]:
    """Each case once, on prompts that nobody has seen."""

    def new_prompt() -> list[int]:
        return [rng.randrange(300, reader.runner.vocabulary - 64) for _ in range(length)]

    name = f"{length}-{rng.random()}"
    prompt_ids = new_prompt()
    yield "cold", ask(writer, prompt_ids, f"cold-{name}")
    again = ask(reader, prompt_ids, f"again-{name}")
    blocks = length // BLOCK_TOKENS
    if reader.runner.window_layout is None:
        if got(again).hit_tokens == plan_dense_hit(length, blocks).hit_tokens:
            yield "hit", again
        return
    # Its window state was kept at the last border of 128, which is behind the longest hit's end.
    if got(again) == plan_hit(length, blocks, ()):
        yield "replay", again
    prompt_ids = new_prompt()
    border = (length - WINDOW_RING_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    ask(writer, prompt_ids[: border + 1], f"turn-{name}")
    turn = ask(reader, prompt_ids, f"window-{name}")
    if got(turn) == plan_hit(length, blocks, {border}):
        yield "window", turn


def got(measured: Measured) -> HitPlan:
    """The hit that an answer had, as a plan with window state where nothing was replayed."""
    hit_tokens, replay_tokens = measured.report.hit_tokens, measured.report.replay_tokens
    return HitPlan(hit_tokens, replay_tokens, None if replay_tokens else hit_tokens)


def memcpy_ms(size_bytes: int) -> float:
    """Milliseconds of a plain copy, the best of five."""
    # By views: bytes would be copied twice, by way of a temporary.
    source, target = memoryview(bytes(size_bytes)), memoryview(bytearray(size_bytes))
    times_s = []
    for _ in range(5):
        begun_s = clock()
        target[:] = source
        times_s.append(clock() - begun_s)
    return round(min(times_s) * 1e3, 3)


def describe(found: list[Measured], cold_s: float) -> dict[str, object]:
    """Medians of one case."""
    reports = [one.report for one in found]

    def median_ms(values: list[float]) -> float:
        return round(statistics.median(values) * 1e3, 2)

    first_token_s = statistics.median(report.ttft_s for report in reports)
    return {
        "hit_tokens": reports[0].hit_tokens,
        "replay_tokens": reports[0].replay_tokens,
        "first_token_ms": round(first_token_s * 1e3, 2),
        "queue_ms": median_ms([report.queue_s for report in reports]),
        "match_ms": median_ms([report.match_s for report in reports]),
        "fetch_ms": median_ms([report.fetch_s for report in reports]),
        "swap_in_ms": median_ms([report.swap_in_s for report in reports]),
        "compute_ms": median_ms([report.prefill_s for report in reports]),
        "waited_ms": median_ms([one.waited_s for one in found]),
        "fetch_hidden": hidden_share([one.fetch for one in found]),
        "swap_in_hidden": hidden_share([one.swap_in for one in found]),
        "hit_bytes": found[0].hit_bytes,
        "memcpy_ms": memcpy_ms(found[0].hit_bytes),
        "cold_first_token_ms": round(cold_s * 1e3, 2),
        "of_cold": round(first_token_s / cold_s, 3),
    }


def measure(model: str, socket: Path, lengths: list[int], rounds: int) -> None:
    """Prints the lines of one model."""
    rng = random.Random(1)
    pool_blocks = 2 * (max(lengths) // BLOCK_TOKENS + 2)
    with (
        open_local_engine(model, socket, pool_blocks=pool_blocks, config=CONFIG) as writer,
        open_local_engine(model, socket, pool_blocks=pool_blocks, config=CONFIG) as reader,
    ):
        list(measure_round(writer, reader, min(lengths), rng))  # first touches of all memory
        for length in lengths:
            cases: dict[str, list[Measured]] = {}
            for _ in range(rounds):
                for case, one in measure_round(writer, reader, length, rng):
                    cases.setdefault(case, []).append(one)
            cold_s = statistics.median(one.report.ttft_s for one in cases["cold"])
            for case, found in cases.items():
                line = {
                    "benchmark": "engine_first_token",
                    "model": writer.model,
                    "case": case,
                    "prompt_tokens": length,
                    "rounds": len(found),
                    **describe(found, cold_s),
                    **describe_machine(),
                }
                print(json.dumps(line), flush=True)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["models/v41-mini", "smollm2"])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    add_store_options(parser)
    parser.add_argument("--threads", type=int, default=1, help="of the tensor library (default 1)")
    options = parser.parse_args()
    if min(options.lengths) < WINDOW_RING_TOKENS + 2 * BLOCK_TOKENS:
        parser.error(f"--lengths: given {min(options.lengths)}, expected 390 or more: hits of all")
    set_thread_count(options.threads)
    with open_local_store(options.k, options.m) as socket:
        for model in options.models:
            measure(model, socket, options.lengths, options.rounds)


if __name__ == "__main__":
    main()
