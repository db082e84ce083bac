"""Nodes that are killed, stopped, refuse connections or lag: every pair, every one."""

import asyncio
import itertools
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import FetchEnd
from kvstore.client.store_client import StoreClient
from kvstore.cluster.map import load_cluster_map
from kvstore.wire import VERSION_RACE_S
from tests.kvstore.blocks import RandomBlocks, store_whole
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lost_nodes import client_of, count_descriptors, without_nodes
from tests.kvstore.faults.lying_proxy import lying_client
from tests.patience import PATIENCE_S, WELL_BEFORE_S, until

BLOCKS = 70


@pytest.fixture(scope="module")
def stored(cluster_path: str) -> RandomBlocks:
    blocks = RandomBlocks(BLOCKS, block_bytes=12_345, seed=21)
    store_whole(cluster_path, blocks)
    return blocks


async def fetched_whole(store: StoreClient, blocks: RandomBlocks) -> bool:
    target = blocks.empty_target()
    result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
    return result.blocks == BLOCKS and np.array_equal(target.area, blocks.area)


async def test_all_66_double_losses_read_back_to_the_bit(
    cluster_path: str, stored: RandomBlocks, closed_port: int
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    for lost in itertools.combinations(range(12), 2):
        async with client_of(without_nodes(cluster_map, set(lost), closed_port)) as store:
            assert await fetched_whole(store, stored), lost


async def test_all_12_single_stragglers_are_not_waited_for(
    cluster_path: str, stored: RandomBlocks
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    for node in cluster_map.nodes:
        async with lying_client(cluster_map, [node.name]) as (store, proxies):
            proxies[0].lie = lying_proxy.never_answers
            assert await fetched_whole(store, stored), node.name


async def test_three_losses_are_a_miss_and_no_error(
    cluster_path: str, stored: RandomBlocks, closed_port: int
) -> None:
    cluster_map = without_nodes(load_cluster_map(cluster_path), {0, 4, 7}, closed_port)
    async with client_of(cluster_map) as store:
        target = stored.empty_target()
        result = await store.fetch(stored.namespace, stored.keys, target.blocks)
        assert (result.blocks, result.ended) == (0, FetchEnd.TOO_FEW_SHARDS)
        assert await store.match(stored.namespace, stored.keys) == 0
        saved = await store.save(stored.namespace, stored.keys, stored.sources)
        assert (saved.stored, saved.failed) == (0, BLOCKS)


@pytest.mark.usefixtures("patient_inquiry")
async def test_a_block_saved_while_two_nodes_are_lost_is_degraded_and_can_be_read(
    cluster_path: str, closed_port: int
) -> None:
    blocks = RandomBlocks(BLOCKS, block_bytes=12_345, seed=22, tenant="degraded")
    cluster_map = without_nodes(load_cluster_map(cluster_path), {2, 11}, closed_port)
    async with client_of(cluster_map) as store:
        result = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert (result.stored, result.degraded, result.failed) == (BLOCKS, BLOCKS, 0)
        assert await store.match(blocks.namespace, blocks.keys) == BLOCKS
        assert await fetched_whole(store, blocks)
        again = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert (again.known, again.stored) == (BLOCKS, 0)


@pytest.fixture(scope="module")
def frail_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("frail")
    with LocalCluster.start(folder / "c", nodes=12, k=10, m=2, target_size_bytes=64 << 20) as it:
        yield it


@pytest.fixture
def own_cluster(frail_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Twelve nodes that a test may harm: those that it kills run again after it."""
    yield frail_cluster
    for name in frail_cluster.node_names:
        if frail_cluster.node_pid(name) is None:
            frail_cluster.restart_node(name)


async def test_killed_and_stopped_nodes_cost_no_block_and_are_not_waited_for(
    own_cluster: LocalCluster,
) -> None:
    blocks = RandomBlocks(BLOCKS, block_bytes=12_345, seed=23)
    async with StoreClient.connect(own_cluster.cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        await store.finish_writes(deadline_s=PATIENCE_S)
        own_cluster.kill("n03", signal.SIGKILL)
        own_cluster.kill("n07", signal.SIGSTOP)
        try:
            for _ in range(5):
                async with asyncio.timeout(WELL_BEFORE_S):
                    assert await fetched_whole(store, blocks)
                    assert await store.match(blocks.namespace, blocks.keys) == BLOCKS
        finally:
            own_cluster.kill("n07", signal.SIGCONT)


async def test_four_stopped_nodes_end_a_fetch_at_its_deadline(
    own_cluster: LocalCluster,
) -> None:
    blocks = RandomBlocks(BLOCKS, block_bytes=12_345, seed=24)
    stopped = ("n01", "n02", "n03", "n04")
    async with StoreClient.connect(own_cluster.cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        await store.finish_writes(deadline_s=PATIENCE_S)
        for name in stopped:
            own_cluster.kill(name, signal.SIGSTOP)
        try:
            target = blocks.empty_target()
            async with asyncio.timeout(PATIENCE_S):
                result = await store.fetch(
                    blocks.namespace, blocks.keys, target.blocks, deadline_s=0.5
                )
            assert (result.blocks, result.ended) == (0, FetchEnd.DEADLINE)
            before = target.area.copy()
        finally:
            for name in stopped:
                own_cluster.kill(name, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert np.array_equal(before, target.area), "a late answer reached the caller's memory"
        assert await fetched_whole(store, blocks)


async def test_nodes_killed_in_the_middle_of_fetches_leave_no_descriptors_and_tasks(
    own_cluster: LocalCluster,
) -> None:
    blocks = RandomBlocks(BLOCKS, block_bytes=123_450, seed=25)
    async with StoreClient.connect(own_cluster.cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
    descriptors = count_descriptors()
    for victims in (["n02"], ["n05", "n09"]):
        async with StoreClient.connect(own_cluster.cluster_path) as store:
            fetches = [asyncio.create_task(fetched_whole(store, blocks)) for _ in range(3)]
            await asyncio.sleep(0.01)
            for name in victims:
                own_cluster.kill(name, signal.SIGKILL)
            assert await asyncio.gather(*fetches) == [True] * 3, victims
        for name in victims:
            own_cluster.restart_node(name)
    await until(lambda: count_descriptors() <= descriptors)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_save_that_must_fail_does_not_replace_what_comes_back_later(
    own_cluster: LocalCluster,
) -> None:
    """Two engines compute other bytes for one key. With three nodes down neither version can be
    read; writing the second over the first on the nine others once lost both."""
    blocks = RandomBlocks(20, block_bytes=12_345, seed=26)
    other = RandomBlocks(20, block_bytes=12_345, seed=27)
    async with StoreClient.connect(own_cluster.cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
    await asyncio.sleep(VERSION_RACE_S + 0.5)
    for name in ("n02", "n05", "n11"):
        own_cluster.kill(name, signal.SIGKILL)
    for _ in range(2):
        async with StoreClient.connect(own_cluster.cluster_path) as store:
            result = await store.save(blocks.namespace, blocks.keys, other.sources)
            assert (result.stored, result.known, result.failed) == (0, 0, 20)
    for name in ("n02", "n05", "n11"):
        own_cluster.restart_node(name)
    async with StoreClient.connect(own_cluster.cluster_path) as store:
        target = blocks.empty_target()
        fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert fetched.blocks == 20
        assert np.array_equal(target.area, blocks.area)
