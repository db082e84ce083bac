"""Evictions of all nodes of a real cluster in the test's own loop, and what the nodes hold."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from gc_worker.batch_eviction import StepHook, no_hook
from gc_worker.cluster_link import ClusterLink
from gc_worker.columns import TargetColumns, scan_columns
from gc_worker.context import WorkerContext
from gc_worker.eviction import Eviction
from gc_worker.headers import HeaderReader
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.store_client import StoreClient
from kvstore.cluster.map import write_cluster_map
from kvstore.cluster.source import FileMapSource
from kvstore.node.clock import SystemClock
from tests.kvstore.blocks import RandomBlocks

BLOCK_BYTES = 4096


class AheadClock(SystemClock):
    """The real clock with another idea of what day it is, and of how long ago it began.

    `stands_at_s`: the Unix time at which it stands still, if it does.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.stands_at_s: float | None = None
        self.ahead_monotonic_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_monotonic_s

    def unix_ns(self) -> int:
        if self.stands_at_s is not None:
            return int(self.stands_at_s * 1e9)
        return super().unix_ns() + int(self.ahead_s * 1e9)


class WorkerBench:
    """One context, clock and eviction for each node of `cluster`."""

    def __init__(self, cluster: LocalCluster, on_step: StepHook, bucket_s: int) -> None:
        loop = asyncio.get_running_loop()
        self.cluster = cluster
        self.contexts: dict[str, WorkerContext] = {}
        self.clocks: dict[str, AheadClock] = {}
        self.evictions: dict[str, Eviction] = {}
        for node in cluster.node_names:
            clock = self.clocks[node] = AheadClock()
            context = self.contexts[node] = WorkerContext(
                node=node,
                cluster_path=cluster.cluster_path,
                link=ClusterLink(FileMapSource(cluster.cluster_path), loop, time.monotonic),
                clock=clock,
                sleep=asyncio.sleep,
                rng=random.Random(7),
            )
            # Tests set one worker's clock ahead to let time pass; the nodes' clocks are real.
            self.evictions[node] = Eviction(
                context, on_step=on_step, bucket_s=bucket_s, is_clock_compared=False
            )
        self.link = self.contexts[cluster.node_names[0]].link
        self.code = self.link.map.code

    @staticmethod
    @asynccontextmanager
    async def open(
        cluster: LocalCluster,
        *,
        on_step: StepHook = no_hook,
        bucket_s: int = 60,
        is_policy_known: bool = True,
    ) -> AsyncIterator[WorkerBench]:
        bench = WorkerBench(cluster, on_step, bucket_s)
        for context in bench.contexts.values():
            if is_policy_known:
                context.policy_known.set()
        try:
            yield bench
        finally:
            for context in bench.contexts.values():
                context.link.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The eviction loops of all nodes run; at the end a last time each."""
        tasks = [asyncio.create_task(eviction.run()) for eviction in self.evictions.values()]
        try:
            yield
        finally:
            failed = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert failed == []
        for eviction in self.evictions.values():
            await eviction.tick()

    async def save(self, count: int, *, seed: int, ttl_class: str = "chat") -> RandomBlocks:
        """Blocks of a chain of their own; not all of them need find room."""
        blocks = RandomBlocks(count, block_bytes=BLOCK_BYTES, seed=seed)
        async with StoreClient.connect(self.cluster.cluster_path) as store:
            await store.save(blocks.namespace, blocks.keys, blocks.sources, ttl_class=ttl_class)
        return blocks

    async def match(self, blocks: RandomBlocks) -> int:
        async with StoreClient.connect(self.cluster.cluster_path) as store:
            return await store.match(blocks.namespace, blocks.keys)

    async def columns(self, node: str) -> TargetColumns:
        (target,) = self.link.map.targets_by_node[node]
        stat = await self.link.statistics(node)
        return await scan_columns(
            partial(self.link.scan, target.name), tuple(stat["targets"][0]["ttl_classes"])
        )

    async def fill(self, node: str) -> float:
        """Share of its slots that a node's target uses."""
        (stat,) = (await self.link.statistics(node))["targets"]
        # An empty target does not know yet how large its slots will be.
        return float(stat["slots_used"] / max(stat["slots_total"], 1))

    async def shards_by_key(self) -> Counter[bytes]:
        """How many nodes hold a shard of each block that any of them holds; while nothing goes."""
        found: Counter[bytes] = Counter()
        for node in self.cluster.node_names:
            columns = await self.columns(node)
            reader = HeaderReader(self.cluster.target_folder(node))
            headers = reader.read(columns.location.tolist(), columns.generation)
            reader.close()
            assert len(headers.rows) == len(columns), node
            found.update(np.asarray(headers.headers["key"]).tolist())
        return found


def start_uneven(folder: Path, sizes: list[int], *, k: int, m: int) -> LocalCluster:
    """A cluster whose targets have different sizes."""
    cluster = LocalCluster.start(folder, nodes=len(sizes), k=k, m=m, target_size_bytes=max(sizes))
    cluster.stop()
    targets = tuple(
        replace(target, size_bytes=size)
        for target, size in zip(cluster.map.targets, sizes, strict=True)
    )
    changed = replace(cluster.map, epoch=cluster.map.epoch + 1, targets=targets)
    write_cluster_map(changed, cluster.cluster_path)
    return LocalCluster.start(folder)
