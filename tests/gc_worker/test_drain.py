"""Drain on real nodes: no block depends on a node that leaves, and somebody says when it may."""

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest

from gc_worker import drain
from gc_worker.drain import DrainOptions, DrainReport, drain_once
from tests.gc_worker.repair_bench import RepairBench, policy_of
from tests.patience import PATIENCE_S

OPTIONS = DrainOptions(interval_s=0.05, rows_per_s=1e9, look_s=0.05)
_versions = iter(range(100, 10_000))


@pytest.fixture(autouse=True)
async def no_drain_afterwards(bench: RepairBench) -> AsyncIterator[None]:
    yield
    await set_draining(bench)


async def set_draining(bench: RepairBench, *nodes: str) -> None:
    policy = policy_of({"repair_bytes_per_s": 1 << 30}, version=next(_versions))
    await bench.announce(
        policy_of(dict(policy.settings), version=policy.version, draining=frozenset(nodes))
    )


async def drain_node(bench: RepairBench, node: str) -> DrainReport:
    return await drain_once(bench.contexts[node], OPTIONS)


async def test_node_may_stop_at_once_when_all_blocks_are_whole(bench: RepairBench) -> None:
    await bench.save(70, seed=500)
    node = bench.cluster.node_names[1]
    await set_draining(bench, node)
    report = await drain_node(bench, node)
    assert (report.blocks_total, report.checked, report.safe) == (70, 70, 70)
    assert (report.at_risk, report.repaired_shards) == (0, 0)
    assert report.is_safe_to_stop
    assert bench.contexts[node].reports["drain"] == report.to_values()


async def test_node_may_not_stop_while_its_folder_is_lost(bench: RepairBench) -> None:
    await bench.save(5, seed=510)
    node = bench.cluster.node_names[1]
    await set_draining(bench, node)
    folder = bench.cluster.target_folder(node)
    aside = folder.with_name("aside")
    shutil.move(folder, aside)
    try:
        await bench.wait_until_lost(node, is_lost=True)
        report = await drain_node(bench, node)
    finally:
        shutil.move(aside, folder)
        await bench.wait_until_lost(node, is_lost=False)
    assert report.silent_targets == [f"{node}-t0"]
    assert not report.is_safe_to_stop
    assert (await drain_node(bench, node)).is_safe_to_stop


async def test_block_is_completed_elsewhere_when_it_needs_the_node_that_leaves(
    bench: RepairBench,
) -> None:
    blocks = await bench.save(70, seed=501)
    targets = bench.targets_by_shard(blocks)
    node = bench.link.node_of(targets[0])
    for target in targets[1:3]:
        await bench.forget(target, blocks.keys[:64])
    await set_draining(bench, node)
    report = await drain_node(bench, node)
    assert report.repaired_blocks == 64
    assert (report.safe, report.at_risk) == (70, 0)
    assert report.is_safe_to_stop
    await bench.forget(targets[0], blocks.keys[:64])
    await bench.forget(targets[3], blocks.keys[:64])
    assert await bench.fetch(blocks)


async def test_cold_block_is_completed_too_when_its_node_leaves(bench: RepairBench) -> None:
    blocks = await bench.save(4, seed=502)
    targets = bench.targets_by_shard(blocks)
    node = bench.link.node_of(targets[0])
    for target in targets[4:]:
        await bench.forget(target, blocks.keys)
    await asyncio.sleep(2.1)
    policy = policy_of({"hot_within_s": 1}, version=next(_versions), draining=frozenset({node}))
    await bench.announce(policy)
    assert (await drain_node(bench, node)).repaired_blocks == 4


async def test_two_nodes_may_leave_only_when_blocks_can_be_read_without_both(
    bench: RepairBench,
) -> None:
    blocks = await bench.save(8, seed=503)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[5], blocks.keys)
    leaving = [bench.link.node_of(target) for target in targets[:2]]
    await set_draining(bench, *leaving)
    # Without the two, three of the six targets hold a shard; the sixth can be given one.
    report = await drain_node(bench, leaving[0])
    assert (report.repaired_shards, report.safe) == (8, 8)
    assert (await drain_node(bench, leaving[1])).repaired_shards == 0
    for target in targets[:2]:
        await bench.forget(target, blocks.keys)
    assert await bench.fetch(blocks)


async def test_node_may_not_stop_when_a_block_cannot_be_completed(bench: RepairBench) -> None:
    blocks = await bench.save(5, seed=504)
    targets = bench.targets_by_shard(blocks)
    node, down = bench.link.node_of(targets[0]), bench.link.node_of(targets[4])
    await bench.forget(targets[5], blocks.keys)
    await bench.forget(targets[4], blocks.keys)
    await bench.flip_payload(targets[1], blocks.keys[0])
    await set_draining(bench, node)
    bench.cluster.kill(down)
    try:
        report = await drain_node(bench, node)
    finally:
        bench.cluster.restart_node(down)
        await bench.wait_until_up(down)
    # Of the first, one of the last four shards is damaged; the others can be rebuilt on one target.
    assert (report.safe, report.at_risk) == (4, 1)
    assert report.silent_targets == [targets[4]]
    assert not report.is_safe_to_stop


async def test_node_may_not_stop_when_it_still_takes_writes(bench: RepairBench) -> None:
    await bench.save(3, seed=505)
    node = bench.cluster.node_names[0]
    bench.contexts[node].policy = policy_of({}, draining=frozenset({node}))
    report = await drain_node(bench, node)
    assert report.at_risk == 0
    assert not report.is_safe_to_stop


async def test_loop_drains_while_the_policy_says_so_and_forgets_its_report_after(
    bench: RepairBench,
) -> None:
    await bench.save(3, seed=506)
    node = bench.cluster.node_names[0]
    context = bench.contexts[node]
    task = asyncio.ensure_future(drain.run(context, OPTIONS))
    try:
        await asyncio.sleep(0.1)
        assert "drain" not in context.reports
        await set_draining(bench, node)
        async with asyncio.timeout(PATIENCE_S):
            while not context.reports.get("drain", {}).get("is_safe_to_stop"):
                await asyncio.sleep(0.01)
            await set_draining(bench)
            while "drain" in context.reports:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
