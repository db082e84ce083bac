"""What swap-in costs a forward beside it: rows of `swap_in`.

`endless`: loads of LOAD_BLOCKS without end, more than any store brings: what the bus, the card and
the interpreter's lock come to at most. `store`: the same at STORE_BYTES_PER_S, what eight fetch
workers brought (`gpu_end_to_end`), as long as the forward takes. `one hit`: one load of HIT_BLOCKS
begins with each forward; some 2 ms of the bus, so that a long forward cannot lose much by it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from threading import Event, Thread
from typing import Any, Literal, TypeAlias

import torch

from engine.kv.mover import Transfer, wait_to_end
from engine.model_runner import Part
from engine.request import Request
from engine.sequence import Sequence as TokenSequence

from .median_interval import describe_median
from .swap_in_ways import Bench
from .v41_shape import Size, make_runner, random_prompt

MATRIX = 8192
PRODUCTS = 24
ROUNDS_MIN = 3
SECONDS = 14.0
LOAD_BLOCKS = 600
STORE_BYTES_PER_S = 8e9
LOADS_UNDER_WAY = 2
"""So many are queued at a time: the bus is never without work."""
HIT_BLOCKS = 1_022
"""Of a prompt of 128K tokens; 116 MB."""
PROMPT_TOKENS = 8192
WIDE_PROMPT_TOKENS = 4096
"""A second of an H200, far more than its launches take the host."""
Loads: TypeAlias = Literal["endless", "store", "one hit"]
LOADS: tuple[Loads, ...] = ("endless", "store", "one hit")
FORWARDS = ("products", "scaled", "wide")
"""Large bf16 products; models of V4.1's shape (`v41_shape`): of scaled size, whose launches take
the host as long as the card, and with the released widths, which the card is busy with."""


def beside_rows(
    bench: Bench, ways: Sequence[str], forwards: Sequence[str]
) -> Iterator[Callable[[], dict[str, Any]]]:
    """One call for each row: one of FORWARDS, with each way beside it."""
    makes: dict[str, Callable[[torch.device], Callable[[], None]]] = {
        "products": _products,
        "scaled": partial(_v41_forward, "scaled", PROMPT_TOKENS),
        "wide": partial(_v41_forward, "wide", WIDE_PROMPT_TOKENS),
    }
    for name in forwards:
        for loads in LOADS:
            yield partial(_row, bench, ways, name, makes[name], loads)


def _row(
    bench: Bench,
    ways: Sequence[str],
    name: str,
    make: Callable[[torch.device], Callable[[], None]],
    loads: Loads,
) -> dict[str, Any]:
    """Short turns, each way's next to one alone, in an order that changes: a card gets slower and
    faster by more than what is looked for."""
    forward = make(bench.device)
    ways = [way for way in ways if way in bench.movers]
    alone: list[float] = []
    slowed: dict[str, list[float]] = {way: [] for way in ways}
    moved: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2):
        forward()
    end_s = time.perf_counter() + SECONDS
    for number in itertools.count():
        if number >= ROUNDS_MIN and time.perf_counter() > end_s:
            break
        for way in ways:
            if number % 2:
                alone.append(_time(bench, forward))
            with_loads = _LoadThread(bench, way, loads)
            beside_s = _time(bench, forward)
            moved[way].append(with_loads.stop())
            if number % 2 == 0:
                alone.append(_time(bench, forward))
            slowed[way].append(beside_s / alone[-1] - 1)
    alone_s = median(alone)
    row: dict[str, Any] = {
        "forward": name,
        "loads": loads,
        "rounds": number,
        "alone_ms": round(alone_s * 1e3, 3),
        "spread": round((max(alone) - min(alone)) / alone_s, 4),
    }
    for way in ways:
        row |= describe_median(f"slowed_by_{way}", slowed[way])
        row[f"gib_per_s_{way}"] = round(median(moved[way]), 1)
    return row


def _time(bench: Bench, forward: Callable[[], None]) -> float:
    # Not of the whole device: swap-in goes on.
    torch.cuda.current_stream(bench.device).synchronize()
    begun_s = time.perf_counter()
    forward()
    torch.cuda.current_stream(bench.device).synchronize()
    return time.perf_counter() - begun_s


class _LoadThread:
    """A thread that moves blocks in: once, at a rate, or as fast as the bus lets it."""

    def __init__(self, bench: Bench, way: str, loads: Loads) -> None:
        self._bench = bench
        self._way = way
        is_one = loads == "one hit"
        blocks = HIT_BLOCKS if is_one else LOAD_BLOCKS
        self._blocks = min(blocks, bench.pool.capacity_blocks)
        load_bytes = self._blocks * bench.layout.block_bytes
        self._load_s = load_bytes / STORE_BYTES_PER_S if loads == "store" else 0.0
        self._is_over = Event()
        self._has_begun = Event()
        self._loads = 0
        self._begun_s = 0.0
        self._thread = Thread(target=self._run_once if is_one else self._run)
        self._thread.start()
        assert self._has_begun.wait(10.0), "no load has ended"

    def _start(self, number: int, ids: list[int]) -> list[Transfer]:
        first = self._bench.run_offset(number, self._blocks)
        return self._bench.start(self._way, "in", ids, first)

    def _run(self) -> None:
        ids = torch.randperm(self._bench.pool.capacity_blocks)[: self._blocks].tolist()
        under_way: list[list[Transfer]] = []
        for number in itertools.count():
            under_way.append(self._start(number, ids))
            if len(under_way) < LOADS_UNDER_WAY:
                continue
            wait_to_end(*under_way.pop(0))
            if not self._has_begun.is_set():
                self._begun_s = time.perf_counter()
                self._has_begun.set()
            else:
                self._loads += 1
            # At a rate: until the next load would have come.
            due_s = self._begun_s + self._loads * self._load_s
            if self._is_over.wait(max(0.0, due_s - time.perf_counter())):
                break
        for transfers in under_way:
            wait_to_end(*transfers)

    def _run_once(self) -> None:
        ids = torch.randperm(self._bench.pool.capacity_blocks)[: self._blocks].tolist()
        self._begun_s = time.perf_counter()
        self._has_begun.set()
        wait_to_end(*self._start(0, ids))
        self._loads = 1

    def stop(self) -> float:
        """GiB a second that it has moved."""
        seconds = time.perf_counter() - self._begun_s
        loads = self._loads
        self._is_over.set()
        self._thread.join()
        return loads * self._blocks * self._bench.layout.block_bytes / seconds / 2**30


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


def _v41_forward(size: Size, prompt_tokens: int, device: torch.device) -> Callable[[], None]:
    """A prompt of a model of V4.1's shape, from nothing to its logits."""
    blocks = prompt_tokens // 128 + 1
    runner = make_runner(size, device, pool_blocks=blocks, state_slots=1)
    prompt_ids = random_prompt(prompt_tokens, seed=3)

    def forward() -> None:
        sequence = TokenSequence(Request(request_id="r", prompt_ids=prompt_ids, max_tokens=1))
        sequence.block_ids = runner.pool.allocate(blocks)
        runner.open(sequence)
        runner.compute([Part(sequence, prompt_tokens)])
        runner.close(sequence)
        runner.pool.release(sequence.block_ids)

    return forward
