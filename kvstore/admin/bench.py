"""`cachalot bench`: how fast a cluster is, beside what the machine can do in the same run.

Each round takes turns between the baselines (memcpy, raw sockets) and the store, so that other work
on the machine hits all of them alike; what counts is the ratio of medians. The blocks that a run
stores are forgotten at its end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..client import BlockLayout, Namespace, Section, StoreClient
from ..client.context import batch_blocks
from ..cluster.entities import ClusterMap
from ..cluster.map import load_cluster_map
from ..cluster.placement import SPAN_BLOCKS
from ..layout import BLOCK_TOKENS, padded_bytes, shard_bytes
from .bench_failure import BenchFailed
from .delaying_proxy import delaying_proxy
from .machine import describe_machine
from .quantities import count_of
from .raw_socket import RawSocketBaseline, raw_socket_baseline

SMALL_REQUESTS = {1: 201, 8: 101, 64: 51}
"""Blocks of a small request, and how often it is measured."""
MATCH_ROUNDS = 51
SLOW_NODE_DELAY_MS = 100
RAW_BATCHES_IN_FLIGHT = 2
"""What the baseline does best with."""
DEADLINE_S = 30.0
GB = 1e9

Report = Callable[[dict[str, Any]], None]
"""Takes one finished measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure."""

    blocks: int = 1024
    block_bytes: int = 113_920
    rounds: int = 9
    large_blocks: int = 0
    """A second, larger batch, to show that the cost grows linearly; 0: none."""
    seed: int = 1


class Workload:
    """Blocks of random bytes with their keys, and a place to fetch them into."""

    def __init__(self, options: BenchOptions, blocks: int, tenant: str) -> None:
        self.count = blocks
        self.bytes = blocks * options.block_bytes
        rng = np.random.default_rng([options.seed, blocks])
        tokens = rng.integers(0, 1 << 17, blocks * BLOCK_TOKENS, dtype=np.int32)
        layout = BlockLayout(sections=(Section("block", options.block_bytes),))
        self.namespace = Namespace(
            model="bench", weights="random", tokenizer="none", layout=layout, tenant=tenant
        )
        self.keys = self.namespace.block_keys(tokens)
        self.source: NDArray[np.uint8] = rng.integers(0, 256, self.bytes, dtype=np.uint8)
        self.target: NDArray[np.uint8] = np.zeros(self.bytes, np.uint8)
        self.sources = _blocks_of(self.source, options.block_bytes)
        self.targets = _blocks_of(self.target, options.block_bytes)

    async def save(self, store: StoreClient) -> None:
        """Stores all blocks; raises BenchFailed unless every one was stored now."""
        result = await store.save(self.namespace, self.keys, self.sources, deadline_s=DEADLINE_S)
        if result.stored != self.count:
            raise BenchFailed(
                f"save: of {self.count} blocks {result.stored} were stored, {result.known} were"
                f" there already and {result.failed} were not taken by enough nodes; `cachalot"
                " status` shows which are full or down"
            )

    async def fetch(self, store: StoreClient, first: int = 0, count: int | None = None) -> None:
        """Fetches blocks; raises BenchFailed unless every one arrived."""
        end = self.count if count is None else first + count
        result = await store.fetch(
            self.namespace,
            self.keys[:end],
            self.targets[first:end],
            first_block=first,
            deadline_s=DEADLINE_S,
        )
        if result.blocks != end - first:
            raise BenchFailed(
                f"fetch: {result.blocks} of {count_of(end - first, 'block')} arrived"
                f" ({result.ended.value})"
            )

    def check(self) -> None:
        """What was fetched last is what was saved, to the bit."""
        if not np.array_equal(self.source, self.target):
            raise BenchFailed("fetched bytes differ from saved bytes")
        self.target[:] = 0


def _blocks_of(area: NDArray[np.uint8], block_bytes: int) -> list[memoryview]:
    view = area.data
    return [view[at : at + block_bytes] for at in range(0, len(area), block_bytes)]


async def run_bench(path: Path, options: BenchOptions, report: Report) -> None:
    """Measures the cluster whose map lies at `path`; each figure goes to `report` as it is there.

    Raises BenchFailed, ClusterMapError.
    """
    cluster_map = load_cluster_map(path)
    bench = Bench(cluster_map, options, report)
    async with _client(cluster_map) as store:
        workload = Workload(options, options.blocks, tenant=f"bench-{time.time_ns()}")
        try:
            await bench.measure_rates(store, workload)
            await bench.measure_small_requests(store, workload)
            await bench.measure_match(store, workload)
            await bench.measure_slow_node(store, workload)
        finally:
            await store.forget(workload.namespace, workload.keys)
        if options.large_blocks:
            await bench.measure_large(store)


@asynccontextmanager
async def _client(cluster_map: ClusterMap) -> AsyncIterator[StoreClient]:
    client = StoreClient(cluster_map)
    try:
        yield client
    finally:
        client.close()


class Bench:
    """The measurements of one run."""

    def __init__(self, cluster_map: ClusterMap, options: BenchOptions, report: Report) -> None:
        self._map = cluster_map
        self._options = options
        self._report = report
        self._machine = describe_machine()
        self._fetch_s = 0.0

    def _emit(self, name: str, **values: object) -> None:
        code = self._map.code
        parameters = {
            "code": f"{code.k}+{code.m}",
            "nodes": len(self._map.nodes),
            "block_bytes": self._options.block_bytes,
            "rounds": self._options.rounds,
        }
        self._report({"benchmark": name, **values, "parameters": parameters, **self._machine})

    def _emit_rate(
        self, name: str, work: Workload, times_s: list[float], **values: object
    ) -> float:
        median_s = statistics.median(times_s)
        rate = work.bytes / median_s / GB
        self._emit(
            name,
            blocks=work.count,
            value=round(rate, 3),
            unit="GB/s",
            median_ms=round(median_s * 1e3, 2),
            best_ms=round(min(times_s) * 1e3, 2),
            **values,
        )
        return rate

    @asynccontextmanager
    async def _baseline(self, blocks: int) -> AsyncIterator[RawSocketBaseline]:
        code = self._map.code
        size = shard_bytes(self._options.block_bytes, code.k)
        with raw_socket_baseline(
            width=code.width, k=code.k, shard_bytes=size, shard_count=blocks
        ) as baseline:
            yield baseline

    def _raw_fetch(self, baseline: RawSocketBaseline, targets: list[memoryview]) -> float:
        blocks = min(SPAN_BLOCKS, batch_blocks(self._options.block_bytes))
        return baseline.fetch(targets, batch_blocks=blocks, in_flight=RAW_BATCHES_IN_FLIGHT)

    async def measure_rates(self, store: StoreClient, work: Workload) -> None:
        """memcpy, raw sockets, save and fetch in turns; leaves the blocks stored."""
        memcpy, raw, save, fetch, cpu = [], [], [], [], []
        async with self._baseline(work.count) as baseline:
            padded = padded_bytes(self._options.block_bytes, self._map.code.k)
            targets = _blocks_of(np.zeros(work.count * padded, np.uint8), padded)
            self._raw_fetch(baseline, targets)  # the first touches memory and warms connections
            await work.save(store)
            await work.fetch(store)
            work.check()
            for _ in range(self._options.rounds):
                await store.forget(work.namespace, work.keys)
                save.append(await _timed_await(work.save(store)))
                # The nodes that were not waited for are still at it.
                await store.finish_writes()
                memcpy.append(_timed(lambda: np.copyto(work.target, work.source)))
                raw.append(self._raw_fetch(baseline, targets))
                cpu_before_s = time.process_time()
                fetch.append(await _timed_await(work.fetch(store)))
                cpu.append(time.process_time() - cpu_before_s)
                work.check()
        self._fetch_s = statistics.median(fetch)
        self._emit_rate("memcpy", work, memcpy)
        raw_rate = self._emit_rate("raw_socket_fetch", work, raw)
        for name, times_s in (("save", save), ("fetch", fetch)):
            rate = work.bytes / statistics.median(times_s) / GB
            extra = {"of_raw_socket": round(rate / raw_rate, 3)}
            if name == "fetch":
                extra["client_cpu_s_per_gb"] = round(statistics.median(cpu) / work.bytes * GB, 3)
            self._emit_rate(name, work, times_s, **extra)

    async def measure_small_requests(self, store: StoreClient, work: Workload) -> None:
        """Latency of a few blocks at a time, at random places."""
        rng = np.random.default_rng(self._options.seed)
        for count, rounds in SMALL_REQUESTS.items():
            if count > work.count:
                continue
            times_s = []
            for first in rng.integers(0, work.count - count + 1, rounds).tolist():
                # Whole spans for the largest, as an engine asks for them.
                start = first - first % SPAN_BLOCKS if count == SPAN_BLOCKS else first
                times_s.append(await _timed_await(work.fetch(store, start, count)))
            self._emit_latency("fetch_latency", count, times_s)

    async def measure_match(self, store: StoreClient, work: Workload) -> None:
        """Latency of the match of all keys."""
        times_s = []
        for _ in range(MATCH_ROUNDS):
            started_s = time.perf_counter()
            found = await store.match(work.namespace, work.keys)
            times_s.append(time.perf_counter() - started_s)
            if found != work.count:
                raise BenchFailed(f"match: {found} of {work.count} blocks")
        self._emit_latency("match", work.count, times_s)

    def _emit_latency(self, name: str, blocks: int, times_s: list[float]) -> None:
        ordered = sorted(times_s)
        self._emit(
            name,
            blocks=blocks,
            value=round(statistics.median(ordered) * 1e3, 3),
            unit="ms",
            p99_ms=round(ordered[int(len(ordered) * 0.99)] * 1e3, 3),
            best_ms=round(ordered[0] * 1e3, 3),
        )

    async def measure_slow_node(self, store: StoreClient, work: Workload) -> None:
        """A fetch while one node takes 100 ms longer for each request, against one without."""
        node = self._map.node_of(self._map.groups[0].targets[0])
        with delaying_proxy(node.host, node.port, SLOW_NODE_DELAY_MS) as port:
            nodes = tuple(
                replace(one, address=f"127.0.0.1:{port}") if one.name == node.name else one
                for one in self._map.nodes
            )
            times_s, undisturbed_s = [], []
            for _ in range(self._options.rounds):
                # A new client each time: it must find out by itself which node is slow.
                async with _client(replace(self._map, nodes=nodes)) as slow_store:
                    times_s.append(await _timed_await(work.fetch(slow_store)))
                    work.check()
                async with _client(self._map) as fresh_store:
                    undisturbed_s.append(await _timed_await(work.fetch(fresh_store)))
                    work.check()
        ratio = statistics.median(times_s) / statistics.median(undisturbed_s)
        self._emit_rate(
            "fetch_one_slow_node",
            work,
            times_s,
            delay_ms=SLOW_NODE_DELAY_MS,
            of_undisturbed_time=round(ratio, 3),
        )

    async def measure_large(self, store: StoreClient) -> None:
        """The same fetch with many more blocks: time per block beside that of the small one."""
        options = self._options
        work = Workload(options, options.large_blocks, tenant=f"bench-{time.time_ns()}")
        try:
            await work.save(store)
            await work.fetch(store)
            work.check()
            times_s = [
                await _timed_await(work.fetch(store)) for _ in range(max(3, options.rounds // 3))
            ]
            work.check()
        finally:
            await store.forget(work.namespace, work.keys)
        per_block = statistics.median(times_s) / work.count
        ratio = per_block / (self._fetch_s / options.blocks)
        self._emit_rate("fetch_large", work, times_s, time_per_block_of_small=round(ratio, 3))


def _timed(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


async def _timed_await(action: Awaitable[object]) -> float:
    started_s = time.perf_counter()
    await action
    return time.perf_counter() - started_s
