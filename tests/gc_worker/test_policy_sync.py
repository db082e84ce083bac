"""A change of the policy that one node knows reaches all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gc_worker import policy_sync
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from tests.gc_worker.worker_bench import WorkerBench
from tests.patience import PATIENCE_S


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    folder = tmp_path / "cluster"
    with LocalCluster.start(folder, nodes=5, k=3, m=2, target_size_bytes=1 << 20) as it:
        yield it


async def versions(bench: WorkerBench) -> list[int]:
    answers = [
        await bench.link.ask(bench.link.any_target(node), wire.Op.POLICY)
        for node in bench.cluster.node_names
    ]
    return [RetentionPolicy.parse(answer).version for answer in answers]


async def test_newest_policy_reaches_all_nodes_and_workers(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster, is_policy_known=False) as bench:
        policy = DEFAULT_POLICY.with_ttl("agent", 3600, who="test", why="", at_s=1)
        policy = policy.with_ttl("agent", 7200, who="test", why="", at_s=2)
        document = policy.to_json()
        await bench.link.ask("n04-t0", wire.Op.POLICY, body=document, count=len(document))
        running = [
            asyncio.create_task(policy_sync.run(context)) for context in bench.contexts.values()
        ]
        end_s = time.monotonic() + PATIENCE_S
        while await versions(bench) != [2] * 5:
            assert time.monotonic() < end_s, await versions(bench)
            await asyncio.sleep(0.1)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for context in bench.contexts.values():
            assert context.policy == policy
            assert context.policy_known.is_set()
            assert context.policy_changed.is_set()


async def test_policy_is_not_known_while_the_own_node_is_down(cluster: LocalCluster) -> None:
    cluster.kill("n02")
    async with WorkerBench.open(cluster, is_policy_known=False) as bench:
        context = bench.contexts["n02"]
        await policy_sync.sync_once(context)
        assert not context.policy_known.is_set()
        assert context.counters.node_errors > 0
        cluster.restart_node("n02")
        # It is left alone for a moment after it could not be reached.
        async with asyncio.timeout(PATIENCE_S):
            while not context.policy_known.is_set():
                await policy_sync.sync_once(context)
                await asyncio.sleep(0.05)


async def test_older_policy_changes_nothing(cluster: LocalCluster) -> None:
    async with WorkerBench.open(cluster, is_policy_known=False) as bench:
        context = bench.contexts["n01"]
        newer = DEFAULT_POLICY.with_ttl("agent", 3600, who="test", why="", at_s=1)
        assert policy_sync.take_policy(context, newer)
        assert not policy_sync.take_policy(context, DEFAULT_POLICY)
        assert not policy_sync.take_policy(context, newer)
        assert context.policy is newer
        assert context.counters.policy_changes == 1


async def test_default_policy_is_not_believed_when_no_peer_could_contradict(
    cluster: LocalCluster,
) -> None:
    # A node with a new first disk has lost its policy file, and tells the default.
    others = [node for node in cluster.node_names if node != "n01"]
    async with WorkerBench.open(cluster, is_policy_known=False) as bench:
        context = bench.contexts["n01"]
        document = DEFAULT_POLICY.to_json()
        for node in others:
            cluster.kill(node)
        (cluster.target_folder("n01") / "policy.json").unlink(missing_ok=True)
        cluster.restart_node("n01")
        assert RetentionPolicy.parse(document).version == 0
        try:
            await policy_sync.sync_once(context)
            assert context.policy.version == 0
            assert not context.policy_known.is_set()
        finally:
            for node in others:
                cluster.restart_node(node)
        end_s = time.monotonic() + PATIENCE_S
        while not context.policy_known.is_set():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.1)
            await policy_sync.sync_once(context)
