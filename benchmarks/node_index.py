"""What a look-up costs in the index of a node, against a dict of the same keys.

Prints JSON lines: benchmark, operation, keys a call, microseconds a call (the median) of the index
and of the dict, machine, commit. Keys "in a run" lie in neighbouring slots, as those that were
written together do; "scattered" ones anywhere; "missing" ones nowhere.

    python -m benchmarks.node_index [--keys 1000000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import numpy as np

from kvstore.key import KEY_BYTES
from kvstore.node.index import SlotIndex
from kvstore.node.segment import ABSENT, ReadWay, Segment, SegmentShape
from kvstore.node.slot import SlotGeometry

ROOT = Path(__file__).resolve().parents[1]
SLOTS_PER_SEGMENT = 23_000
"""About those of a usual segment: 256 MiB of shards of 11,392 B."""
REPEATS = 300
Kind = Callable[[int], list[bytes]]


def build(count: int) -> tuple[SlotIndex, list[Segment], float]:
    """An index of `count` random keys, its segments, and the seconds that building it took."""
    rng = np.random.default_rng(1)
    segments: dict[int, Segment] = {}
    for number in range(-(-count // SLOTS_PER_SEGMENT)):
        shape = SegmentShape(
            number=number, geometry=SlotGeometry(11392), slot_count=SLOTS_PER_SEGMENT
        )
        segment = Segment(shape, Path("none"), -1, ReadWay.DIRECT)
        used = min(SLOTS_PER_SEGMENT, count - number * SLOTS_PER_SEGMENT)
        words = rng.integers(0, 1 << 64, (used, KEY_BYTES // 8), np.uint64)
        segment.columns.key_words[:used] = words
        segment.columns.status[:used] = 1
        segments[number] = segment
    slots_max = len(segments) * SLOTS_PER_SEGMENT
    index = SlotIndex(segments, slots_max=lambda: slots_max, seed=5)
    begin_s = time.perf_counter()
    index.rebuild()
    return index, list(segments.values()), time.perf_counter() - begin_s


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def median_us(call: Callable[[list[bytes]], object], make: Kind, count: int) -> float:
    times_s = []
    for _ in range(REPEATS):
        keys = make(count)
        begin_s = time.perf_counter()
        call(keys)
        times_s.append(time.perf_counter() - begin_s)
    return round(statistics.median(times_s) * 1e6, 1)


class Bench:
    """The index, and a dict that says the same."""

    def __init__(self, count: int) -> None:
        self.rng = random.Random(3)
        self.index, self.segments, self.build_s = build(count)
        self.whole = [s for s in self.segments if s.columns.status.all()]
        self.locations: dict[bytes, int] = {}
        for segment in self.segments:
            used = int(np.count_nonzero(segment.columns.status))
            keys = split(segment.columns.key_bytes[: used * KEY_BYTES].tobytes())
            first = segment.shape.first_location
            self.locations.update(zip(keys, range(first, first + used), strict=True))

    def in_a_run(self, count: int) -> list[bytes]:
        segment = self.rng.choice(self.whole)
        slot = self.rng.randrange(SLOTS_PER_SEGMENT - count)
        return [segment.columns.key_at(slot + i) for i in range(count)]

    def scattered(self, count: int) -> list[bytes]:
        return [self.in_a_run(1)[0] for _ in range(count)]

    def missing(self, count: int) -> list[bytes]:
        return split(self.rng.randbytes(count * KEY_BYTES))

    def find_in_dict(self, keys: list[bytes]) -> list[int]:
        return list(map(self.locations.get, keys, repeat(ABSENT)))

    def measure(self) -> list[dict[str, object]]:
        kinds: list[Kind] = [self.in_a_run, self.scattered, self.missing]
        lines: list[dict[str, object]] = [
            {
                "operation": f"find {kind.__name__}",
                "keys": count,
                "index_us": median_us(self.index.find, kind, count),
                "dict_us": median_us(self.find_in_dict, kind, count),
            }
            for kind in kinds
            for count in (1, 64, 1024)
        ]
        return lines + self.measure_changes()

    def measure_changes(self) -> list[dict[str, object]]:
        """Drop and put batches of 64 neighbours of one segment."""
        segment = self.whole[0]
        batches = [
            [segment.columns.key_at(first + i) for i in range(64)]
            for first in range(0, SLOTS_PER_SEGMENT - 64, 64)
        ]
        times_s: dict[str, list[float]] = {"drop": [], "put": [], "dict drop": [], "dict put": []}
        for number, keys in enumerate(batches):
            marks = [time.perf_counter()]
            self.index.drop_each(keys)
            marks.append(time.perf_counter())
            self.index.put(keys, segment, number * 64)
            marks.append(time.perf_counter())
            for key in keys:
                self.locations.pop(key, ABSENT)
            marks.append(time.perf_counter())
            self.locations.update(zip(keys, range(64), strict=True))
            marks.append(time.perf_counter())
            for name, begin_s, end_s in zip(times_s, marks, marks[1:], strict=False):
                times_s[name].append(end_s - begin_s)
        us = {name: round(statistics.median(times) * 1e6, 1) for name, times in times_s.items()}
        return [
            {"operation": name, "keys": 64, "index_us": us[name], "dict_us": us[f"dict {name}"]}
            for name in ("drop", "put")
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="microseconds a look-up, against a dict")
    parser.add_argument("--keys", type=int, default=1_000_000)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    machine = f"{platform.machine()} {os.cpu_count()} cores, Linux {platform.release()}"
    where = {"machine": machine, "commit": commit or "none"}
    bench = Bench(arguments.keys)
    built = {"operation": "build", "keys": arguments.keys, "seconds": round(bench.build_s, 3)}
    for line in [built, *bench.measure()]:
        full = {"benchmark": "node_index", "held": arguments.keys, **line, **where}
        sys.stdout.write(json.dumps(full) + "\n")


if __name__ == "__main__":
    main()
