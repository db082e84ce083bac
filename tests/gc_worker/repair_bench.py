"""Worker contexts on a cluster of real nodes, in the test's own loop, and ways to harm blocks."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType

import numpy as np

from gc_worker.cluster_link import ClusterLink
from gc_worker.context import WorkerContext
from gc_worker.hottest import rows_of_scan, walk_slots
from gc_worker.orphans import Suspects
from gc_worker.redundancy_pass import RedundancyOptions, RedundancyReport, check_redundancy
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.store_client import StoreClient
from kvstore.cluster.entities import ClusterMap
from kvstore.errors import NodeError
from kvstore.node.clock import SystemClock
from kvstore.node.segment import LOCATION_BITS, SLOT_MASK, SegmentShape
from kvstore.node.slot import SlotGeometry
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.settings import SettingValue
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S

BLOCK_BYTES = 4096
AT_ONCE = RedundancyOptions(
    interval_s=0.1, settle_s=0, quiet_s=0, confirm_unreadable_s=0.0, rows_per_s=1e9
)
"""What was written or used a moment ago is looked at too."""


async def empty(cluster: LocalCluster) -> None:
    """Take away all that a cluster's nodes hold, for the test that has it next."""
    async with RepairBench.open(cluster) as bench:
        await bench.forget_all()


class FixedMap:
    """A map that stays as it is."""

    def __init__(self, cluster_map: ClusterMap) -> None:
        self._map = cluster_map

    def load(self) -> ClusterMap:
        return self._map

    def has_changed(self) -> bool:
        return False


class RepairBench:
    """One context for each node of `cluster`."""

    def __init__(self, cluster: LocalCluster, contexts: dict[str, WorkerContext]) -> None:
        self.cluster = cluster
        self.contexts = contexts
        self.link = next(iter(contexts.values())).link
        self.code = self.link.map.code
        self._passes = 0

    @staticmethod
    @asynccontextmanager
    async def open(
        cluster: LocalCluster, cluster_map: ClusterMap | None = None
    ) -> AsyncIterator[RepairBench]:
        """`cluster_map`: another one than the cluster's, such as one with proxies in it."""
        loop = asyncio.get_running_loop()
        links = []
        contexts = {}
        for node in cluster.node_names:
            link = ClusterLink(FixedMap(cluster_map or cluster.map), loop, time.monotonic)
            links.append(link)
            contexts[node] = WorkerContext(
                node=node,
                cluster_path=cluster.cluster_path,
                link=link,
                clock=SystemClock(),
                sleep=asyncio.sleep,
                rng=random.Random(7),
                policy=policy_of({"repair_bytes_per_s": 1 << 30, "scrub_bytes_per_s": 1 << 30}),
            )
        bench = RepairBench(cluster, contexts)
        try:
            yield bench
        finally:
            for link in links:
                link.close()

    async def check(
        self,
        options: RedundancyOptions = AT_ONCE,
        suspects: dict[str, Suspects] | None = None,
        nodes: Sequence[str] | None = None,
    ) -> dict[str, RedundancyReport]:
        """One redundancy pass of each node, one after the other."""
        self._passes += 1
        reports = {}
        for node in nodes or self.cluster.node_names:
            mine = suspects[node] if suspects else Suspects(options.confirm_unreadable_s)
            reports[node] = await check_redundancy(self.contexts[node], options, mine, self._passes)
        return reports

    async def save(self, count: int, *, seed: int, block_bytes: int = BLOCK_BYTES) -> RandomBlocks:
        """Blocks that all nodes of their group hold."""
        blocks = RandomBlocks(count, block_bytes=block_bytes, seed=seed)
        async with StoreClient.connect(self.cluster.cluster_path) as store:
            result = await store.save(blocks.namespace, blocks.keys, blocks.sources)
            assert result.stored == count
        await self.wait_for_shards(blocks.keys, self.code.width)
        return blocks

    async def fetch(self, blocks: RandomBlocks) -> bool:
        """Whether all blocks come back to the bit."""
        target = blocks.empty_target()
        async with StoreClient.connect(self.cluster.cluster_path) as store:
            result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        return result.blocks == len(blocks.keys) and np.array_equal(target.area, blocks.area)

    async def locate(self, target: str, keys: Sequence[bytes]) -> np.ndarray:
        """LOCATION records of one target; zeros if its node does not answer."""
        found = []
        for at in range(0, len(keys), wire.KEYS_PER_REQUEST_MAX):
            some = keys[at : at + wire.KEYS_PER_REQUEST_MAX]
            try:
                found.append(
                    await self.link.ask_records(
                        target,
                        wire.Op.LOCATE,
                        wire.LOCATION,
                        body=b"".join(some),
                        count=len(some),
                    )
                )
            except NodeError:
                found.append(np.zeros(len(some), wire.LOCATION))
        return np.concatenate(found)

    async def count_shards(self, keys: Sequence[bytes]) -> list[int]:
        """How many targets hold a shard of each block."""
        names = [target.name for target in self.link.map.targets]
        rows = [(await self.locate(name, keys))["status"].tolist() for name in names]
        return [sum(column) for column in zip(*rows, strict=True)]

    async def wait_for_shards(self, keys: Sequence[bytes], shards: int) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while (counts := await self.count_shards(keys)) != [shards] * len(keys):
            assert time.monotonic() < end_s, f"{counts}, expected {shards} of each"
            await asyncio.sleep(0.02)

    async def wait_until_up(self, node: str) -> None:
        """Until the node answers again, to everybody who asks."""
        for context in self.contexts.values():
            end_s = time.monotonic() + PATIENCE_S
            while True:
                try:
                    await context.link.statistics(node)
                    break
                except NodeError:
                    assert time.monotonic() < end_s, f"{node} does not answer"
                    await asyncio.sleep(0.02)

    async def wait_until_lost(self, node: str, *, is_lost: bool) -> None:
        """Until the node has noticed that its target's folder is gone, or back."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            stat = await self.link.statistics(node)
            if stat["targets"][0]["is_lost"] is is_lost:
                return
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)

    async def sum_of(self, name: str) -> int:
        """A number of STAT, summed over all targets of all nodes."""
        stats = [await self.link.statistics(node) for node in self.cluster.node_names]
        return sum(int(target[name]) for stat in stats for target in stat["targets"])

    def targets_by_shard(self, blocks: RandomBlocks, block: int = 0) -> tuple[str, ...]:
        """Where the shards of a block belong."""
        return self.link.router.span_of(blocks.keys, block).targets_by_shard()

    async def forget(self, target: str, keys: Sequence[bytes]) -> None:
        """Drop the shards of some blocks at one target."""
        body = b"".join(keys)
        await self.link.ask(target, wire.Op.FORGET, body=body, count=len(keys))

    async def announce(self, policy: RetentionPolicy, nodes: Sequence[str] = ()) -> None:
        """Have the policy taken by nodes (all, unless some are named) and by all contexts."""
        document = policy.to_json()
        for node in nodes or self.cluster.node_names:
            await self.link.ask(
                self.link.any_target(node), wire.Op.POLICY, body=document, count=len(document)
            )
        for context in self.contexts.values():
            context.policy = policy

    async def forget_all(self) -> None:
        """Empty every target that answers."""
        for target in self.link.map.targets:
            scan = partial(self.link.scan, target.name)
            async for head, rows in walk_slots(scan):
                band = rows_of_scan(head, rows)
                for at in range(0, len(band), 1024):
                    some = band.take(slice(at, at + 1024))
                    items = np.zeros(len(some), wire.EVICT_ITEM)
                    items["location"], items["generation"] = some.location, some.generation
                    items["used_until_s"], items["reason"] = 0xFFFFFFFF, wire.EvictReason.ORPHANED
                    await self.link.ask(
                        target.name, wire.Op.EVICT, body=items.tobytes(), count=len(items)
                    )

    async def place_of(self, target: str, key: bytes) -> tuple[str, int, SegmentShape]:
        """Path, slot and shape of the segment in which a target keeps its shard of a block."""
        generation = (await self.locate(target, [key]))["generation"][0]
        async for head, rows in walk_slots(partial(self.link.scan, target)):
            band = rows_of_scan(head, rows)
            for location in band.location[band.generation == generation].tolist():
                node = self.link.map.target_by_name[target].node
                number = location >> LOCATION_BITS
                path = self.cluster.target_folder(node) / f"segment-{number:06d}.seg"
                count = _slot_count(path)
                shape = SegmentShape(
                    number=number, geometry=SlotGeometry(head.payload_bytes), slot_count=count
                )
                return str(path), location & SLOT_MASK, shape
        raise AssertionError(f"{target} holds no shard of the block")

    async def flip_payload(self, target: str, key: bytes) -> None:
        """Flip a bit of the shard on its node's disk."""
        path, slot, shape = await self.place_of(target, key)
        size = shape.geometry.payload_bytes
        flip_byte(path, shape.payload_offset + slot * size + size // 2)


def flip_byte(path: str, offset: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte[0] ^ 0x10]), offset)
    finally:
        os.close(descriptor)


def policy_of(settings: dict[str, SettingValue], **changes: object) -> RetentionPolicy:
    """The default policy with other settings, or other fields."""
    values = {"version": 1, "ttl_s": DEFAULT_POLICY.ttl_s, **changes}
    return RetentionPolicy(settings=MappingProxyType(settings), **values)  # type: ignore[arg-type]


def _slot_count(path: object) -> int:
    with open(str(path), "rb") as file:
        return int.from_bytes(file.read(28)[24:28], "little")
