"""Copies between a run of the arena, section by section, and an engine's pool, block by block.

Three ways to make them beside a memcpy of the same bytes, and what each leaves of the interpreter
to another thread, which counts as fast as it may: an engine's thread that computes meanwhile. The
ways take turns, so that other work on the machine hits all of them alike. Prints JSON lines:
benchmark, layout, blocks, way, GB/s and their share of the memcpy's (bests of the rounds), turns of
the other thread as a share of those that it has when nothing is copied (best); commit, machine.

    python -m benchmarks.section_copy [--blocks 512] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from threading import Event, Thread

# One thread for the tensor library, which is loaded with the pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from engine.block_pool import BlockPool
from engine.kv.memcpy_mover import MemcpyMover
from kvstore.admin.machine import describe_machine
from kvstore.layout import BlockLayout, Section

LAYOUTS = {
    "v41-flash": BlockLayout(
        tuple(Section(f"L{n}", size) for n, size in enumerate((22_784, 22_784, 22_784, 45_568)))
    ),
    "smollm2": BlockLayout(tuple(Section(f"L{n}", 98_304) for n in range(30))),
}
WAYS = ("memcpy", "to_pool", "from_pool", "by_memoryviews")
COUNT_S = 0.3


class Copies:
    """A run and a pool, and ways to move every section of all blocks between them."""

    def __init__(self, layout: BlockLayout, blocks: int) -> None:
        self.layout = layout
        self.pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=blocks + blocks // 8)
        ids = self.pool.allocate(self.pool.capacity_blocks)
        self.block_ids = np.random.default_rng(0).permutation(ids)[:blocks].tolist()
        self.run = memoryview(bytearray(b"\1") * (blocks * layout.block_bytes))
        self.other = memoryview(bytearray(len(self.run)))
        self._mover = MemcpyMover(self.pool, layout)
        self._parts = []
        at = 0
        for section in layout.sections:
            self._parts.append(self.run[at : at + blocks * section.bytes])
            at += blocks * section.bytes

    def memcpy(self) -> None:
        np.copyto(np.frombuffer(self.other, np.uint8), np.frombuffer(self.run, np.uint8))

    def to_pool(self) -> None:
        for section, part in enumerate(self._parts):
            self._mover.to_pool(part, section, self.block_ids)

    def from_pool(self) -> None:
        for section, part in enumerate(self._parts):
            self._mover.from_pool(part, section, self.block_ids)

    def by_memoryviews(self) -> None:
        at = 0
        for part, section in zip(self._parts, self.layout.sections, strict=True):
            for row, block_id in enumerate(self.block_ids):
                source = part[row * section.bytes : (row + 1) * section.bytes]
                self.pool.buffer(block_id)[at : at + section.bytes] = source
            at += section.bytes


def time_s(copy: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    copy()
    return time.perf_counter() - begun_s


def count_turns(copy: Callable[[], None]) -> float:
    """Turns a second of this thread while another one copies; after each it offers to wait."""
    is_over = Event()

    def copy_on() -> None:
        while not is_over.is_set():
            copy()

    copier = Thread(target=copy_on)
    copier.start()
    turns, end_s = 0, time.perf_counter() + COUNT_S
    while time.perf_counter() < end_s:
        sum(range(1000))
        time.sleep(0)
        turns += 1
    is_over.set()
    copier.join()
    return turns / COUNT_S


def measure(name: str, layout: BlockLayout, blocks: int, rounds: int) -> None:
    copies = Copies(layout, blocks)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    turns: dict[str, list[float]] = {way: [] for way in WAYS}
    idle_turns = []
    for _ in range(rounds):
        idle_turns.append(count_turns(lambda: time.sleep(0.01)))
        for way in WAYS:
            copy = getattr(copies, way)
            seconds[way].append(min(time_s(copy) for _ in range(3)))
            turns[way].append(count_turns(copy))
    for way in WAYS:
        line = {
            "benchmark": "section_copy",
            "layout": name,
            "blocks": blocks,
            "way": way,
            "gb_per_s": round(len(copies.run) / min(seconds[way]) / 1e9, 2),
            "of_memcpy": round(min(seconds["memcpy"]) / min(seconds[way]), 2),
            "other_thread": round(max(turns[way]) / max(idle_turns), 3),
            **describe_machine(),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for name, layout in LAYOUTS.items():
        measure(
            name, layout, max(1, options.blocks * 113_920 // layout.block_bytes), options.rounds
        )


if __name__ == "__main__":
    main()
