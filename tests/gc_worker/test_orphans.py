"""Blocks that cannot be read any more: removed everywhere, and never while they might come back."""

import shutil
from dataclasses import replace

from gc_worker.orphans import Suspects
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.store_client import StoreClient
from tests.gc_worker.repair_bench import AT_ONCE, RepairBench
from tests.kvstore.blocks import RandomBlocks


def new_suspects(bench: RepairBench) -> dict[str, Suspects]:
    return {node: Suspects(confirm_after_s=0.0) for node in bench.cluster.node_names}


async def save_unreadable(bench: RepairBench, seed: int) -> RandomBlocks:
    """Blocks with one shard fewer than it takes."""
    blocks = await bench.save(6, seed=seed)
    for target in bench.targets_by_shard(blocks)[:3]:
        await bench.forget(target, blocks.keys)
    return blocks


async def test_unreadable_blocks_go_everywhere_when_a_second_pass_finds_them(
    bench: RepairBench,
) -> None:
    whole = await bench.save(5, seed=300)
    blocks = await save_unreadable(bench, seed=301)
    suspects = new_suspects(bench)
    first = await bench.check(suspects=suspects)
    assert sum(one.unreadable for one in first.values()) == 6
    assert sum(one.removed for one in first.values()) == 0
    assert await bench.count_shards(blocks.keys) == [3] * 6
    second = await bench.check(suspects=suspects)
    assert sum(one.removed for one in second.values()) == 6
    assert await bench.count_shards(blocks.keys) == [0] * 6
    assert await bench.count_shards(whole.keys) == [6] * 5
    counters = [context.counters for context in bench.contexts.values()]
    assert sum(one.orphaned_blocks for one in counters) == 6
    assert sum(one.withdrawn for one in counters) == 12
    assert sum(one.evicted_bytes for one in counters) == 6 * (1024 + 256)


async def test_suspicion_outlives_a_pass_that_could_not_ask_everybody(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    blocks = await save_unreadable(bench, seed=307)
    suspects = new_suspects(bench)
    await bench.check(suspects=suspects)
    down = bench.link.node_of(bench.targets_by_shard(blocks)[0])
    cluster.kill(down)
    try:
        others = [name for name in cluster.node_names if name != down]
        await bench.check(suspects=suspects, nodes=others)
    finally:
        cluster.restart_node(down)
    await bench.wait_until_up(down)
    assert await bench.count_shards(blocks.keys) == [3] * 6
    await bench.check(suspects=suspects)
    assert await bench.count_shards(blocks.keys) == [0] * 6


async def test_unreadable_blocks_stay_when_not_enough_time_has_gone(bench: RepairBench) -> None:
    blocks = await save_unreadable(bench, seed=302)
    suspects = {node: Suspects(confirm_after_s=3600.0) for node in bench.cluster.node_names}
    for _ in range(3):
        await bench.check(suspects=suspects)
    assert await bench.count_shards(blocks.keys) == [3] * 6


async def test_nothing_is_removed_when_a_node_is_down(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    blocks = await bench.save(6, seed=303)
    targets = bench.targets_by_shard(blocks)
    for target in targets[:2]:
        await bench.forget(target, blocks.keys)
    down = bench.link.node_of(targets[2])
    suspects = new_suspects(bench)
    others = [name for name in cluster.node_names if name != down]
    cluster.kill(down)
    try:
        for _ in range(3):
            reports = await bench.check(suspects=suspects, nodes=others)
            assert sum(one.unreadable for one in reports.values()) == 0
    finally:
        cluster.restart_node(down)
    await bench.wait_until_up(down)
    assert await bench.count_shards(blocks.keys) == [4] * 6
    await bench.check()
    assert await bench.fetch(blocks)


async def test_nothing_is_removed_when_the_folder_of_a_target_is_lost(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    blocks = await bench.save(6, seed=304)
    targets = bench.targets_by_shard(blocks)
    for target in targets[:2]:
        await bench.forget(target, blocks.keys)
    node = bench.link.node_of(targets[2])
    folder = cluster.target_folder(node)
    aside = folder.with_name("aside")
    suspects = new_suspects(bench)
    shutil.move(folder, aside)
    try:
        await bench.wait_until_lost(node, is_lost=True)
        for _ in range(2):
            await bench.check(suspects=suspects)
        left = [await bench.locate(target, blocks.keys) for target in targets[3:]]
        assert all((found["status"] == 1).all() for found in left)
    finally:
        shutil.move(aside, folder)
        await bench.wait_until_lost(node, is_lost=False)
    await bench.check()
    assert await bench.fetch(blocks)


async def test_unreadable_blocks_stay_when_somebody_asked_for_them_just_now(
    bench: RepairBench,
) -> None:
    blocks = await save_unreadable(bench, seed=306)
    suspects = new_suspects(bench)
    for _ in range(2):
        assert not await bench.fetch(blocks)
        reports = await bench.check(replace(AT_ONCE, quiet_s=60), suspects=suspects)
        assert sum(one.unreadable for one in reports.values()) == 0
    assert await bench.count_shards(blocks.keys) == [3] * 6


async def test_block_that_was_saved_again_stays_when_it_was_suspected(bench: RepairBench) -> None:
    blocks = await save_unreadable(bench, seed=305)
    suspects = new_suspects(bench)
    await bench.check(suspects=suspects)
    async with StoreClient.connect(bench.cluster.cluster_path) as store:
        result = await store.save(blocks.namespace, blocks.keys, blocks.sources)
    assert result.failed == 0
    await bench.wait_for_shards(blocks.keys, 6)
    await bench.check(suspects=suspects)
    assert await bench.count_shards(blocks.keys) == [6] * 6
    assert await bench.fetch(blocks)
    assert all(len(one) == 0 for one in suspects.values())
