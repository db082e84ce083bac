"""What expires or finds no room goes, from all nodes, and nothing else does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from gc_worker.batch_eviction import BatchEviction
from gc_worker.orphans import Suspects
from gc_worker.peers import Withdrawals
from gc_worker.redundancy_pass import check_redundancy
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import saving
from kvstore.client.store_client import StoreClient
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.retention_rules import Watermarks
from kvstore.wire import EvictReason
from tests.gc_worker.repair_bench import AT_ONCE, empty
from tests.gc_worker.worker_bench import WorkerBench, start_uneven
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S

DAY_S = 86_400
TARGET_BYTES = 2 << 20
"""Room for about 1,600 shards of 1 KiB."""


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("eviction") / "cluster"
    with LocalCluster.start(folder, nodes=6, k=4, m=2, target_size_bytes=TARGET_BYTES) as it:
        yield it


@pytest.fixture
async def cluster(shared_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Six nodes that hold nothing, and all run when the test ends."""
    yield shared_cluster
    await empty(shared_cluster)


async def test_expired_blocks_go_from_all_nodes_and_younger_classes_stay(
    cluster: LocalCluster,
) -> None:
    async with WorkerBench.open(cluster) as bench:
        agent = await bench.save(100, seed=1, ttl_class="agent")
        chat = await bench.save(100, seed=2, ttl_class="chat")
        bench.clocks["n02"].ahead_s = 4 * DAY_S
        await bench.evictions["n02"].tick()
        assert await bench.match(agent) == 0
        assert await bench.match(chat) == 100
        assert await bench.shards_by_key() == dict.fromkeys(chat.keys, 6)
        counters = bench.contexts["n02"].counters
        assert counters.evicted["expired"] == 100
        assert counters.withdrawn == 500


async def test_full_target_goes_down_to_its_low_watermark_deepest_blocks_first(
    cluster: LocalCluster,
) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(1600, seed=1)
        before = await bench.fill("n01")
        assert before > 0.9
        await _make_equally_old(bench, blocks)
        evicted = await bench.evictions["n01"].run_now()
        assert evicted["expired"] == 0
        assert 0.84 < await bench.fill("n01") <= 0.85
        left = set(await bench.shards_by_key())
        # What is left is the beginning of the chain, as far as it was stored at all.
        kept = [key in left for key in blocks.keys]
        assert kept == sorted(kept, reverse=True)
        assert await bench.match(blocks) == len(left)


async def test_nothing_goes_when_there_is_room_and_nothing_expired(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(500, seed=1)
        for eviction in bench.evictions.values():
            assert sum((await eviction.run_now()).values()) == 0
        assert await bench.match(blocks) == 500


async def test_use_that_only_peers_saw_spares_a_block(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster, bucket_s=1) as bench:
        used = await bench.save(20, seed=1)
        unused = await bench.save(20, seed=2)
        for blocks in (used, unused):
            await _make_equally_old(bench, blocks)
        saved_s = int((await bench.columns("n01")).last_used_s.max())
        await asyncio.sleep(max(saved_s + 4.1 - time.time(), 0))
        await _touch_at_peers(bench, used)
        # Now what was used when it was saved has expired, and what was used since has not.
        bench.clocks["n01"].stands_at_s = saved_s + 7 * DAY_S + 3.5
        evicted = await bench.evictions["n01"].run_now()
        assert evicted["expired"] == 20
        assert await bench.match(used) == 20
        assert await bench.match(unused) == 0
        assert bench.contexts["n01"].counters.spared == 20
        # The own node was told, and does not choose them again.
        assert (await bench.columns("n01")).last_used_s.min() > saved_s
        assert sum((await bench.evictions["n01"].run_now()).values()) == 0
        assert bench.contexts["n01"].counters.spared == 20


async def _touch_at_peers(bench: WorkerBench, blocks: RandomBlocks) -> None:
    """As a fetch does that leaves out n01."""
    peers = [node for node in bench.cluster.node_names if node != "n01"]
    await _touch(bench, blocks, peers, last_used_s=0xFFFFFFFF)


async def _make_equally_old(bench: WorkerBench, blocks: RandomBlocks) -> None:
    """One last use for all, as if the save had not gone over the border of a second."""
    nodes = bench.cluster.node_names
    newest_s = max([int((await bench.columns(node)).last_used_s.max()) for node in nodes])
    await _touch(bench, blocks, nodes, last_used_s=newest_s)


async def _touch(
    bench: WorkerBench, blocks: RandomBlocks, nodes: Sequence[str], *, last_used_s: int
) -> None:
    for target in bench.link.map.targets:
        if target.node not in nodes:
            continue
        for at in range(0, len(blocks.keys), wire.KEYS_PER_REQUEST_MAX):
            keys = blocks.keys[at : at + wire.KEYS_PER_REQUEST_MAX]
            items = np.zeros(len(keys), wire.TOUCH_ITEM)
            items["key"] = np.frombuffer(b"".join(keys), "V32")
            items["last_used_s"] = last_used_s
            await bench.link.ask(target.name, wire.Op.TOUCH, body=items.tobytes(), count=len(items))


async def test_block_that_is_fetched_after_the_look_stays(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(30, seed=1)
        stale = await bench.columns("n01")
        await asyncio.sleep(max(int(stale.last_used_s.max()) + 1.05 - time.time(), 0))
        async with StoreClient.connect(cluster.cluster_path) as store:
            target = blocks.empty_target()
            assert (await store.fetch(blocks.namespace, blocks.keys, target.blocks)).blocks == 30
        context = bench.contexts["n01"]
        batch = BatchEviction(context, "n01-t0", cluster.target_folder("n01"), Withdrawals(context))
        reasons = np.full(30, EvictReason.LEAST_USED, np.uint8)
        gone = await batch.evict(stale, np.arange(30), reasons, stale.last_used_s.copy())
        batch.close()
        assert gone == 0
        assert context.counters.spared == 30
        assert await bench.match(blocks) == 30


async def test_block_that_is_saved_again_before_a_worker_resumes_stays(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is gone after EVICT; a save finds the block at the peers, and counts on it."""
    # Known blocks are renewed within it.
    monkeypatch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)

    def die(step: str) -> None:
        if step == "evicted":
            raise RuntimeError("killed here")

    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(30, seed=1)
        stale = await bench.columns("n01")
        context, folder = bench.contexts["n01"], cluster.target_folder("n01")
        batch = BatchEviction(context, "n01-t0", folder, Withdrawals(context), die)
        reasons = np.full(30, EvictReason.LEAST_USED, np.uint8)
        with pytest.raises(RuntimeError):
            await batch.evict(stale, np.arange(30), reasons, stale.last_used_s.copy())
        batch.close()
        await asyncio.sleep(max(int(stale.last_used_s.max()) + 1.05 - time.time(), 0))
        async with StoreClient.connect(cluster.cluster_path) as store:
            saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
            assert saved.known + saved.stored == 30
        resumed = BatchEviction(context, "n01-t0", folder, Withdrawals(context))
        assert await resumed.resume() == 30
        resumed.close()
        assert await bench.match(blocks) == 30


@pytest.fixture
def new_node(tmp_path: Path) -> Iterator[LocalCluster]:
    """One that gives its slots in the order in which they were given back: it never had others."""
    with LocalCluster.start(
        tmp_path / "c", nodes=1, k=1, m=0, target_size_bytes=TARGET_BYTES
    ) as cluster:
        yield cluster


async def test_slots_that_were_reused_after_the_look_are_left_alone(new_node: LocalCluster) -> None:
    async with WorkerBench.open(new_node) as bench:
        old = await bench.save(30, seed=1)
        stale = await bench.columns("n01")
        async with StoreClient.connect(new_node.cluster_path) as store:
            await store.forget(old.namespace, old.keys)
        new = await bench.save(30, seed=2)
        assert (await bench.columns("n01")).location.tolist() == stale.location.tolist()
        context = bench.contexts["n01"]
        batch = BatchEviction(
            context, "n01-t0", new_node.target_folder("n01"), Withdrawals(context)
        )
        reasons = np.full(30, EvictReason.LEAST_USED, np.uint8)
        never = np.full(30, 0xFFFFFFFF, np.uint32)
        assert await batch.evict(stale, np.arange(30), reasons, never) == 0
        batch.close()
        assert await bench.match(new) == 30


async def test_peer_that_was_down_is_told_when_it_is_back(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(50, seed=1)
        cluster.kill("n05")
        bench.clocks["n01"].ahead_s = 8 * DAY_S
        await bench.evictions["n01"].tick()
        assert bench.contexts["n01"].backlog["owed_withdrawals"] == 50
        cluster.restart_node("n05")
        assert len(await bench.columns("n05")) == 50
        deadline_s = time.monotonic() + PATIENCE_S
        while bench.contexts["n01"].backlog["owed_withdrawals"]:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.2)
            await bench.evictions["n01"].tick()
        assert await bench.shards_by_key() == {}
        assert await bench.match(blocks) == 0


async def test_clock_that_jumps_by_days_evicts_nothing(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(50, seed=1)
        eviction, context = bench.evictions["n01"], bench.contexts["n01"]
        await eviction.tick()
        for ahead_s in (30 * DAY_S, -30 * DAY_S, 0.0):
            bench.clocks["n01"].ahead_s = ahead_s
            await eviction.tick()
            await eviction.run_now()
        assert context.counters.passes_skipped == 3
        assert sum(context.counters.evicted.values()) == 0
        assert await bench.match(blocks) == 50
        kinds = [event.kind for event in context.events.events]
        assert kinds == ["clock_jumped"] * 3


async def test_dry_run_says_what_a_run_does_and_changes_nothing(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(1000, seed=1)
        # Or peers that stored a second later would spare some of them when they are asked.
        await _make_equally_old(bench, blocks)
        policy = _policy(watermarks=Watermarks(high=0.5, low=0.4))
        (look,) = await bench.evictions["n03"].plan_now(policy)
        assert len(await bench.columns("n03")) == 1000
        assert await bench.match(blocks) == 1000
        bench.contexts["n03"].policy = policy
        assert sum((await bench.evictions["n03"].run_now()).values()) == len(look.plan) > 100


@pytest.mark.parametrize(
    ("setting", "rate_per_s"), [("evict_slots_per_s", 1024), ("evict_bytes_per_s", 1280 * 1024)]
)
@pytest.mark.parametrize(("requests_per_s", "least_s"), [(0, 0.7), (5000, 1.6)])
async def test_eviction_keeps_to_its_rate_and_to_half_of_it_when_the_node_is_busy(
    cluster: LocalCluster, setting: str, rate_per_s: int, requests_per_s: float, least_s: float
) -> None:
    async with WorkerBench.open(cluster) as bench:
        await bench.save(1600, seed=1)
        context = bench.contexts["n01"]
        context.policy = _policy(
            watermarks=Watermarks(high=0.1, low=0.02),
            settings=MappingProxyType({setting: rate_per_s}),
        )
        context.traffic.note({"requests_last_s": requests_per_s}, 0.0)
        begun_s = time.monotonic()
        evicted = await bench.evictions["n01"].run_now()
        # Two batches: the second one waits until the first, of 1,024 shards, is paid for.
        assert 1024 < evicted["least_used"] < 2048
        assert time.monotonic() - begun_s > least_s


async def test_new_policy_is_obeyed_within_a_tick(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster) as bench:
        await bench.save(1000, seed=1)
        context = bench.contexts["n01"]
        context.policy_known.set()
        running = asyncio.create_task(bench.evictions["n01"].run())
        await asyncio.sleep(0.3)
        assert len(await bench.columns("n01")) == 1000
        context.policy = _policy(watermarks=Watermarks(high=0.5, low=0.4))
        context.policy_changed.set()
        deadline_s = time.monotonic() + PATIENCE_S
        while await bench.fill("n01") > 0.4:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _policy(**changes: object) -> RetentionPolicy:
    values = {"version": 1, "ttl_s": MappingProxyType(dict(DEFAULT_POLICY.ttl_s)), **changes}
    return RetentionPolicy(**values)  # type: ignore[arg-type]


UNEVEN_BYTES = [2 << 20, 3 << 20, 4 << 20, 4 << 20, 6 << 20, 2 << 20]


@pytest.fixture(scope="module")
def shared_uneven_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("uneven") / "cluster"
    with start_uneven(folder, UNEVEN_BYTES, k=4, m=2) as it:
        yield it


@pytest.fixture
async def uneven_cluster(shared_uneven_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    yield shared_uneven_cluster
    await empty(shared_uneven_cluster)


async def count_unreadable(bench: WorkerBench) -> tuple[int, int]:
    """Shards of blocks that cannot be read, and all shards."""
    held = await bench.shards_by_key()
    unreadable = sum(shards for shards in held.values() if shards < bench.code.k)
    return unreadable, sum(held.values())


@pytest.mark.slow
async def test_uneven_nodes_keep_no_unreadable_blocks(uneven_cluster: LocalCluster) -> None:
    async with WorkerBench.open(uneven_cluster) as bench:
        async with bench.running():
            # Short chains, twice what the smallest nodes have room for, no faster than
            # room is made for them.
            for seed in range(60):
                while max(await bench.fill("n01"), await bench.fill("n06")) > 0.94:
                    await asyncio.sleep(0.05)
                await bench.save(50, seed=seed)
        unreadable, total = await count_unreadable(bench)
        assert total > 6000
        assert unreadable < total / 100
        for node in uneven_cluster.node_names:
            assert await bench.fill(node) <= 0.95


@pytest.mark.slow
async def test_rest_of_saves_that_found_no_room_goes_too(uneven_cluster: LocalCluster) -> None:
    async with WorkerBench.open(uneven_cluster) as bench:
        # The small nodes are full long before the large one, and refuse what it still takes.
        for seed in range(30):
            await bench.save(100, seed=seed)
        unreadable, total = await count_unreadable(bench)
        assert unreadable > total / 100
        suspects = {node: Suspects(0.0) for node in uneven_cluster.node_names}
        # Two passes remove it, of which each leaves out what is younger than a second.
        number, end_s = 0, time.monotonic() + PATIENCE_S
        while unreadable >= total / 100:
            assert time.monotonic() < end_s, f"{unreadable} of {total} shards"
            number += 1
            for node, context in bench.contexts.items():
                await check_redundancy(context, AT_ONCE, suspects[node], number)
            unreadable, total = await count_unreadable(bench)
        assert total > 6000


async def test_target_whose_journal_cannot_be_written_keeps_its_blocks(
    cluster: LocalCluster,
) -> None:
    async with WorkerBench.open(cluster) as bench:
        blocks = await bench.save(40, seed=1)
        eviction = bench.evictions["n01"]
        # What a disk that fails does, without one: the name is taken by a folder.
        obstacle = cluster.target_folder("n01") / "gc-journal"
        await eviction.tick()
        (obstacle / "x").mkdir(parents=True)
        bench.clocks["n01"].ahead_s = 8 * DAY_S
        eviction.guard.offset_s = None
        await eviction.run_now()
        assert await bench.match(blocks) == 40
        assert sum(bench.contexts["n01"].counters.evicted.values()) == 0
        # The other nodes' workers do without it.
        bench.clocks["n02"].ahead_s = 8 * DAY_S
        await bench.evictions["n02"].run_now()
        assert await bench.shards_by_key() == {}
        (obstacle / "x").rmdir()
        obstacle.rmdir()
