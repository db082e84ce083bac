"""Where the host's time to start the transfer of a section goes, by calls of CUDA.

    python -m benchmarks.swap_in_issue [--blocks 64] [--rounds 200]

Needs a GPU. Prints JSON lines, medians in microseconds. `whole`: a load of the four sections of
V4.1-Flash blocks, staged and by gather, the first section (with the upload of the ids) and those
behind it; `cold` behind a wait for the GPU and a kernel that keeps it busy. `calls`: what each call
in it takes, in a run of its own, since a watched call takes longer.
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from engine.threads import prepare_environment

prepare_environment()

import torch

from engine.block_pool import BlockPool
from engine.kv import cuda_mover, gather_mover, staged_mover
from engine.kv.block_list import BlockList
from engine.kv.cuda_mover import CudaMover
from engine.kv.cuda_runtime import open_runtime
from engine.kv.gather_mover import GatherMover
from engine.kv.mover import wait_to_end
from engine.kv.pinned import PinnedMemory
from engine.kv.section_kernels import find_kernels
from engine.kv.staged_mover import StagedMover
from kvstore.admin.machine import describe_machine
from kvstore.layout import BlockLayout, Section

WIDTHS = (22_784, 22_784, 22_784, 45_568)
CAPACITY_BLOCKS = 8_192
BUSY_CYCLES = 4_000_000
"""Some 2 ms of a GPU."""

Took = dict[str, list[int]]


class Loads:
    """Loads of so many blocks in random order, from memory of the host that is page-locked."""

    def __init__(self, blocks: int, host: memoryview) -> None:
        self._blocks = blocks
        self._parts: list[memoryview] = []
        at = 0
        for width in WIDTHS:
            self._parts.append(host[at : at + blocks * width])
            at += blocks * width

    def time(self, mover: CudaMover, rounds: int, *, is_cold: bool) -> list[list[int]]:
        """Nanoseconds of each section's start, for each round."""
        rng, rows = random.Random(1), []
        for _ in range(rounds):
            ids = rng.sample(range(CAPACITY_BLOCKS), self._blocks)
            torch.cuda.synchronize()
            if is_cold:
                torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            blocks, row, transfers = BlockList(ids), [], []
            for section, part in enumerate(self._parts):
                begun_ns = time.perf_counter_ns()
                transfers.append(mover.to_pool(part, section, blocks))
                row.append(time.perf_counter_ns() - begun_ns)
            wait_to_end(*transfers)
            rows.append(row)
        return rows


@contextmanager
def watched(took: Took, *calls: tuple[Any, str, str]) -> Iterator[None]:
    """Note how long each call of some functions takes: their owner, their name, and what it is
    called in the lines."""
    with ExitStack() as stack:
        for owner, name, label in calls:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _timed(original, took[label]))
        yield


def _timed(call: Callable[..., Any], into: list[int]) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        begun_ns = time.perf_counter_ns()
        try:
            return call(*arguments, **named)
        finally:
            into.append(time.perf_counter_ns() - begun_ns)

    return timed


def in_us(nanoseconds: list[int]) -> float:
    return round(median(nanoseconds) / 1e3, 1)


def measure(mover: CudaMover, loads: Loads, rounds: int) -> Iterator[dict[str, object]]:
    """The lines of one mover."""
    for is_cold in (False, True):
        rows = loads.time(mover, rounds, is_cold=is_cold)
        yield {
            "row": "whole",
            "mover": mover.name,
            "is_cold": is_cold,
            "first_us": in_us([row[0] for row in rows]),
            "others_us": in_us([sum(row[1:]) // (len(row) - 1) for row in rows]),
        }
    took: Took = defaultdict(list)
    module = staged_mover if isinstance(mover, StagedMover) else gather_mover
    calls = (
        (mover._runtime, "copy", "copy"),
        (mover._kernels, "scatter", "kernel"),  # type: ignore[attr-defined]
        (cuda_mover.Lane, "ids_on_device", "ids"),
        (torch.cuda.Stream, "wait_event", "wait for an event"),
        (torch.cuda.Event, "record", "record an event"),
        (module, "record", "make and record an event"),
        (cuda_mover, "check_part", "checks"),
        (cuda_mover, "address_of", "address"),
    )
    with watched(took, *calls):
        loads.time(mover, rounds, is_cold=False)
    sections = rounds * len(WIDTHS)
    for label, nanoseconds in took.items():
        if not nanoseconds:  # a call that this mover does not make
            continue
        yield {
            "row": "calls",
            "mover": mover.name,
            "call": label,
            "us": in_us(nanoseconds),
            "calls_a_section": round(len(nanoseconds) / sections, 2),
        }


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("swap_in_issue: given no CUDA device, expected one")
    device, runtime = torch.device("cuda", 0), open_runtime()
    layout = BlockLayout(tuple(Section(f"L{n}", width) for n, width in enumerate(WIDTHS)))
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=CAPACITY_BLOCKS, device=device)
    pinned = PinnedMemory(runtime, device)
    memory = torch.empty(
        options.blocks * layout.block_bytes, dtype=torch.uint8, pin_memory=True
    ).zero_()
    host = pinned.adopt(memory)
    kernels = find_kernels(pool.memory, WIDTHS)
    loads = Loads(options.blocks, host.view)
    parts: dict[str, Any] = {"pinned": pinned, "runtime": runtime, "kernels": kernels}
    for make in (StagedMover, GatherMover):
        mover = make(pool, layout, **parts)
        for line in measure(mover, loads, options.rounds):
            print(
                json.dumps({"benchmark": "swap_in_issue", **line, **describe_machine()}),
                flush=True,
            )
        mover.close()


if __name__ == "__main__":
    main()
