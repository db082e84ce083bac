"""Nodes that are full: a save that they refuse leaves nothing behind that nobody can read."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import batch_save, health
from kvstore.client.inquiry import ask_node
from kvstore.client.router import Lane
from kvstore.client.store_client import StoreClient
from kvstore.cluster.map import write_cluster_map
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S

BLOCK_BYTES = 16 << 10
SMALL_BYTES = 1 << 20
K = 4


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Six nodes with room, code 4+2, without workers."""
    folder = tmp_path_factory.mktemp("even")
    with LocalCluster.start(folder / "c", nodes=6, k=K, m=2, target_size_bytes=64 << 20) as cluster:
        yield cluster


@pytest.fixture
def uneven(tmp_path: Path) -> Iterator[LocalCluster]:
    """Six nodes, code 4+2, without workers; three of them hold a sixteenth of the others."""
    with LocalCluster.start(
        tmp_path / "c",
        nodes=6,
        k=K,
        m=2,
        target_size_bytes=16 << 20,
        segment_size_bytes=256 << 10,
    ) as cluster:
        targets = tuple(
            replace(target, size_bytes=SMALL_BYTES) if i < 3 else target
            for i, target in enumerate(cluster.map.targets)
        )
        cluster.stop()
        write_cluster_map(replace(cluster.map, targets=targets), cluster.cluster_path)
    with LocalCluster.start(tmp_path / "c") as cluster:
        yield cluster


@asynccontextmanager
async def client_of(cluster: LocalCluster) -> AsyncIterator[StoreClient]:
    client = StoreClient(cluster.map)
    try:
        yield client
    finally:
        await client.end_background()
        client.close()


async def count_shards(store: StoreClient, keys: Sequence[bytes]) -> list[int]:
    """For each block: how many nodes hold a shard of the version that most of them hold."""
    router, loop = store._shared.router, asyncio.get_running_loop()
    versions: list[Counter[int]] = [Counter() for _ in keys]
    for channel in router.shard_channels(router.span_of(keys, 0), Lane.READ):
        for at in range(0, len(keys), 512):
            part = keys[at : at + 512]
            answer = await ask_node(
                channel,
                wire.Op.LOCATE,
                body=wire.join_keys(part),
                count=len(part),
                deadline_s=5.0,
                loop=loop,
            )
            for row, found in enumerate(wire.parse_records(answer, wire.LOCATION, len(part)), at):
                if found["status"]:
                    versions[row][int(found["block_xxh3"])] += 1
    return [max(counts.values(), default=0) for counts in versions]


async def set_policy(store: StoreClient, names: Sequence[str], policy: RetentionPolicy) -> None:
    """Tells nodes a policy, as a worker would."""
    cluster_map, document = store.map, policy.to_json()
    for name in names:
        (target,) = cluster_map.targets_by_node[name]
        channel = store._shared.router.channel(target.name, Lane.READ)
        await ask_node(
            channel,
            wire.Op.POLICY,
            body=document,
            count=len(document),
            deadline_s=5.0,
            loop=asyncio.get_running_loop(),
        )


class Draining:
    """Makes nodes refuse as if they were full, and take shards again."""

    def __init__(self) -> None:
        self._policy = DEFAULT_POLICY

    async def turn(self, store: StoreClient, names: Sequence[str], is_on: bool) -> None:
        for name in names:
            self._policy = self._policy.with_draining(name, is_on, who="test", why="", at_s=1)
        await set_policy(store, names, self._policy)


@pytest.fixture(scope="module")
def draining() -> Draining:
    return Draining()


async def test_nothing_unreadable_is_left_when_small_nodes_fill_up_under_writers(
    uneven: LocalCluster,
) -> None:
    chains = [RandomBlocks(512, block_bytes=BLOCK_BYTES, seed=900 + i) for i in range(2)]
    async with client_of(uneven) as one, client_of(uneven) as other:

        async def write(store: StoreClient, blocks: RandomBlocks) -> int:
            failed = 0
            for end in range(16, 513, 16):
                saved = await store.save(
                    blocks.namespace,
                    blocks.keys[:end],
                    blocks.sources[end - 16 : end],
                    first_block=end - 16,
                )
                failed += saved.failed
            return failed

        failed = await asyncio.gather(write(one, chains[0]), write(other, chains[1]))
        assert sum(failed) > 256
        for store in (one, other):
            await store.finish_writes(deadline_s=20.0)
            assert not store.background_tasks
        for blocks in chains:
            counts = await count_shards(one, blocks.keys)
            assert not [count for count in counts if 0 < count < K]
            assert [count for count in counts if count >= K]


async def test_no_batch_is_sent_while_too_many_nodes_are_full_and_one_is_a_second_later(
    even: LocalCluster, draining: Draining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FULL_S", 6.0)
    monkeypatch.setattr(batch_save, "STRAGGLER_WAIT_S", PATIENCE_S)
    full = even.node_names[:3]
    chains = [RandomBlocks(4, block_bytes=BLOCK_BYTES, seed=920 + i) for i in range(3)]

    async def count_writes(store: StoreClient) -> int:
        reports = await store.node_reports()
        return sum(target["writes"] for one in reports for target in one.statistics["targets"])

    async with client_of(even) as store:
        await draining.turn(store, full, True)
        try:
            saved = await store.save(chains[0].namespace, chains[0].keys, chains[0].sources)
            assert saved.failed == 4
            writes = await count_writes(store)
            saved = await store.save(chains[1].namespace, chains[1].keys, chains[1].sources)
            assert saved.failed == 4
            assert await count_writes(store) == writes
        finally:
            await draining.turn(store, full, False)
        await asyncio.sleep(health.FULL_S * 1.1)
        saved = await store.save(chains[2].namespace, chains[2].keys, chains[2].sources)
        assert (saved.stored, saved.degraded) == (4, 0)


@pytest.mark.usefixtures("patient_inquiry")
@pytest.mark.parametrize("is_rival", [True, False], ids=["a rival completes it", "nobody does"])
async def test_a_refused_block_is_taken_back_unless_a_rival_has_completed_it(
    even: LocalCluster, draining: Draining, is_rival: bool
) -> None:
    full = even.node_names[:3]
    blocks = RandomBlocks(6, block_bytes=BLOCK_BYTES, seed=930 + is_rival)
    async with client_of(even) as store, client_of(even) as rival:
        await draining.turn(store, full, True)
        try:
            saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        finally:
            await draining.turn(store, full, False)
        assert saved.failed == 6
        assert await count_shards(store, blocks.keys) == [3] * 6
        if is_rival:
            saved = await rival.save(blocks.namespace, blocks.keys, blocks.sources)
            assert saved.failed == 0
        await store.finish_writes(deadline_s=20.0)
        assert await count_shards(store, blocks.keys) == [6 if is_rival else 0] * 6


async def test_ending_a_client_does_not_wait_longer_than_it_was_told(
    even: LocalCluster, draining: Draining
) -> None:
    full = even.node_names[:3]
    blocks = RandomBlocks(2, block_bytes=BLOCK_BYTES, seed=940)
    async with client_of(even) as store:
        await draining.turn(store, full, True)
        try:
            await store.save(blocks.namespace, blocks.keys, blocks.sources)
        finally:
            await draining.turn(store, full, False)
        assert store.background_tasks
        await store.finish_writes(deadline_s=0.2)
        assert store.background_tasks, "it takes two seconds until refused blocks are taken back"
        await store.end_background()
        assert not store.background_tasks
