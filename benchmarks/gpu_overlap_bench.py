"""What `gpu_overlap` measures with: a runner whose blocks are moved out, and in beside a pass."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch

from engine.kv.block_list import BlockList
from engine.kv.mover import SectionMover, Transfer, wait_to_end
from engine.model_runner import Part, WaitForSection
from engine.request import Request
from engine.runners.v41_runner import V41Runner, farthest_hit
from engine.sampling import FloatArray
from engine.sequence import Sequence
from engine.work_threads import WorkThreads
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import HitPlan

from .v41_shape import random_prompt

PASS_TOKENS = 32_768
"""Of a cold prompt, so that what a pass holds of it is bounded."""
DEADLINE_S = 30.0

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
        record = memoryview(b"")
        ends = {*range(PASS_TOKENS, length, PASS_TOKENS), hit_tokens, length}
        for end in sorted(ends):
            (logits,) = runner.compute([Part(sequence, end)])
            if end == hit_tokens:
                window = runner.copy_window(sequence, hit_tokens)
                record = window.memory.cpu().numpy().data
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
