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
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from engine.threads import prepare_environment, set_thread_count

prepare_environment()

import numpy as np
import torch

from engine.garbage import freeze_loaded_objects
from engine.kv.block_list import BlockList
from engine.kv.mover import SectionMover, Transfer, wait_to_end
from engine.kv.open_mover import open_mover
from engine.load import choose_device
from engine.model_runner import Part, WaitForSection, wait_for_nothing
from engine.request import Request
from engine.runners.v41_runner import V41Runner, farthest_hit
from engine.sampling import FloatArray
from engine.sequence import Sequence
from engine.work_threads import WorkThreads
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import HitPlan

from .timeline import draw, read_lanes
from .v41_shape import Size, make_runner, random_prompt

LENGTHS = (8192, 32_768, 131_072)
PASS_TOKENS = 32_768
"""Of a cold prompt, so that what a pass holds of it is bounded."""
DEADLINE_S = 30.0
WARM_ROUNDS = 1

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt that was computed, with what a store would have of it."""

    prompt_ids: list[int]
    plan: HitPlan
    window: memoryview
    logits: FloatArray
    block_ids: list[int]
    cold_s: float


class Swap:
    """One load's swap-in: `start` lets a thread begin it, `wait_for_section` is a pass's."""

    def __init__(self, bench: Bench, prompt: StoredPrompt, block_ids: list[int]) -> None:
        self._bench = bench
        self._blocks = BlockList(block_ids)
        self._after = bench.mover.mark_compute()
        self._sections = len(bench.runner.namespace.layout.sections)
        self._started = [Event() for _ in range(self._sections)]
        self._transfers: list[Transfer] = []

    def start(self, thread: WorkThreads) -> None:
        assert thread.submit(self._start_all)

    def _start_all(self) -> None:
        for section in range(self._sections):
            part = self._bench.part(section, len(self._blocks))
            self._transfers.append(
                self._bench.mover.to_pool(part, section, self._blocks, after=self._after)
            )
            self._started[section].set()

    def wait_for_section(self, section: int) -> None:
        assert self._started[section].wait(DEADLINE_S), f"section {section} was never started"
        self._transfers[section].order_compute()

    def wait_for_all(self) -> None:
        for started in self._started:
            assert started.wait(DEADLINE_S)
        wait_to_end(*self._transfers)


class Bench:
    """A runner, a mover, and memory of the host that stands for the arena."""

    def __init__(self, runner: V41Runner, mover: SectionMover, arena: memoryview) -> None:
        self.runner = runner
        self.mover = mover
        self.thread = WorkThreads("swap-in", count=1, clock=clock)
        self._arena = arena

    def part(self, section: int, blocks: int) -> memoryview:
        """A section of the run, which is section after section."""
        sections = self.runner.namespace.layout.sections
        first = sum(one.bytes for one in sections[:section]) * blocks
        return self._arena[first : first + sections[section].bytes * blocks]

    def open(self, prompt_ids: list[int], block_ids: list[int]) -> Sequence:
        sequence = Sequence(Request(request_id="r", prompt_ids=prompt_ids, max_tokens=1))
        sequence.block_ids = block_ids
        self.runner.open(sequence)
        return sequence

    def store(self, length: int) -> StoredPrompt:
        """Compute a prompt, and move the blocks of its longest hit out."""
        runner = self.runner
        prompt_ids = random_prompt(length, seed=length)
        hit_tokens = farthest_hit(length)
        block_ids = runner.pool.allocate(-(-length // BLOCK_TOKENS))
        begun_s = clock()
        sequence = self.open(prompt_ids, block_ids)
        record = memoryview(bytearray(runner.window_layout.block_bytes))  # type: ignore[union-attr]
        ends = {*range(PASS_TOKENS, length, PASS_TOKENS), hit_tokens, length}
        for end in sorted(ends):
            (logits,) = runner.compute([Part(sequence, end)])
            if end == hit_tokens:
                runner.copy_window(sequence, hit_tokens, record)
        cold_s = clock() - begun_s
        assert logits is not None
        runner.close(sequence)
        self._move_out(block_ids[: hit_tokens // BLOCK_TOKENS])
        plan = HitPlan(hit_tokens, 0, hit_tokens)
        return StoredPrompt(prompt_ids, plan, record, logits, block_ids, cold_s)

    def _move_out(self, block_ids: list[int]) -> None:
        """Into the arena, and compare: what is measured has to be the right bytes."""
        after = self.mover.mark_compute()
        sections = self.runner.namespace.layout.sections
        parts = [self.part(number, len(block_ids)) for number in range(len(sections))]
        wait_to_end(
            *(
                self.mover.from_pool(part, number, block_ids, after=after)
                for number, part in enumerate(parts)
            )
        )
        at = 0
        blocks = self.runner.pool.memory[torch.tensor(block_ids, device=self.runner.pool.device)]
        for section, part in zip(sections, parts, strict=True):
            expected = blocks[:, at : at + section.bytes].cpu().numpy().reshape(-1)
            assert np.array_equal(np.frombuffer(part, np.uint8), expected), section
            at += section.bytes

    def first_token(
        self, prompt: StoredPrompt, block_ids: list[int], wait_for_section: WaitForSection
    ) -> FloatArray:
        sequence = self.open(prompt.prompt_ids, block_ids)
        self.runner.start_after(sequence, prompt.plan, prompt.window)
        part = Part(sequence, len(prompt.prompt_ids))
        (logits,) = self.runner.compute([part], wait_for_section=wait_for_section)
        self.runner.close(sequence)
        assert logits is not None
        return logits


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
