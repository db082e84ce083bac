"""Speed of the erasure code beside memcpy of the same bytes, as JSON lines.

Run it as a module, from the root of the repository: python -m benchmarks.erasure
Each line has commit, machine, parameters, value and unit. "GB/s" counts block bytes (k shards of
each block), whatever is rebuilt, so that all rows compare. Not a test: nothing fails when slow.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from erasure.buffers import addresses_of, shard_addresses
from erasure.code import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

K, M = 10, 2
SHARD_BYTES = 11_392
BLOCK_BYTES = K * SHARD_BYTES
# Shards too short to take time themselves: what is left is the cost of calling.
TINY_SHARD_BYTES = 1


def machine() -> str:
    """Name of the processor, as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    """Short hash of the commit at hand, or "none"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else "none"


def median_s(run: Callable[[], object], *, repeats: int) -> float:
    """Median wall time of one run, after one that warms the caches."""
    run()
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


class Batch:
    """Blocks, their parity and a place for rebuilt shards, with the address tables of each."""

    def __init__(self, blocks: int) -> None:
        rng = np.random.default_rng(1)
        self.blocks = blocks
        self.data = rng.integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
        self.copy = np.empty_like(self.data)
        self.parity = np.zeros((blocks, M * SHARD_BYTES), np.uint8)
        self.rebuilt = np.zeros((blocks, M * SHARD_BYTES), np.uint8)

    def table(self, array: NDArray[np.uint8], shards: int) -> NDArray[np.uintp]:
        """Address table (blocks, shards) of one of the arrays, which live as long as this."""
        with addresses_of(array, writable=False) as held:
            return shard_addresses(held.addresses, shards, shard_bytes=SHARD_BYTES)


def cases(code: Code, batch: Batch) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and action of each measurement over one batch."""
    data, parity = batch.table(batch.data, K), batch.table(batch.parity, M)
    rebuilt = batch.table(batch.rebuilt, M)
    shards = np.concatenate([data, parity], axis=1)
    copy_to, copy_from = batch.copy.ctypes.data, batch.data.ctypes.data

    def decode(lost: list[int]) -> Callable[[], object]:
        left = [shard for shard in range(K + M) if shard not in lost][:K]
        sources = np.ascontiguousarray(shards[:, left])
        targets = np.ascontiguousarray(rebuilt[:, : len(lost)])
        return lambda: code.reconstruct_at(lost, left, sources, targets, shard_bytes=SHARD_BYTES)

    yield "memcpy", lambda: ctypes.memmove(copy_to, copy_from, batch.data.nbytes)
    yield "encode", lambda: code.encode_at(data, parity, shard_bytes=SHARD_BYTES)
    yield (
        "encode_buffers",
        lambda: code.encode(batch.data, batch.parity, shard_bytes=SHARD_BYTES),
    )
    yield "decode_1_lost", decode([3])
    yield "decode_2_lost", decode([3, 7])
    yield "repair_2_parity", decode([10, 11])


def call_overhead_us(code: Code, batch: Batch, *, repeats: int) -> float:
    """Microseconds a block of a batch whose shards are too short to matter."""
    data, parity = batch.table(batch.data, K), batch.table(batch.parity, M)
    taken_s = median_s(
        lambda: code.encode_at(data, parity, shard_bytes=TINY_SHARD_BYTES), repeats=repeats
    )
    return taken_s / batch.blocks * 1e6


def main() -> None:
    """Print one JSON line a measurement."""
    parser = argparse.ArgumentParser(description="Speed of the erasure code, as JSON lines")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    code = Code(K, M)
    common = {"commit": commit(), "machine": machine(), "backend": code.multiplier.name}

    def report(name: str, blocks: int, value: float, unit: str) -> None:
        parameters = {"code": f"{K}+{M}", "blocks": blocks, "block_bytes": BLOCK_BYTES}
        line = {"benchmark": f"erasure.{name}", **common, "parameters": parameters}
        print(json.dumps({**line, "value": round(value, 3), "unit": unit}), flush=True)

    for blocks in options.blocks:
        batch = Batch(blocks)
        repeats = max(5, options.repeats * 64 // max(blocks, 64))
        memcpy_gb_s = 0.0
        for name, run in cases(code, batch):
            gb_s = batch.data.nbytes / median_s(run, repeats=repeats) / 1e9
            report(name, blocks, gb_s, "GB/s")
            if name == "memcpy":
                memcpy_gb_s = gb_s
            else:
                report(f"{name}_of_memcpy", blocks, gb_s / memcpy_gb_s, "ratio")
        report("call_overhead", blocks, call_overhead_us(code, batch, repeats=repeats), "us/block")


if __name__ == "__main__":
    main()
