"""How fast an operation moves its bytes, beside a plain copy on the same card in the same run.

A case says what an operation is called with; the frame here times it. Inputs rotate over memory
many times larger than the card's L2 cache, so each call finds its own in memory. On a CUDA device
calls are queued behind a kernel that only waits, with an event after each, so that the time between
two events is the device's own and not the host's; medians are taken. On a CPU (to try the frame
out) the clock is the host's.

Not for end-to-end times: those have their own benchmarks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], object]

CALLS_QUEUED = 64
"""Calls between two waits for the device; far fewer than its queue holds (1,024)."""

WAIT_CYCLES = 8_000_000
"""Of the kernel that only waits: about 4 ms, in which the host queues the calls."""

HOST_CALLS = 200


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Calls of one operation that do the same work, each on other memory.

    `moved_bytes`: what a call reads and writes; for a copy over the bus what crosses it.
    `is_right`: runs the operation once and says whether its output is the reference's.
    `block_bytes`: of the blocks that a call works on, where that is what is of interest.
    `host_ways`: other ways to start the same kernel, of which only the host's time is of interest.
    """

    calls: Sequence[Call]
    moved_bytes: int
    is_right: Callable[[], bool]
    block_bytes: int | None = None
    host_ways: dict[str, Call] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operation and its sizes. `beside` names the copy that it is measured against."""

    operation: str
    sizes: dict[str, Any]
    prepare: Callable[[Workspace], Prepared]
    beside: str = "device"
    goal: float | None = None
    """Of the copy's rate."""
    goal_block_gb_per_s: float | None = None
    """For cases with `block_bytes`."""


class Workspace:
    """Two areas of random bytes that all cases work in: nothing large is allocated for each. A case
    that compares results writes other bytes into them; `refill` makes them random again."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device = device
        self.source, self.target = (
            torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.refill()

    def refill(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        for area in (self.source, self.target):
            area.random_(0, 256, generator=generator)

    @property
    def size_bytes(self) -> int:
        return len(self.source)

    def host_bytes(self, count: int) -> torch.Tensor:
        """Random uint8 [count] of the host, page-locked where there is a device."""
        memory = torch.empty(count, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return memory.random_(0, 256, generator=torch.Generator().manual_seed(0))


def measure(case: Case, workspace: Workspace, copies: Copies, seconds: float) -> dict[str, Any]:
    """One row: time of a call on the device and on the host, rate, share of the copy's rate."""
    prepared = case.prepare(workspace)
    is_right = prepared.is_right()
    call_s = time_calls(prepared.calls, workspace.device, seconds)
    rate = prepared.moved_bytes / call_s
    ways = {"call": prepared.calls[0], **prepared.host_ways}
    row = {
        "operation": case.operation,
        **case.sizes,
        "is_right": is_right,
        "rotated_over": len(prepared.calls),
        "moved_bytes": prepared.moved_bytes,
        "call_us": round(call_s * 1e6, 2),
        "gb_per_s": round(rate / 1e9, 1),
        "beside": case.beside,
        "of_copy": round(rate / copies.rate(case.beside), 3),
        "of_equal_copy": round(rate / copies.rate(case.beside, prepared.moved_bytes), 3),
        "host_us": {
            name: round(time_on_host(call, workspace.device) * 1e6, 2)
            for name, call in ways.items()
        },
    }
    if prepared.block_bytes is not None:
        row["block_gb_per_s"] = round(prepared.block_bytes / call_s / 1e9, 1)
    if case.goal is not None:
        row["goal"] = case.goal
    if case.goal_block_gb_per_s is not None:
        row["goal_block_gb_per_s"] = case.goal_block_gb_per_s
    return row


def time_calls(calls: Sequence[Call], device: torch.device, seconds: float) -> float:
    """Median seconds of a call, taken in turn over all of `calls`, for about `seconds`."""
    time_batch = _time_on_cuda if device.type == "cuda" else _time_on_cpu
    order = [calls[n % len(calls)] for n in range(max(len(calls), 4 * CALLS_QUEUED))]
    batches = [order[at : at + CALLS_QUEUED] for at in range(0, len(order), CALLS_QUEUED)]
    time_batch(batches[0][:8], device)
    taken: list[float] = []
    end_s = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end_s:
        for batch in batches:
            taken += time_batch(batch, device)
            if time.perf_counter() >= end_s:
                break
    return statistics.median(taken)


def _time_on_cuda(calls: Sequence[Call], device: torch.device) -> list[float]:
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(len(calls) + 1)
    ]
    torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


def _time_on_cpu(calls: Sequence[Call], device: torch.device) -> list[float]:
    taken = []
    for call in calls:
        begun_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun_s)
    return taken


def time_on_host(call: Call, device: torch.device) -> float:
    """Median seconds that the host takes to start a call; on a CPU, the call itself."""
    taken = []
    for _ in range(5):
        begun_s = time.perf_counter()
        for _ in range(HOST_CALLS if device.type == "cuda" else 1):
            call()
        taken.append(time.perf_counter() - begun_s)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return statistics.median(taken) / (HOST_CALLS if device.type == "cuda" else 1)


class Copies:
    """Rates of plain copies, bytes a second: what the operations are measured against.

    "device": within the device's memory, read and written bytes both counted; "to_device" and
    "to_host": one page-locked area over the bus, counted once. Each is measured when first asked
    for: at the largest size the workspace has room for, or at that of the operation.
    """

    LARGEST_BYTES = 2**30

    def __init__(self, workspace: Workspace, seconds: float) -> None:
        self._workspace = workspace
        self._seconds = seconds
        self._host = workspace.host_bytes(min(workspace.size_bytes, self.LARGEST_BYTES) // 4)
        self._rates: dict[tuple[str, int], float] = {}

    def rate(self, kind: str, moved_bytes: int | None = None) -> float:
        """Bytes a second of a copy that moves `moved_bytes`, or as many as there is room for."""
        counted = 2 if kind == "device" else 1
        room_bytes = len(self._host) if kind != "device" else self._workspace.size_bytes
        size_bytes = min(room_bytes, self.LARGEST_BYTES, (moved_bytes or 2**62) // counted)
        key = (kind, size_bytes)
        if key not in self._rates:
            calls = self._calls(kind, size_bytes)
            seconds = time_calls(calls, self._workspace.device, self._seconds)
            self._rates[key] = counted * size_bytes / seconds
        return self._rates[key]

    def _calls(self, kind: str, size_bytes: int) -> list[Call]:
        device_bytes = {"device": self._workspace.source, "to_device": self._host}
        sources = device_bytes.get(kind, self._workspace.source)
        targets = self._host if kind == "to_host" else self._workspace.target
        turns = min(len(sources), len(targets)) // size_bytes
        return [
            lambda at=at: targets[at : at + size_bytes].copy_(  # type: ignore[misc]
                sources[at : at + size_bytes], non_blocking=True
            )
            for at in range(0, min(turns, 1024) * size_bytes, size_bytes)
        ]
