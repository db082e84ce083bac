"""The ways that `swap_in` compares, over one pool and one arena: all movers that this machine can
have, and a copy of as many bytes that lie together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
import torch

from engine.block_pool import BlockPool
from engine.errors import EngineError
from engine.kv.block_list import BlockList
from engine.kv.cuda_mover import CudaMover
from engine.kv.cuda_runtime import CudaRuntime, open_runtime
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import SectionMover, Transfer, first_line, wait_to_end
from engine.kv.nixl_mover import NixlMover
from engine.kv.open_mover import list_makers
from engine.kv.piece_plan import StagingShape
from engine.kv.pinned import PinnedMemory, address_of
from engine.kv.section_kernels import TorchKernels, find_kernels
from engine.kv.staged_mover import StagedMover
from kvstore.arena.region import ArenaRegion
from kvstore.layout import BlockLayout

Direction: TypeAlias = Literal["in", "out"]
DIRECTIONS: tuple[Direction, ...] = ("in", "out")

GATE_S, GATE_MAX_S = 2e-3, 0.2
"""By then the host has queued all that is measured; more for a way whose last round took more."""
GPU_CYCLES_PER_S = 2e9
"""At most, so that a gate is rather too long."""


@dataclass(slots=True)
class Times:
    """Of one way and one direction, a value for each round. `gpu_s` is from a moment when all was
    queued until the last byte; `wall_s` from the first call until then; `issue_s` is the host's
    time for a section. `late` counts rounds in which the host had not queued all when the gate
    opened: their `gpu_s` is partly the host's."""

    gpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    issue_s: list[float] = field(default_factory=list)
    late: int = 0


@dataclass(slots=True)
class Bench:
    """A pool, an arena as an agent has one, and the movers between them."""

    device: torch.device
    layout: BlockLayout
    pool: BlockPool
    arena: memoryview
    movers: dict[str, SectionMover]
    problems: dict[str, str]
    runtime: CudaRuntime | None
    target: torch.Tensor
    """Where bytes go to that lie together."""

    @property
    def widths(self) -> list[int]:
        return [section.bytes for section in self.layout.sections]

    def parts(self, first_byte: int, blocks: int) -> list[memoryview]:
        """The sections of a run of so many blocks that begins there."""
        parts, at = [], first_byte
        for width in self.widths:
            parts.append(self.arena[at : at + blocks * width])
            at += blocks * width
        return parts

    def run_offset(self, number: int, blocks: int) -> int:
        """Runs take turns over the arena: what was moved before is not in the CPU's cache."""
        run_bytes = blocks * self.layout.block_bytes
        places = max(1, self.arena.nbytes // run_bytes)
        return number % places * run_bytes // 4096 * 4096

    # What is timed --------------------------------------------------------------------------------

    def start(self, way: str, direction: Direction, ids: list[int], first: int) -> list[Transfer]:
        mover, blocks = self.movers[way], BlockList(ids)
        move = mover.to_pool if direction == "in" else mover.from_pool
        parts = self.parts(first, len(ids))
        return [move(part, section, blocks) for section, part in enumerate(parts)]

    def copy_together(self, direction: Direction, first: int, size: int) -> None:
        """As many bytes, with one copy: in the current stream of a GPU."""
        part = self.arena[first : first + size]
        if self.runtime is None:
            here, there = np.frombuffer(part, np.uint8), self.target[:size].numpy()
            np.copyto(*((there, here) if direction == "in" else (here, there)))
            return
        pair = (self.target.data_ptr(), address_of(part))
        target, source = pair if direction == "in" else pair[::-1]
        self.runtime.copy(target, source, size, torch.cuda.current_stream().cuda_stream)

    def time_wall(self, run: Callable[[], object]) -> float:
        self.settle()
        begun_s = time.perf_counter()
        run()
        self.settle()
        return time.perf_counter() - begun_s

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_mover(
        self, times: Times, way: str, direction: Direction, ids: list[int], first: int
    ) -> None:
        transfers: list[Transfer] = []
        wall_s = self.time_wall(
            lambda: (
                transfers.extend(self.start(way, direction, ids, first))
                if self.device.type == "cuda"
                else wait_to_end(*self.start(way, direction, ids, first))
            )
        )
        wait_to_end(*transfers)
        times.wall_s.append(wall_s)
        mover = self.movers[way]
        if not isinstance(mover, CudaMover):
            times.gpu_s.append(wall_s)
            times.issue_s.append(wall_s / len(self.widths))
            return

        def queue() -> None:
            begun_s = time.perf_counter()
            transfers.extend(self.start(way, direction, ids, first))
            times.issue_s.append((time.perf_counter() - begun_s) / len(self.widths))
            for transfer in transfers:
                transfer.order_compute()

        last_s = times.issue_s[-1] * len(self.widths) if times.issue_s else wall_s
        self._time_gpu(times, queue, mover.streams, gate_s=GATE_S + 2 * last_s)
        wait_to_end(*transfers)

    def time_together(
        self,
        times: Times,
        direction: Direction,
        blocks: int,
        first: int,
        *,
        by_section: bool = False,
    ) -> None:
        widths = self.widths if by_section else [self.layout.block_bytes]

        def copy() -> None:
            at = first
            for width in widths:
                self.copy_together(direction, at, blocks * width)
                at += blocks * width

        times.wall_s.append(self.time_wall(copy))
        if self.device.type == "cuda":
            self._time_gpu(times, copy, (), gate_s=GATE_S)
        else:
            times.gpu_s.append(times.wall_s[-1])

    def _time_gpu(
        self,
        times: Times,
        queue: Callable[[], None],
        streams: tuple[torch.cuda.Stream, ...],
        *,
        gate_s: float,
    ) -> None:
        """Seconds from a gate, which opens when all is queued, until the current stream is through
        with it; `streams` wait for the gate too."""
        begin, end = make_timer(), make_timer()
        stream = torch.cuda.current_stream(self.device)
        self.settle()
        cycles = int(min(gate_s, GATE_MAX_S) * GPU_CYCLES_PER_S)
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        begin.record(stream)
        for other in streams:
            other.wait_event(begin)
        queue()
        end.record(stream)
        times.late += begin.query()  # type: ignore[no-untyped-call]
        self.settle()
        times.gpu_s.append(begin.elapsed_time(end) / 1e3)

    def check(self, way: str) -> None:
        """That the bytes get where they belong, and back. Raises AssertionError."""
        blocks = min(64, self.pool.capacity_blocks)
        rng = np.random.default_rng(5)
        ids = rng.permutation(self.pool.capacity_blocks)[:blocks].tolist()
        parts = self.parts(0, blocks)
        contents = [rng.integers(0, 256, part.nbytes, np.uint8) for part in parts]
        for part, content in zip(parts, contents, strict=True):
            part[:] = content.data
        wait_to_end(*self.start(way, "in", ids, 0))
        at = 0
        for width, content in zip(self.widths, contents, strict=True):
            found = self.pool.memory[ids, at : at + width].cpu().numpy().reshape(-1)
            assert np.array_equal(found, content), f"{way}: other bytes in the pool"
            at += width
        for part in parts:
            part[:] = bytes(part.nbytes)
        wait_to_end(*self.start(way, "out", ids, 0))
        for part, content in zip(parts, contents, strict=True):
            assert bytes(part) == content.tobytes(), f"{way}: other bytes in the arena"


def make_timer() -> torch.cuda.Event:
    """An event that knows when it was."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def ratio(times: list[float], of: list[float]) -> float:
    """How fast one way is against another that took turns with it: the median over the rounds."""
    return round(median(b / a for a, b in zip(times, of, strict=True)), 4)


@contextmanager
def open_arena(size_bytes: int) -> Iterator[memoryview]:
    """Shared memory as an agent makes it."""
    descriptor = ArenaRegion.create(-(-size_bytes // 4096) * 4096)
    try:
        region = ArenaRegion(descriptor)
    finally:
        os.close(descriptor)
    with region:
        yield region.view


@contextmanager
def open_bench(
    device: torch.device,
    layout: BlockLayout,
    capacity_blocks: int,
    arena: memoryview,
    pinned: PinnedMemory | None,
    shapes: dict[str, StagingShape],
) -> Iterator[Bench]:
    """`shapes`: staged movers beside the usual one, by name."""
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=capacity_blocks, device=device)
    target = torch.empty(capacity_blocks * layout.block_bytes, dtype=torch.uint8, device=device)
    target.zero_()
    movers: dict[str, SectionMover] = {}
    makers, problems = _makers(pool, layout, arena, pinned, shapes)
    for name, make in makers.items():
        try:
            movers[name] = make()
        # What PyTorch raises for a device that is full is a RuntimeError.
        except (EngineError, ImportError, RuntimeError, OSError) as error:
            problems[name] = first_line(error)
    runtime = None if pinned is None else open_runtime()
    bench = Bench(device, layout, pool, arena, movers, problems, runtime, target)
    try:
        yield bench
    finally:
        for mover in movers.values():
            mover.close()


def _makers(
    pool: BlockPool,
    layout: BlockLayout,
    arena: memoryview,
    pinned: PinnedMemory | None,
    shapes: dict[str, StagingShape],
) -> tuple[dict[str, Callable[[], SectionMover]], dict[str, str]]:
    """An engine's, and some more; and why some cannot be had."""
    if pinned is None:
        return {
            MemcpyMover.name: partial(MemcpyMover, pool, layout),
            NixlMover.name: partial(
                NixlMover, pool, layout, arena=lambda: arena, clock=time.perf_counter
            ),
        }, {}
    kernels = find_kernels(pool.memory, [section.bytes for section in layout.sections])
    # With NIXL also where it is not the way of a NIC.
    makers, problems = list_makers(
        pool, layout, pinned, lambda: arena, kernels, clock=time.perf_counter
    )
    staged = makers[StagedMover.name]
    ways = {name: partial(staged, shape=shape) for name, shape in shapes.items()}
    ways["staged_by_torch"] = partial(staged, kernels=TorchKernels())
    return {**makers, **ways}, problems
