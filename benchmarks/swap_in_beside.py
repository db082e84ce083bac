"""What swap-in that never stops costs a forward beside it: rows of `swap_in`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from threading import Event, Thread
from typing import Any

import torch

from engine.kv.mover import Transfer, wait_to_end

from .swap_in_ways import Bench

MATRIX = 8192
PRODUCTS = 24
ROUNDS, ROUNDS_MIN = 9, 3
SECONDS = 12.0
LOAD_BLOCKS = 600
LOADS_UNDER_WAY = 2
"""So many are queued at a time: the bus is never without work."""
PROMPT_TOKENS = 8192


def beside_rows(bench: Bench, ways: Sequence[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """One call for each row: a forward, with each way beside it."""
    for name, make in (("bf16 products", _products), ("v41 forward", _v41_forward)):
        yield partial(_row, bench, ways, name, make)


def _row(
    bench: Bench,
    ways: Sequence[str],
    name: str,
    make: Callable[[torch.device], Callable[[], None]],
) -> dict[str, Any]:
    forward = make(bench.device)
    ways = [way for way in ways if way in bench.movers]
    alone: list[float] = []
    beside: dict[str, list[float]] = {way: [] for way in ways}
    moved: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2):
        forward()
    end_s = time.perf_counter() + SECONDS
    for number in range(ROUNDS):
        if number >= ROUNDS_MIN and time.perf_counter() > end_s:
            break
        alone.append(_time(bench, forward))
        for way in ways:
            with_loads = _Loads(bench, way)
            beside[way].append(_time(bench, forward))
            moved[way].append(with_loads.stop())
    alone_s = median(alone)
    return {
        "forward": name,
        "alone_ms": round(alone_s * 1e3, 3),
        "spread": round((max(alone) - min(alone)) / alone_s, 4),
        **{
            f"slowed_by_{way}": round(
                median(b / a for a, b in zip(alone, beside[way], strict=True)) - 1, 4
            )
            for way in ways
        },
        **{f"gib_per_s_{way}": round(median(moved[way]), 1) for way in ways},
    }


def _time(bench: Bench, forward: Callable[[], None]) -> float:
    # Not of the whole device: swap-in goes on.
    torch.cuda.current_stream(bench.device).synchronize()
    begun_s = time.perf_counter()
    forward()
    torch.cuda.current_stream(bench.device).synchronize()
    return time.perf_counter() - begun_s


class _Loads:
    """A thread that moves blocks in as fast as the bus lets it."""

    def __init__(self, bench: Bench, way: str) -> None:
        self._bench = bench
        self._way = way
        self._is_over = Event()
        self._has_begun = Event()
        self._loads = 0
        self._begun_s = 0.0
        self._thread = Thread(target=self._run)
        self._thread.start()
        assert self._has_begun.wait(10.0), "no load has ended"

    def _run(self) -> None:
        capacity = self._bench.pool.capacity_blocks
        blocks = min(LOAD_BLOCKS, capacity)
        ids = torch.randperm(capacity)[:blocks].tolist()
        under_way: list[list[Transfer]] = []
        for number in itertools.count():
            first = self._bench.run_offset(number, blocks)
            under_way.append(self._bench.start(self._way, "in", ids, first))
            if len(under_way) < LOADS_UNDER_WAY:
                continue
            wait_to_end(*under_way.pop(0))
            if not self._has_begun.is_set():
                self._begun_s = time.perf_counter()
                self._has_begun.set()
            else:
                self._loads += 1
            if self._is_over.is_set():
                break
        for transfers in under_way:
            wait_to_end(*transfers)

    def stop(self) -> float:
        """GiB a second that it has moved."""
        seconds, loads = time.perf_counter() - self._begun_s, self._loads
        self._is_over.set()
        self._thread.join()
        blocks = min(LOAD_BLOCKS, self._bench.pool.capacity_blocks)
        return loads * blocks * self._bench.layout.block_bytes / seconds / 2**30


def _products(device: torch.device) -> Callable[[], None]:
    """Matrix products, each of the one before: what a dense forward mostly is."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (MATRIX, MATRIX)
    left = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    rows = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    left /= MATRIX**0.5
    pair = [rows, torch.empty_like(rows)]

    def forward() -> None:
        for number in range(PRODUCTS):
            torch.matmul(left, pair[number % 2], out=pair[1 - number % 2])

    return forward


def _v41_forward(device: torch.device) -> Callable[[], None]:
    """A prompt of the model of V4.1's shape, from nothing to its logits."""
    from engine.model_runner import Part
    from engine.request import Request
    from engine.sequence import Sequence as TokenSequence

    from .v41_shape import make_runner, random_prompt

    blocks = PROMPT_TOKENS // 128 + 1
    runner = make_runner("scaled", device, pool_blocks=blocks, state_slots=1)
    prompt_ids = random_prompt(PROMPT_TOKENS, seed=3)

    def forward() -> None:
        sequence = TokenSequence(Request(request_id="r", prompt_ids=prompt_ids, max_tokens=1))
        sequence.block_ids = runner.pool.allocate(blocks)
        runner.open(sequence)
        runner.compute([Part(sequence, PROMPT_TOKENS)])
        runner.close(sequence)
        runner.pool.release(sequence.block_ids)

    return forward
