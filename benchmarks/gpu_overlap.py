"""Time to the first token after a hit, with the cache swapped in beside the forward.

A prompt of the scaled model (`v41_shape`) is computed once and its blocks moved out to page-locked
memory, layer by layer. Then the same prompt is asked with the longest hit it can have, in turns:

    resident    the blocks are in the pool
    overlapped  a thread has each section moved in, and a layer waits for its own section alone
    serial      everything is moved in, then the forward begins

    python -m benchmarks.gpu_overlap [--device cuda] [--lengths 8192 32768 131072] [--rounds 15]
                                     [--profile FOLDER]

Prints JSON lines, medians in milliseconds from the beginning of the sequence until its logits are
on the host; `of_resident` is the ratio that counts. `equal_bits`: whether the logits are those of
the cold prompt, bit by bit, in every round. `--profile` writes what the GPU did in one overlapped
round of the longest prompt as a picture and as the trace it was made of. A length that fails
prints its error, and the next one goes on.
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import gzip
import json
import mmap
import statistics
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

import numpy as np
import torch

from engine.compute_device import choose_device
from engine.garbage import freeze_loaded_objects
from engine.kv.open_mover import open_mover
from engine.model_runner import wait_for_nothing
from engine.sampling import FloatArray
from kvstore.layout import BLOCK_TOKENS

from .gpu_overlap_bench import DEADLINE_S, Bench, StoredPrompt, Swap, clock
from .timeline import draw, read_lanes
from .v41_shape import Size, make_runner

LENGTHS = (8192, 32_768, 131_072)
WARM_ROUNDS = 1


@dataclass(slots=True)
class Case:
    """A way to the first token; `run` returns its logits."""

    run: Callable[[], FloatArray]
    times_s: list[float]
    is_equal: bool = True

    def measure(self, expected: FloatArray) -> None:
        begun_s = clock()
        logits = self.run()
        self.times_s.append(clock() - begun_s)
        self.is_equal &= bool(np.array_equal(logits, expected))


class Rounds:
    """The three ways of one prompt, over blocks of their own."""

    def __init__(self, bench: Bench, prompt: StoredPrompt) -> None:
        pool = bench.runner.pool
        stored = prompt.plan.hit_tokens // BLOCK_TOKENS
        self._bench = bench
        self._prompt = prompt
        tail = pool.allocate(len(prompt.block_ids) - stored)
        # Every other one of twice as many: a pool that has been in use has no long runs left.
        doubled = pool.allocate(2 * stored)
        pool.release(doubled[1::2])
        self._target = doubled[::2]
        self._given = [*tail, *self._target]
        self._resident_ids = [*prompt.block_ids[:stored], *tail]
        self._swapped_ids = [*self._target, *tail]
        self.cases = {
            "resident": Case(self._run_resident, []),
            "overlapped": Case(self.run_overlapped, []),
            "serial": Case(self._run_serial, []),
        }

    def close(self) -> None:
        self._bench.runner.pool.release([*self._given, *self._prompt.block_ids])

    def _run_resident(self) -> FloatArray:
        return self._bench.first_token(self._prompt, self._resident_ids, wait_for_nothing)

    def run_overlapped(self, mark: Callable[[int], None] = lambda section: None) -> FloatArray:
        swap = Swap(self._bench, self._prompt, self._target)
        swap.start(self._bench.thread)

        def wait_for_section(section: int) -> None:
            swap.wait_for_section(section)
            mark(section)

        logits = self._bench.first_token(self._prompt, self._swapped_ids, wait_for_section)
        # As an engine does before it tells of a token.
        swap.wait_for_all()
        return logits

    def _run_serial(self) -> FloatArray:
        swap = Swap(self._bench, self._prompt, self._target)
        swap.start(self._bench.thread)
        swap.wait_for_all()
        return self._bench.first_token(self._prompt, self._swapped_ids, wait_for_nothing)

    def measure(self, rounds: int, seconds: float) -> None:
        """Each way once a round, until the time is over."""
        for number in range(WARM_ROUNDS + rounds):
            if number == WARM_ROUNDS:
                end_s = clock() + seconds
                for case in self.cases.values():
                    case.times_s.clear()
            # Bytes of the round before must not pass for those of this one.
            self._bench.runner.pool.memory[
                torch.tensor(self._target, device=self._bench.runner.pool.device)
            ] = 255
            turn = list(self.cases.values())
            for case in turn[number % 3 :] + turn[: number % 3]:
                case.measure(self._prompt.logits)
            if number >= WARM_ROUNDS and clock() > end_s:
                return


class SectionMarks:
    """Marks in a profile: what follows the wait for a section, until the next one."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._begin("layers before the first owner")

    def enter(self, section: int) -> None:
        self.close()
        self._begin(f"layers from section {section} on")

    def close(self) -> None:
        self._open.close()

    def _begin(self, name: str) -> None:
        self._open.enter_context(torch.profiler.record_function(name))


def profile(rounds: Rounds, folder: Path, title: str) -> None:
    """One overlapped round as a trace and a picture."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        marks = SectionMarks()
        rounds.run_overlapped(marks.enter)
        marks.close()
    folder.mkdir(parents=True, exist_ok=True)
    trace_path = folder / "overlap-trace.json"
    profiler.export_chrome_trace(str(trace_path))
    text = trace_path.read_text()
    lanes = read_lanes(json.loads(text))
    (folder / "overlap.png").write_bytes(draw(lanes, title))
    (folder / "overlap-trace.json.gz").write_bytes(gzip.compress(text.encode()))
    trace_path.unlink()


def emit(**line: object) -> None:
    print(json.dumps({"benchmark": "gpu_overlap", **line}), flush=True)


def report(bench: Bench, prompt: StoredPrompt, rounds: Rounds) -> None:
    medians = {name: statistics.median(case.times_s) * 1e3 for name, case in rounds.cases.items()}
    swapped_blocks = prompt.plan.hit_tokens // BLOCK_TOKENS
    emit(
        prompt_tokens=len(prompt.prompt_ids),
        hit_tokens=prompt.plan.hit_tokens,
        swapped_bytes=swapped_blocks * bench.runner.pool.block_bytes,
        mover=bench.mover.name,
        rounds=len(rounds.cases["resident"].times_s),
        cold_ms=round(prompt.cold_s * 1e3, 1),
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        spread_ms={
            name: [round(t * 1e3, 1) for t in sorted(case.times_s)][
                :: max(1, len(case.times_s) // 8)
            ]
            for name, case in rounds.cases.items()
        },
        of_resident=round(medians["overlapped"] / medians["resident"], 4),
        serial_of_resident=round(medians["serial"] / medians["resident"], 4),
        equal_bits={name: case.is_equal for name, case in rounds.cases.items()},
    )


def measure_length(bench: Bench, length: int, options: argparse.Namespace) -> None:
    prompt = bench.store(length)
    rounds = Rounds(bench, prompt)
    try:
        rounds.measure(options.rounds, options.seconds)
        report(bench, prompt, rounds)
        if options.profile is not None and length == max(options.lengths):
            profile(rounds, options.profile, f"first token of {length} tokens, {bench.mover.name}")
    finally:
        rounds.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("scaled", "tiny"), default="scaled")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=15, help="of each length, at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="for the rounds of a length")
    parser.add_argument("--threads", type=int, default=None, help="of the tensor library")
    parser.add_argument("--profile", type=Path, help="folder for a picture and a trace")
    options = parser.parse_args()
    if min(options.lengths) < 3 * BLOCK_TOKENS:
        parser.error("--lengths: expected 384 or more, for a hit of a block at least")
    set_thread_count(options.threads)
    size: Size = options.size
    blocks = max(options.lengths) // BLOCK_TOKENS + 2
    runner = make_runner(
        size, choose_device(options.device), pool_blocks=3 * blocks + 8, state_slots=2
    )
    arena = memoryview(mmap.mmap(-1, blocks * runner.pool.block_bytes))
    layout = runner.namespace.layout
    freeze_loaded_objects()
    with open_mover(runner.pool, layout, lambda: arena, clock=clock) as opened:
        emit(what="mover", device=str(runner.pool.device), **opened.describe())
        bench = Bench(runner, opened.mover, arena)
        for length in sorted(options.lengths):
            try:
                measure_length(bench, length, options)
            except Exception:
                # The other lengths are worth the machine's time.
                emit(prompt_tokens=length, error=traceback.format_exc())
        assert bench.thread.close(DEADLINE_S)


if __name__ == "__main__":
    main()
