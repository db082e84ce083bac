"""Repair on real nodes: what lacks shards is completed, rightly or not at all."""

import asyncio
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from gc_worker import redundancy_pass
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.router import Lane
from kvstore.client.shards import write_shards
from tests.gc_worker.repair_bench import AT_ONCE, RepairBench, policy_of
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lying_proxy import lying_client


@pytest.mark.parametrize("lost", [(0,), (5,), (0, 1), (1, 4), (4, 5)])
async def test_block_is_completed_when_up_to_m_shards_are_gone(
    bench: RepairBench, lost: tuple[int, ...]
) -> None:
    blocks = await bench.save(70, seed=sum(lost) + 10 * len(lost))
    targets = bench.targets_by_shard(blocks)
    for shard in lost:
        await bench.forget(targets[shard], blocks.keys[:64])
    reports = await bench.check()
    assert sum(one.repaired_blocks for one in reports.values()) == 64
    assert sum(one.repaired_shards for one in reports.values()) == 64 * len(lost)
    assert await bench.count_shards(blocks.keys) == [6] * 70
    # Now with two others gone, so that what was repaired is needed.
    others = [shard for shard in range(6) if shard not in lost]
    for shard in others[:2]:
        await bench.forget(targets[shard], blocks.keys[:64])
    assert await bench.fetch(blocks)


async def test_each_block_is_counted_by_one_node_when_all_check(bench: RepairBench) -> None:
    blocks = await bench.save(200, seed=2)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[3], blocks.keys[:10])
    off = policy_of({"repair_is_on": False})
    for context in bench.contexts.values():
        context.policy = off
    reports = await bench.check()
    by_shards = np.sum([one.blocks_by_shards for one in reports.values()], axis=0)
    assert by_shards.tolist() == [0, 0, 0, 0, 0, 10, 190]
    assert sum(one.backlog for one in reports.values()) == 10
    assert sum(context.backlog["repair_blocks"] for context in bench.contexts.values()) == 10
    assert await bench.count_shards(blocks.keys[:10]) == [5] * 10


async def test_repair_renews_nothing_when_it_reads_and_writes(bench: RepairBench) -> None:
    blocks = await bench.save(8, seed=3)
    targets = bench.targets_by_shard(blocks)
    before = await asyncio.gather(*(bench.locate(name, blocks.keys) for name in targets))
    newest = np.max([found["last_used_s"] for found in before], axis=0)
    await bench.forget(targets[2], blocks.keys)
    await asyncio.sleep(1.1)
    await bench.check()
    after = await asyncio.gather(*(bench.locate(name, blocks.keys) for name in targets))
    assert (after[2]["status"] == 1).all()
    assert (after[2]["last_used_s"] == newest).all()
    for shard in (0, 1, 3, 4, 5):
        assert (after[shard]["last_used_s"] == before[shard]["last_used_s"]).all()


async def test_cold_block_is_left_to_age_when_it_lacks_a_shard(bench: RepairBench) -> None:
    blocks = await bench.save(8, seed=4)
    await bench.forget(bench.targets_by_shard(blocks)[1], blocks.keys)
    for context in bench.contexts.values():
        context.policy = policy_of({"hot_within_s": 1})
    await asyncio.sleep(2.1)
    reports = await bench.check()
    assert sum(one.due for one in reports.values()) == 0
    assert await bench.count_shards(blocks.keys) == [5] * 8


async def test_block_that_is_being_written_is_left_alone(bench: RepairBench) -> None:
    blocks = await bench.save(8, seed=5)
    await bench.forget(bench.targets_by_shard(blocks)[1], blocks.keys)
    reports = await bench.check(replace(AT_ONCE, settle_s=30))
    assert sum(one.due for one in reports.values()) == 0
    assert await bench.count_shards(blocks.keys) == [5] * 8


async def test_minority_version_gives_way_when_k_shards_agree(bench: RepairBench) -> None:
    blocks = await bench.save(4, seed=6)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[3], blocks.keys)
    await write_other_version(bench, blocks, targets[3], shard=3)
    reports = await bench.check()
    assert sum(one.repaired_blocks for one in reports.values()) == 4
    versions = [(await bench.locate(name, blocks.keys))["block_xxh3"] for name in targets]
    assert (np.array(versions) == versions[0]).all()
    assert await bench.fetch(blocks)


async def test_shard_on_the_wrong_target_does_not_count_and_makes_way(bench: RepairBench) -> None:
    blocks = await bench.save(4, seed=15)
    targets = bench.targets_by_shard(blocks)
    versions = (await bench.locate(targets[0], blocks.keys))["block_xxh3"]
    await bench.forget(targets[3], blocks.keys)
    await write_other_version(bench, blocks, targets[3], shard=2, versions=versions)
    assert await bench.count_shards(blocks.keys) == [6] * 4
    reports = await bench.check()
    assert sum(one.repaired_blocks for one in reports.values()) == 4
    assert (await bench.locate(targets[3], blocks.keys))["shard"].tolist() == [3] * 4


async def write_other_version(
    bench: RepairBench,
    blocks: RandomBlocks,
    target: str,
    shard: int,
    versions: NDArray[np.uint64] | int = 1,
) -> None:
    """One shard of another writer's version, by default with a number that wins no race."""
    size = len(blocks.sources[0]) // bench.code.k
    payloads = [memoryview(bytes([7]) * size) for _ in blocks.keys]
    batch = np.zeros(1, wire.WRITE_BATCH)
    batch["k"], batch["m"], batch["shard"] = 4, 2, shard
    batch["shard_bytes"], batch["block_bytes"] = size, size * 4
    batch["ttl_class"], batch["anchor"] = b"chat", np.void(blocks.keys[0])
    items = np.zeros(len(payloads), wire.WRITE_ITEM)
    items["key"] = np.frombuffer(b"".join(blocks.keys), "V32")
    items["payload_xxh3"] = xxh3_64_intdigest(payloads[0])
    items["block_xxh3"] = versions
    outcomes = await write_shards(
        bench.link.channel(target, Lane.WRITE),
        batch,
        items,
        payloads,
        deadline_s=5.0,
        loop=bench.link.loop,
    )
    assert (outcomes == wire.WriteOutcome.STORED).all()


# Wrong bytes ------------------------------------------------------------------------------------


async def test_damaged_shard_of_a_peer_is_left_out_when_k_others_are_good(
    bench: RepairBench,
) -> None:
    blocks = await bench.save(3, seed=7)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[5], blocks.keys)
    await bench.flip_payload(targets[1], blocks.keys[0])
    reports = await bench.check()
    assert sum(one.repaired_blocks for one in reports.values()) == 3
    assert await bench.count_shards(blocks.keys) == [5, 6, 6], "the damaged one is in quarantine"
    await bench.check()
    assert await bench.count_shards(blocks.keys) == [6, 6, 6]
    for shard in (0, 2):
        await bench.forget(targets[shard], blocks.keys)
    assert await bench.fetch(blocks)


async def test_repair_refuses_when_one_of_the_last_k_shards_is_damaged(bench: RepairBench) -> None:
    blocks = await bench.save(2, seed=8)
    targets = bench.targets_by_shard(blocks)
    for shard in (0, 5):
        await bench.forget(targets[shard], blocks.keys[:1])
    await bench.flip_payload(targets[2], blocks.keys[0])
    reports = await bench.check()
    assert sum(one.repaired_shards for one in reports.values()) == 0
    assert sum(one.refused for one in reports.values()) == 1
    assert await bench.count_shards(blocks.keys) == [3, 6]


@pytest.mark.parametrize("left", [5, 4])
async def test_peer_that_lies_consistently_spreads_nothing(
    cluster: LocalCluster, bench: RepairBench, left: int
) -> None:
    blocks = await bench.save(3, seed=9)
    targets = bench.targets_by_shard(blocks)
    for shard in range(5, left - 1, -1):
        await bench.forget(targets[shard], blocks.keys)
    liar = cluster.map.node_of(targets[2]).name
    async with (
        lying_client(cluster.map, [liar]) as (store, (proxy,)),
        RepairBench.open(cluster, store.map) as lied_to,
    ):
        proxy.lie = lying_proxy.lies_consistently
        # The node for shard 0 looks after the blocks; the liar's own worker would see the truth.
        responsible = cluster.map.node_of(targets[0]).name
        report = (await lied_to.check(nodes=[responsible]))[responsible]
    if left == 4:
        assert (report.refused, report.repaired_shards) == (3, 0)
        assert await bench.count_shards(blocks.keys) == [4] * 3
        return
    assert (report.refused, report.repaired_shards) == (0, 3)
    assert await bench.count_shards(blocks.keys) == [6] * 3
    for shard in (0, 2):
        await bench.forget(targets[shard], blocks.keys)
    assert await bench.fetch(blocks)


# Nodes that are down, full or leave ---------------------------------------------------------------


async def test_block_waits_when_the_node_of_its_missing_shard_is_down(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    blocks = await bench.save(8, seed=11)
    targets = bench.targets_by_shard(blocks)
    down = cluster.map.node_of(targets[4]).name
    await bench.forget(targets[4], blocks.keys)
    cluster.kill(down)
    try:
        reports = await bench.check(nodes=[name for name in cluster.node_names if name != down])
    finally:
        cluster.restart_node(down)
    assert sum(one.waiting for one in reports.values()) == 8
    assert sum(one.failed for one in reports.values()) == 0
    assert sum(one.blocks_by_shards[5] for one in reports.values()) == 8
    await bench.wait_until_up(down)
    await bench.check()
    assert await bench.count_shards(blocks.keys) == [6] * 8


async def test_next_node_takes_over_when_the_responsible_one_is_dead(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    blocks = await bench.save(8, seed=12)
    targets = bench.targets_by_shard(blocks)
    first, second = (cluster.map.node_of(targets[shard]).name for shard in (0, 1))
    await bench.forget(targets[4], blocks.keys)
    cluster.kill(first)
    try:
        reports = await bench.check(nodes=[second])
    finally:
        cluster.restart_node(first)
    assert reports[second].repaired_blocks == 8
    await bench.wait_until_up(first)
    assert await bench.count_shards(blocks.keys) == [6] * 8


async def test_nothing_is_read_for_a_target_that_is_full(bench: RepairBench) -> None:
    blocks = await bench.save(40, seed=13, block_bytes=64 << 10)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[4], blocks.keys)
    node = bench.link.node_of(targets[4])
    # A node that drains answers "full", as one does that is.
    await bench.announce(policy_of({}, version=5, draining=frozenset({node})), nodes=[node])
    try:
        for context in bench.contexts.values():
            context.policy = policy_of({})
        responsible = bench.link.node_of(targets[0])
        options = replace(AT_ONCE, job_bytes_max=256 << 10)
        before = await bench.sum_of("shards_read")
        report = (await bench.check(options, nodes=[responsible]))[responsible]
        assert (report.due, report.failed, report.repaired_shards) == (40, 40, 0)
        # Four blocks of four shards for the first job, which learns it; none for the nine others.
        assert await bench.sum_of("shards_read") - before == 16
    finally:
        await bench.announce(policy_of({}, version=6), nodes=[node])


async def test_repair_is_paced_when_the_policy_says_so(bench: RepairBench) -> None:
    blocks = await bench.save(48, seed=14, block_bytes=64 << 10)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[3], blocks.keys)
    rate = 4 << 20
    for context in bench.contexts.values():
        context.policy = policy_of({"repair_bytes_per_s": rate})
    begun_s = time.monotonic()
    responsible = bench.link.node_of(targets[0])
    options = replace(AT_ONCE, job_bytes_max=256 << 10)
    report = (await bench.check(options, nodes=[responsible]))[responsible]
    assert report.repaired_blocks == 48
    # 3 MiB at 4 MiB/s, but for the first and the last job, and a quarter of a second's burst.
    assert time.monotonic() - begun_s > (48 * (64 << 10) - (512 << 10)) / rate - 0.25


# Refilling an emptied disk ------------------------------------------------------------------------


async def test_emptied_disk_is_refilled_hottest_first(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    cold = [await bench.save(2, seed=100 + i) for i in range(8)]
    await asyncio.sleep(1.1)
    hot = [await bench.save(2, seed=200 + i) for i in range(8)]
    node = cluster.node_names[2]
    (target,) = bench.link.map.targets_by_node[node]
    cluster.stop_node(node)
    shutil.rmtree(cluster.target_folder(node))
    cluster.restart_node(node)
    await bench.wait_until_up(node)
    assert not (await bench.locate(target.name, cold[0].keys))["status"].any()
    loops = [
        asyncio.ensure_future(redundancy_pass.run(context, AT_ONCE))
        for context in bench.contexts.values()
    ]
    try:
        for blocks in (*hot, *cold):
            await bench.wait_for_shards(blocks.keys, 6)
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
    # Generations grow with every write, so they tell the order in which each node brought them.
    written: dict[str, dict[str, list[int]]] = {}
    for name, group in (("hot", hot), ("cold", cold)):
        for blocks in group:
            first = next(one for one in bench.targets_by_shard(blocks) if one != target.name)
            generations = (await bench.locate(target.name, blocks.keys))["generation"].tolist()
            written.setdefault(first, {}).setdefault(name, []).extend(generations)
    compared = [both for both in written.values() if len(both) == 2]
    assert compared
    for both in compared:
        assert max(both["hot"]) < min(both["cold"])
