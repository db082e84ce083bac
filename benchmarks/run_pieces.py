"""What it costs to fetch into, and save from, a run of the arena instead of a buffer a block.

Starts 12 local nodes, code 10+2, and takes turns between the two, whole and with the nodes of two
data shards lost, so that every block is decoded. Three layouts: V4.1-Flash, whose shards are one
piece each; SmolLM2-135M, three pieces; 61 sections of prime sizes, seven pieces a shard and 61
columns. Prints JSON lines; `of_buffers` is the ratio of the medians.

    python -m benchmarks.run_pieces [--rounds 9]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.machine import describe_machine
from kvstore.arena.region import ArenaRegion
from kvstore.arena.run_layout import RunLayout
from kvstore.client import BlockLayout, Namespace, Section, StoreClient
from kvstore.client.run_batch import run_geometry
from kvstore.cluster.entities import ClusterMap
from kvstore.cluster.placement import Placement
from kvstore.layout import BLOCK_TOKENS

GB = 1e9
DEADLINE_S = 20.0
ARENA_BYTES = 96 << 20
PRIMES = [p for p in range(50, 500) if all(p % q for q in range(2, p))][:61]
SIZES = {
    "v41_flash": (512, [22_784, 22_784, 22_784, 45_568]),
    "smollm2": (20, [98_304] * 30),
    "prime_sections": (512, PRIMES),
}
"""Blocks and sections of each layout."""


class Workload:
    """Random blocks, buffers for them, and a run."""

    def __init__(self, name: str, region: ArenaRegion) -> None:
        self.count, sizes = SIZES[name]
        layout = BlockLayout(tuple(Section(f"s{i}", size) for i, size in enumerate(sizes)))
        rng = np.random.default_rng(1)
        self.namespace = Namespace(model=name, weights="w", tokenizer="t", layout=layout)
        tokens = rng.integers(0, 1 << 16, self.count * BLOCK_TOKENS, dtype=np.int32)
        self.keys = self.namespace.block_keys(tokens)
        self.bytes = self.count * layout.block_bytes
        self.source = rng.integers(0, 256, (self.count, layout.block_bytes), np.uint8)
        self.target = np.zeros_like(self.source)
        self.run = region.run(0, RunLayout(layout, self.count))
        self.run.view[:] = bytes(len(self.run.view))

    def check(self) -> None:
        """Both destinations hold what was saved."""
        assert np.array_equal(self.source, self.target)
        sections = range(len(self.run.layout.layout.sections))
        for block in range(self.count):
            assert b"".join(self.run.part(s, block) for s in sections) == self.source[block].data

    async def fetch(self, store: StoreClient) -> int:
        rows = [row.data for row in self.target]
        result = await store.fetch(self.namespace, self.keys, rows, deadline_s=DEADLINE_S)
        return result.blocks

    async def fetch_run(self, store: StoreClient) -> int:
        result = await store.fetch_run(
            self.namespace,
            self.keys,
            self.run,
            first_block=0,
            on_ready=lambda section, blocks: None,
            deadline_s=DEADLINE_S,
        )
        return result.blocks

    async def save(self, store: StoreClient) -> int:
        rows = [row.data for row in self.source]
        saved = await store.save(self.namespace, self.keys, rows, deadline_s=DEADLINE_S)
        return saved.stored

    async def save_run(self, store: StoreClient) -> int:
        saved = await store.save_run(
            self.namespace, self.keys, self.run, first_block=0, deadline_s=DEADLINE_S
        )
        return saved.stored

    async def forget(self, store: StoreClient) -> None:
        await store.finish_writes()
        await store.forget(self.namespace, self.keys)


def without_two_nodes(cluster_map: ClusterMap, port: int, anchor: bytes) -> ClusterMap:
    """The map, with two nodes that hold data shards at an address that refuses."""
    targets = Placement(cluster_map).place(anchor).targets_by_shard()[:2]
    lost = {cluster_map.node_of(target).name for target in targets}
    nodes = tuple(
        replace(node, address=f"127.0.0.1:{port}") if node.name in lost else node
        for node in cluster_map.nodes
    )
    return replace(cluster_map, nodes=nodes)


async def timed(call: Awaitable[int], blocks: int) -> tuple[float, float]:
    """Seconds on the clock and of this process's CPU; all blocks must have been served."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    assert await call == blocks
    return time.perf_counter() - started_s, time.process_time() - cpu_s


class Report:
    """Times by what was done; the first of a pair is that of buffers."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._times: dict[str, list[tuple[float, float]]] = {}

    async def measure(self, name: str, call: Awaitable[int]) -> None:
        self._times.setdefault(name, []).append(await timed(call, self._work.count))

    def lines(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        before_s = 0.0
        for name, times in self._times.items():
            median_s = statistics.median(elapsed_s for elapsed_s, _ in times)
            cpu_s = statistics.median(cpu_s for _, cpu_s in times)
            line: dict[str, object] = {
                "benchmark": name,
                "value": round(median_s * 1e3, 1),
                "unit": "ms",
                "best_ms": round(min(times)[0] * 1e3, 1),
                "client_cpu_s_per_gb": round(cpu_s / self._work.bytes * GB, 3),
            }
            if name.endswith("_run"):
                line["of_buffers"] = round(median_s / before_s, 3)
            before_s = median_s
            found.append(line)
        return found


async def measure(name: str, cluster: LocalCluster, region: ArenaRegion, rounds: int) -> None:
    work = Workload(name, region)
    report = Report(work)
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        async with StoreClient.connect(cluster.cluster_path) as store:
            lossy = StoreClient(
                without_two_nodes(store.map, refusing.getsockname()[1], work.keys[0])
            )
            await work.save(store)
            for _ in range(rounds):
                for suffix, client in (("", store), ("_two_lost", lossy)):
                    await report.measure(f"fetch{suffix}", work.fetch(client))
                    await report.measure(f"fetch{suffix}_run", work.fetch_run(client))
            work.check()
            for _ in range(rounds):
                await work.forget(store)
                await report.measure("save", work.save(store))
                await work.forget(store)
                await report.measure("save_run", work.save_run(store))
            await work.forget(store)
            lossy.close()
    emit(work, name, report, rounds)


def emit(work: Workload, name: str, report: Report, rounds: int) -> None:
    geometry = run_geometry(work.namespace.layout, 10, 2)
    parameters = {
        "layout": name,
        "blocks": work.count,
        "block_bytes": work.namespace.layout.block_bytes,
        "pieces": sum(map(len, geometry.pieces[:10])),
        "columns": len(geometry.cuts) - 1,
        "rounds": rounds,
    }
    machine = describe_machine()
    for line in report.lines():
        print(json.dumps({**line, "parameters": parameters, **machine}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    descriptor = ArenaRegion.create(ARENA_BYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        ArenaRegion(descriptor) as region,
        LocalCluster.start(Path(folder) / "c", target_size_bytes=512 << 20) as cluster,
    ):
        for name in SIZES:
            asyncio.run(measure(name, cluster, region, rounds))
    os.close(descriptor)


if __name__ == "__main__":
    main()
