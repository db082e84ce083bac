"""What fetch workers bring and cost: throughput and CPU seconds by their number, into an arena.

Twelve nodes on loopback (code 10+2), 1,024 blocks of V4.1-Flash's layout (113,920 B), one fetch
after the other into one run, cut among the workers. Prints JSON lines; beside the throughput stand
a memcpy of the same bytes in the same run, and the CPU seconds a GB of the workers, of the agent's
own process, and of all nodes together, from the kernel's accounting. Nodes, workers and agent share
the cores of this machine: where `cpu_s_per_gb` of all of them fill the cores, more workers cannot
bring more, and their own cost a GB is the figure that counts.

    python -m benchmarks.fetch_workers [--seconds 4] [--workers 1 2 4] [--blocks 1024] [--saves]

With `--saves` it measures instead what saves by the store worker take from fetches, with and
without its niceness.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from benchmarks.node_read import cpu_s, emit
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalFolder
from kvstore.agent.jobs import FetchJob, StoreJob
from kvstore.agent.workers import STORE_NICENESS, WorkerPool
from kvstore.arena.region import ArenaRegion, RunMemory
from kvstore.arena.run_layout import RunLayout
from kvstore.arena.wakeup import make_wakeup
from kvstore.client import BlockLayout, Namespace, Section, StoreClient
from kvstore.layout import BLOCK_TOKENS

SECTIONS = (22_784, 22_784, 22_784, 45_568)
LAYOUT = BlockLayout(tuple(Section(f"layer{i}", size) for i, size in enumerate(SECTIONS)))
NAMESPACE = Namespace(model="bench", weights="r1", tokenizer="t1", layout=LAYOUT)
SAVE_BLOCKS = 128
DEADLINE_S = 60.0


def random_keys(rng: np.random.Generator, blocks: int) -> list[bytes]:
    """A chain that nobody has."""
    return NAMESPACE.block_keys(rng.integers(0, 1 << 16, blocks * BLOCK_TOKENS, dtype=np.int32))


class Bench:
    """An arena with a run for fetches and one for saves, and blocks that the nodes have."""

    def __init__(self, cluster: LocalCluster, folder: LocalFolder, blocks: int) -> None:
        self.cluster = cluster
        self.folder = folder
        self.blocks = blocks
        self.rng = np.random.default_rng(7)
        self.layout = RunLayout(LAYOUT, blocks)
        self.save_layout = RunLayout(LAYOUT, SAVE_BLOCKS)
        self.arena = ArenaRegion.create(self.layout.run_bytes + self.save_layout.run_bytes)
        self.region = ArenaRegion(self.arena)
        self.run: RunMemory = self.region.run(0, self.layout)
        source = self.region.run(self.layout.run_bytes, self.save_layout)
        area = np.frombuffer(source.view, np.uint8)
        area[:] = self.rng.integers(0, 256, len(area), dtype=np.uint8)
        self.waker, self.wakeup = make_wakeup()
        self.keys = random_keys(self.rng, blocks)
        self.content = self.rng.integers(0, 256, (blocks, LAYOUT.block_bytes), dtype=np.uint8)

    @property
    def fetch_bytes(self) -> int:
        return self.blocks * LAYOUT.block_bytes

    async def save_content(self) -> None:
        async with StoreClient.connect(self.cluster.cluster_path) as client:
            result = await client.save(
                NAMESPACE, self.keys, list(self.content), deadline_s=DEADLINE_S
            )
        assert result.failed == 0, result

    @asynccontextmanager
    async def pool(
        self, workers: int, *, has_store: bool = False, niceness: int = STORE_NICENESS
    ) -> AsyncIterator[tuple[WorkerPool, float]]:
        """A pool, warm, and the seconds that its start took."""
        pool = WorkerPool(
            cluster_path=Path(self.cluster.cluster_path),
            arena=self.arena,
            fetch_workers=workers,
            has_store_worker=has_store,
            loop=asyncio.get_running_loop(),
            clock=time.monotonic,
            store_niceness=niceness,
        )
        begin = time.perf_counter()
        await pool.start()
        start_s = time.perf_counter() - begin
        try:
            await self.fetch(pool)
            self.check()
            yield pool, start_s
        finally:
            await pool.stop(5.0)

    async def fetch(self, pool: WorkerPool) -> float:
        """Seconds that a fetch of everything took."""
        job = FetchJob(
            owner=1,
            namespace=NAMESPACE,
            keys=b"".join(self.keys),
            first_block=0,
            run_offset=0,
            run_blocks=self.blocks,
            is_by_layer=False,
            deadline_s=DEADLINE_S,
        )
        begin = time.perf_counter()
        ended = await pool.fetch(job, self.waker)
        assert ended.blocks == self.blocks, ended
        return time.perf_counter() - begin

    async def save_new(self, pool: WorkerPool) -> None:
        """Save blocks that nobody has, and forget them again."""
        keys = random_keys(self.rng, SAVE_BLOCKS)
        job = StoreJob(
            owner=1,
            namespace=NAMESPACE,
            keys=b"".join(keys),
            first_block=0,
            run_offset=self.layout.run_bytes,
            run_blocks=SAVE_BLOCKS,
            ttl_class="chat",
            deadline_s=DEADLINE_S,
        )
        ended = await pool.store(job)
        assert ended.failed == 0, ended

    def check(self) -> None:
        """The run holds what was saved, byte by byte."""
        start = 0
        for number, size in enumerate(SECTIONS):
            found = np.frombuffer(self.run.section(number), np.uint8).reshape(self.blocks, size)
            assert np.array_equal(found, self.content[:, start : start + size])
            start += size

    def memcpy_s(self) -> float:
        """Seconds that a copy of as many bytes into the run takes."""
        start = self.layout.section_offsets[0]
        target = np.frombuffer(self.run.view, np.uint8)[start : start + self.fetch_bytes]
        source = self.content.reshape(-1)
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    def nodes_cpu_s(self) -> float:
        records = [self.folder.read_record(node) for node in self.cluster.node_names]
        return sum(cpu_s(record.pid) for record in records if record is not None)


def workers_cpu_s(pool: WorkerPool) -> float:
    return sum(cpu_s(worker["pid"]) for worker in pool.describe()["fetch"]["workers"])


async def measure_workers(bench: Bench, workers: int, seconds: float) -> None:
    async with bench.pool(workers) as (pool, start_s):
        took, copies = [], []
        nodes_s, workers_s = bench.nodes_cpu_s(), workers_cpu_s(pool)
        agent_s, begin = 0.0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            before_s = time.process_time()
            took.append(await bench.fetch(pool))
            agent_s += time.process_time() - before_s
            copies.append(bench.memcpy_s())
        gb = len(took) * bench.fetch_bytes / 1e9
        emit(
            "fetch_workers",
            {"workers": workers, "blocks": bench.blocks, "fetches": len(took)},
            gb_per_s=bench.fetch_bytes / 1e9 / statistics.median(took),
            gb_per_s_best=bench.fetch_bytes / 1e9 / min(took),
            memcpy_gb_per_s=bench.fetch_bytes / 1e9 / statistics.median(copies),
            workers_cpu_s_per_gb=(workers_cpu_s(pool) - workers_s) / gb,
            nodes_cpu_s_per_gb=(bench.nodes_cpu_s() - nodes_s) / gb,
            agent_cpu_s_per_gb=agent_s / gb,
            pool_start_s=start_s,
        )


async def measure_saves(bench: Bench, niceness: int, seconds: float) -> None:
    """Fetches one after the other, beside saves one after the other."""
    async with bench.pool(1, has_store=True, niceness=niceness) as (pool, _):
        took: list[float] = []
        saves = 0
        begin = time.perf_counter()

        async def save_on() -> None:
            nonlocal saves
            while time.perf_counter() - begin < seconds:
                await bench.save_new(pool)
                saves += 1

        saving = asyncio.ensure_future(save_on())
        while not saving.done():
            took.append(await bench.fetch(pool))
        await saving
        wall_s = time.perf_counter() - begin
        emit(
            "fetch_beside_saves",
            {"niceness": niceness, "blocks": bench.blocks, "fetches": len(took)},
            fetch_gb_per_s=bench.fetch_bytes / 1e9 / statistics.median(took),
            fetch_p90_ms=1e3 * sorted(took)[int(0.9 * len(took))],
            save_gb_per_s=saves * SAVE_BLOCKS * LAYOUT.block_bytes / 1e9 / wall_s,
        )


async def measure(
    cluster: LocalCluster, folder: LocalFolder, arguments: argparse.Namespace
) -> None:
    bench = Bench(cluster, folder, arguments.blocks)
    await bench.save_content()
    if arguments.saves:
        for niceness in (0, STORE_NICENESS, 0, STORE_NICENESS):
            await measure_saves(bench, niceness, arguments.seconds)
        return
    for workers in arguments.workers:
        await measure_workers(bench, workers, arguments.seconds)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--saves", action="store_true")
    parser.add_argument("--folder", help="where the cluster lies (default: a temporary folder)")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        LocalCluster.start(
            Path(folder) / "c", nodes=12, k=10, m=2, target_size_bytes=2 << 30
        ) as cluster,
    ):
        asyncio.run(measure(cluster, LocalFolder(Path(folder) / "c"), arguments))


if __name__ == "__main__":
    main()
