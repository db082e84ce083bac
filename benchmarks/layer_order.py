"""Layer order beside block order: when can an engine begin, and when is everything there?

Twelve nodes on this machine, blocks of V4.1-Flash (four sections), fetched into a run of the arena.
Rounds take turns between the two orders and a memcpy of the same bytes, so that other work on the
machine hits all of them alike. Prints JSON lines: benchmark, parameters, and in milliseconds the
median and the best of the time until some blocks have a section, until each section of all blocks
is ready, and of the whole; commit, machine.

    python -m benchmarks.layer_order [--blocks 64 600 1024] [--rounds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.machine import describe_machine
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RUN_ALIGN_BYTES, RunLayout
from kvstore.client import BlockLayout, Namespace, Section, StoreClient
from kvstore.layout import BLOCK_TOKENS

LAYOUT = BlockLayout(
    (Section("L2", 22_784), Section("L8", 22_784), Section("L14", 22_784), Section("L20", 45_568))
)
DEADLINE_S = 30.0


@dataclass
class Times:
    """What one order took in each round, in milliseconds."""

    begun: list[float] = field(default_factory=list)
    """Until some block has the first section."""
    sections: list[list[float]] = field(default_factory=lambda: [[] for _ in LAYOUT.sections])
    """For each section until all blocks have it."""
    total: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Processor time of this process."""
    decoded: int = 0
    """Blocks that were rebuilt from parity, because a node was late on a busy machine."""

    def describe(self) -> dict[str, object]:
        """Medians and bests."""
        return {
            "first_blocks_ms": _figures(self.begun),
            "section_ms": [_figures(times) for times in self.sections],
            "total_ms": _figures(self.total),
            "client_cpu_ms": _figures(self.cpu),
            "decoded_blocks": self.decoded,
        }


def _figures(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 2), "best": round(min(times), 2)}


class Chain:
    """Blocks of random bytes, stored, and a run to fetch them into."""

    def __init__(self, blocks: int, arena: ArenaRegion) -> None:
        rng = np.random.default_rng(blocks)
        self.namespace = Namespace(
            model="bench", weights="random", tokenizer="none", layout=LAYOUT, tenant=f"n{blocks}"
        )
        tokens = rng.integers(0, 1 << 17, blocks * BLOCK_TOKENS, dtype=np.int32)
        self.keys = self.namespace.block_keys(tokens)
        self.run: RunMemory = arena.run(0, RunLayout(LAYOUT, blocks))
        self.source = rng.integers(0, 256, blocks * LAYOUT.block_bytes, dtype=np.uint8)

    async def save(self, store: StoreClient) -> None:
        """Stores all blocks."""
        step, view = LAYOUT.block_bytes, self.source.data
        blocks = [view[at : at + step] for at in range(0, len(view), step)]
        result = await store.save(self.namespace, self.keys, blocks, deadline_s=DEADLINE_S)
        assert result.failed == 0, result
        await store.finish_writes(deadline_s=DEADLINE_S)

    async def fetch(self, store: StoreClient, times: Times, *, is_by_layer: bool) -> None:
        """Fetches them once and notes what it took."""
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        at_s: dict[tuple[int, bool], float] = {}

        def on_ready(section: int, blocks: int) -> None:
            at_s.setdefault((section, blocks == len(self.keys)), time.perf_counter() - begun_s)

        result = await store.fetch_run(
            self.namespace,
            self.keys,
            self.run,
            first_block=0,
            is_by_layer=is_by_layer,
            on_ready=on_ready,
            deadline_s=DEADLINE_S,
        )
        times.total.append((time.perf_counter() - begun_s) * 1e3)
        times.cpu.append((time.process_time() - cpu_s) * 1e3)
        assert result.blocks == len(self.keys), result
        times.decoded += result.decoded_blocks
        times.begun.append(min(at_s.values()) * 1e3)
        for section, took in enumerate(times.sections):
            took.append(at_s[section, True] * 1e3)


def measure_memcpy(chain: Chain, target: np.ndarray) -> float:
    """Milliseconds to copy as many bytes."""
    begun_s = time.perf_counter()
    np.copyto(target, chain.source)
    return (time.perf_counter() - begun_s) * 1e3


async def measure(cluster: LocalCluster, arena: ArenaRegion, blocks: int, rounds: int) -> None:
    """Prints the figures of both orders for one length of chain."""
    chain = Chain(blocks, arena)
    memcpy, target = [], np.zeros_like(chain.source)
    by_order = {"block": Times(), "layer": Times()}
    async with StoreClient.connect(cluster.cluster_path) as store:
        await chain.save(store)
        for order in by_order:
            await chain.fetch(store, Times(), is_by_layer=order == "layer")
        for number in range(rounds):
            memcpy.append(measure_memcpy(chain, target))
            # The one that comes second has the caches of the first: each is first in turn.
            for order in sorted(by_order, reverse=number % 2 == 1):
                await chain.fetch(store, by_order[order], is_by_layer=order == "layer")
    for order, times in by_order.items():
        row = {
            "benchmark": "layer_order",
            "order": order,
            "blocks": blocks,
            "bytes": blocks * LAYOUT.block_bytes,
            "rounds": rounds,
            "memcpy_ms": _figures(memcpy),
            **times.describe(),
            **describe_machine(),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 600, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    size_bytes = RunLayout(LAYOUT, max(options.blocks)).run_bytes + RUN_ALIGN_BYTES
    with (
        tempfile.TemporaryDirectory(prefix="layer-order-") as folder,
        LocalCluster.start(
            Path(folder) / "c", nodes=12, k=10, m=2, target_size_bytes=1 << 30
        ) as cluster,
        ArenaRegion(ArenaRegion.create(max(size_bytes, 1 << 20))) as arena,
    ):
        for blocks in options.blocks:
            asyncio.run(measure(cluster, arena, blocks, options.rounds))


if __name__ == "__main__":
    main()
