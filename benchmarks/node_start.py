"""What a node's start costs: rebuilding the index from slot headers, and the memory of the index.

Fills a target, then opens it again with its files in the page cache, and with them dropped from it.
Prints JSON lines: benchmark, parameters, values with their units, machine, commit. "bytes_per_key"
is resident memory of this process, with all tables, by the number of shards.

    python -m benchmarks.node_start [--shards 100000] [--shard-bytes 11392] [--folder DIR]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore.node.clock import SystemClock
from kvstore.node.disk import OsDisk
from kvstore.node.segment import TargetIdentity, create_segment
from kvstore.node.slot import CHECKED_BYTES, HEADER_BYTES, SLOT_HEADER, SlotGeometry, seal_headers
from kvstore.node.target import Target, TargetSettings
from kvstore.node.target_life import close_target, open_target

IDENTITY = TargetIdentity(bytes(16), "t01")
BATCH = 64
ROOT = Path(__file__).resolve().parents[1]


def open_it(folder: Path, capacity_bytes: int) -> Target:
    return open_target(
        folder,
        IDENTITY,
        capacity_bytes=capacity_bytes,
        settings=TargetSettings(),
        disk=OsDisk(),
        clock=SystemClock(),
        pid=os.getpid(),
    )


def sealed_headers(geometry: SlotGeometry, count: int, rng: random.Random) -> Iterator[bytearray]:
    """Runs of whole headers, `count` in all, with random keys."""
    for first in range(1, count + 1, BATCH):
        slots = min(BATCH, count + 1 - first)
        data = bytearray(HEADER_BYTES * slots)
        headers = np.frombuffer(data, SLOT_HEADER)
        headers["key"] = np.frombuffer(rng.randbytes(32 * slots), "V32")
        headers["generation"] = np.arange(first, first + slots)
        headers["payload_bytes"] = geometry.payload_bytes
        starts = range(0, len(data), HEADER_BYTES)
        seal_headers(headers, [memoryview(data)[at : at + CHECKED_BYTES] for at in starts])
        yield data


def fill(target: Target, geometry: SlotGeometry, count: int, rng: random.Random) -> None:
    """Write `count` shards straight into new segments."""
    disk, left = OsDisk(), count
    payloads = memoryview(rng.randbytes(geometry.payload_bytes * BATCH))
    while left:
        growth = target.space.plan_growth(geometry)
        assert growth is not None
        segment = create_segment(disk, target.folder.path, IDENTITY, growth.shape)
        slots = min(left, growth.shape.slot_count)
        at = 0
        for data in sealed_headers(geometry, slots, rng):
            run = len(data) // HEADER_BYTES
            shards = payloads[: run * geometry.payload_bytes]
            segment.write_slots(disk, at, [shards], memoryview(data))
            at += run
        disk.sync(segment.descriptor)
        # Nothing is free in it, as far as this process is concerned.
        target.space.add(segment, [])
        left -= slots


def drop_from_memory(folder: Path) -> None:
    for path in folder.glob("*.seg"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--shard-bytes", type=int, default=11392)
    parser.add_argument("--folder", help="where the target lies (default: a temporary folder)")
    arguments = parser.parse_args()
    geometry = SlotGeometry(arguments.shard_bytes)
    capacity_bytes = max(2 * arguments.shards * geometry.slot_bytes, 1 << 30)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    machine = f"{platform.machine()} {os.cpu_count()} cores, Linux {platform.release()}"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary) / "t"
        target = open_it(folder, capacity_bytes)
        fill(target, geometry, arguments.shards, random.Random(3))
        close_target(target, OsDisk())
        del target
        for files in ("in memory", "on disk"):
            if files == "on disk":
                drop_from_memory(folder)
            before = resident_bytes()
            begin = time.perf_counter()
            target = open_it(folder, capacity_bytes)
            seconds = time.perf_counter() - begin
            found = len(target.index)
            assert found == arguments.shards
            line = {
                "benchmark": "node_start",
                "shards": found,
                "shard_bytes": arguments.shard_bytes,
                "files": files,
                "seconds": round(seconds, 3),
                "shards_per_s": round(found / seconds),
                "bytes_per_key": round((resident_bytes() - before) / found),
            }
            print(json.dumps({**line, "machine": machine, "commit": commit or "none"}), flush=True)
            close_target(target, OsDisk())
            del target


if __name__ == "__main__":
    main()
