"""Window pool and directory: speed against plain copies, and memory of an entry.

    python -m benchmarks.window_memory [--entries 100000 1000000 2000000] [--memory-mib 512]

Prints JSON lines. `pool`: GB/s of puts and gets of records of V4.1-Flash (1,415,040 B), beside a
copy of the same bytes into memory that is in use (`memcpy`) and into fresh memory (`fresh copy`:
what a put would cost if its memory were not kept). `directory`: bytes of resident memory for each
entry, in a process of its own for each size, and microseconds for each key of announcements of
1,024 records, look-ups, and expiry. `partition`: microseconds for each key. All times are CPU times
of the one thread that works, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.admin.machine import describe_machine
from kvstore.layout import BlockLayout, Section
from kvstore.window.directory import DirectoryPart
from kvstore.window.partition import choose_entrypoints
from kvstore.window.pool import WindowPool

LAYERS, LAYER_BYTES = 20, 134 * 528
LAYOUT = BlockLayout(tuple(Section(f"L{layer}", LAYER_BYTES) for layer in range(LAYERS)))
RECORD_BYTES = LAYOUT.block_bytes
NAMESPACE_ID = bytes(16)
TTL_S = 180.0
BATCH = 1024
HOSTS = 64


class Time:
    """A clock that the benchmark sets."""

    now_s = 0.0


def median_s(action: Callable[[], object], repeats: int) -> float:
    """Median CPU time of one call."""
    times_s = []
    for _ in range(repeats):
        begun_s = time.thread_time()
        action()
        times_s.append(time.thread_time() - begun_s)
    return statistics.median(times_s)


def measure_pool(memory_bytes: int) -> dict[str, float]:
    """GB/s of records, each step over all of the pool so that nothing stays in a cache."""
    count = memory_bytes // RECORD_BYTES
    sources = np.random.default_rng(1).integers(0, 256, (8, RECORD_BYTES), np.uint8)
    pool = WindowPool(memory_bytes, lambda: TTL_S, lambda: 0.0)
    target = np.ones((count, RECORD_BYTES), np.uint8)
    keys = [number.to_bytes(32, "little") for number in range(2 * count)]

    def put_all(first: int) -> None:
        for number in range(count):
            source = sources[number % 8].data
            pool.put(keys[first + number], NAMESPACE_ID, LAYOUT, source)

    def copy_all() -> None:
        for number in range(count):
            target[number] = sources[number % 8]

    def get_all() -> None:
        for key in pool.keys():  # noqa: SIM118
            pool.get(key)

    def verify_all() -> None:
        for key in pool.keys():  # noqa: SIM118
            record = pool.get(key)
            assert record is not None
            assert pool.verify(record)

    rates: dict[str, float] = {}

    def note(name: str, spent_s: float) -> None:
        rates[name] = round(count * RECORD_BYTES / spent_s / 1e9, 2)

    note("first put", median_s(lambda: put_all(0), 1))
    put_s, copy_s = [], []
    for turn in range(6):
        put_s.append(median_s(lambda at=count * ((turn + 1) % 2): put_all(at), 1))  # type: ignore[misc]
        copy_s.append(median_s(copy_all, 1))
    note("put", statistics.median(put_s))
    note("memcpy", statistics.median(copy_s))
    note("fresh copy", median_s(lambda: [bytes(sources[n % 8].data) for n in range(count)], 3))
    note("xxh3", median_s(lambda: [xxh3_64_intdigest(one.data) for one in target], 3))
    note("verified get", median_s(verify_all, 3))
    rates["get us"] = round(median_s(get_all, 5) / count * 1e6, 2)
    return rates


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_directory(entries: int) -> dict[str, float]:
    """A part that is filled with `entries` random keys; run it in a fresh process."""
    clock = Time()
    part = DirectoryPart(lambda: clock.now_s, entries_max=entries)
    before_bytes, spent_s, longest_s = resident_bytes(), 0.0, 0.0
    items: list[tuple[bytes, int, int]] = []
    for batch in range(-(-entries // BATCH)):
        count = min(BATCH, entries - batch * BATCH)
        items = [(os.urandom(32), RECORD_BYTES, int(TTL_S * 1e3)) for _ in range(count)]
        begun_s = time.thread_time()
        part.announce(f"10.0.0.{batch % HOSTS}:7400", items)
        took_s = time.thread_time() - begun_s
        spent_s, longest_s = spent_s + took_s, max(longest_s, took_s)
        clock.now_s += TTL_S / 2 / (entries / BATCH)
    assert len(part) == entries
    each_bytes = (resident_bytes() - before_bytes) / entries
    keys, strange = [item[0] for item in items], [os.urandom(32) for _ in range(BATCH)]
    found = {
        "bytes_per_entry": round(each_bytes, 1),
        "announce us": round(spent_s / entries * 1e6, 2),
        "longest announcement ms": round(longest_s * 1e3, 1),
        "look-up of 1 us": round(median_s(lambda: part.look_up(keys[:1]), 2_000) * 1e6, 2),
        "look-up of many us": round(median_s(lambda: part.look_up(keys), 100) / len(keys) * 1e6, 2),
        "miss us": round(median_s(lambda: part.look_up(strange), 100) / BATCH * 1e6, 2),
    }
    full_s = median_s(lambda: part.announce("10.0.0.9:7400", fresh_items()), 5)
    found["announce when full us"] = round(full_s / BATCH * 1e6, 2)
    clock.now_s += TTL_S
    found["expire us"] = round(median_s(lambda: part.expire(BATCH), 20) / BATCH * 1e6, 2)
    return found


def fresh_items() -> list[tuple[bytes, int, int]]:
    return [(os.urandom(32), RECORD_BYTES, int(TTL_S * 1e3)) for _ in range(BATCH)]


def measure_partition() -> dict[str, float]:
    keys = [os.urandom(32) for _ in range(BATCH)]
    names = ("ep-a", "ep-b", "ep-c")
    many_s = median_s(lambda: choose_entrypoints(keys, names), 500)
    one_s = median_s(lambda: choose_entrypoints(keys[:1], names), 2_000)
    return {"of 1 us": round(one_s * 1e6, 2), "of many us": round(many_s / BATCH * 1e6, 3)}


def main() -> None:
    """Measure everything, or one directory for the process that started this one."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--entries", type=int, nargs="+", default=[10**5, 10**6, 2 * 10**6])
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--directory-only", action="store_true")
    found = parser.parse_args()
    if found.directory_only:
        print(json.dumps(measure_directory(found.entries[0])))
        return
    about = {"benchmark": "window_memory"} | describe_machine()
    rates = measure_pool(found.memory_mib << 20)
    print(json.dumps({"part": "pool", "unit": "GB/s"} | rates | about), flush=True)
    for entries in found.entries:
        command = [sys.executable, "-m", "benchmarks.window_memory", "--directory-only"]
        done = subprocess.run(
            [*command, "--entries", str(entries)], capture_output=True, text=True, check=True
        )
        line = {"part": "directory", "entries": entries} | json.loads(done.stdout) | about
        print(json.dumps(line), flush=True)
    print(json.dumps({"part": "partition"} | measure_partition() | about), flush=True)


if __name__ == "__main__":
    main()
