"""A client follows its cluster map from epoch to epoch while it works."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import NodeReport, store_client
from kvstore.client.context import ClientContext
from kvstore.client.statistics import ask_statistics
from kvstore.client.store_client import StoreClient
from kvstore.cluster.map import load_cluster_map, write_cluster_map
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults.lost_nodes import count_descriptors, stopped
from tests.patience import PATIENCE_S, until

GRACE_S = 0.05


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster.start(tmp_path / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20) as it:
        yield it


@pytest.fixture
async def store(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreClient]:
    """A client that looks at its map before every operation."""
    monkeypatch.setattr(store_client, "MAP_LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(store_client, "OLD_MAP_GRACE_S", GRACE_S)
    async with StoreClient.connect(cluster.cluster_path) as it:
        yield it


@pytest.fixture
async def blocks(store: StoreClient) -> RandomBlocks:
    made = RandomBlocks(70, block_bytes=12_345, seed=61)
    assert (await store.save(made.namespace, made.keys, made.sources)).stored == 70
    await store.finish_writes()
    return made


def raise_epoch(cluster: LocalCluster) -> None:
    old = load_cluster_map(cluster.cluster_path)
    write_cluster_map(dataclasses.replace(old, epoch=old.epoch + 1), cluster.cluster_path)


async def assert_works(store: StoreClient, blocks: RandomBlocks) -> None:
    target = blocks.empty_target()
    result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
    assert result.blocks == len(blocks.keys)
    assert np.array_equal(target.area, blocks.area)


async def test_operations_go_on_under_a_new_epoch_and_old_connections_close(
    cluster: LocalCluster,
    store: StoreClient,
    blocks: RandomBlocks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_client, "OLD_MAP_GRACE_S", 3600.0)
    before = count_descriptors()
    raise_epoch(cluster)
    await assert_works(store, blocks)
    assert store.map.epoch == 2
    assert count_descriptors() > before, "the old connections are given time"
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + 3600.0)
    # Connections for writing are made when they are needed: fewer are open than before.
    await until(lambda: count_descriptors() < before)
    await assert_works(store, blocks)


async def test_an_old_connection_stays_until_its_answer_has_come(
    cluster: LocalCluster, store: StoreClient, blocks: RandomBlocks
) -> None:
    fresh = RandomBlocks(70, block_bytes=12_345, seed=62)
    with stopped(cluster, cluster.node_names):
        saving = asyncio.create_task(store.save(fresh.namespace, fresh.keys, fresh.sources))
        await asyncio.sleep(0.3)  # by now it has given up asking what is known, and sends
        raise_epoch(cluster)
        await store.match(blocks.namespace, blocks.keys, deadline_s=0.01)
        assert store.map.epoch == 2
        await asyncio.sleep(3 * GRACE_S)
        assert not saving.done()
        with_both = count_descriptors()
    result = await saving
    assert (result.stored, result.failed) == (70, 0)
    await until(lambda: count_descriptors() < with_both)
    await assert_works(store, fresh)


async def test_a_broken_map_is_logged_and_the_old_one_stays(
    cluster: LocalCluster,
    store: StoreClient,
    blocks: RandomBlocks,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = cluster.cluster_path.read_bytes()
    old_map = store.map
    for broken in (b"format = 99\n", b"\xff", good.replace(b"epoch = 1", b"epoch = 0")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="kvstore.client.store_client"):
            cluster.cluster_path.write_bytes(broken)
            await assert_works(store, blocks)
        assert store.map is old_map
        assert "the cluster map cannot be used, the old one stays" in caplog.text
    cluster.cluster_path.unlink()
    await assert_works(store, blocks)
    assert store.map is old_map
    cluster.cluster_path.write_bytes(good)
    raise_epoch(cluster)
    await assert_works(store, blocks)
    assert store.map.epoch == 2


async def test_a_map_of_another_cluster_is_refused(
    cluster: LocalCluster,
    store: StoreClient,
    blocks: RandomBlocks,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = dataclasses.replace(store.map, cluster="ab" * 16, epoch=2)
    write_cluster_map(other, cluster.cluster_path)
    with caplog.at_level(logging.WARNING, logger="kvstore.client.store_client"):
        await assert_works(store, blocks)
    assert store.map.epoch == 1
    assert "cluster: given " + "ab" * 16 in caplog.text


async def test_healthy_nodes_are_alive_to_a_client_whose_map_has_just_become_old(
    cluster: LocalCluster,
) -> None:
    """It had looked a moment ago, and nodes that followed the new map refused it as if dead."""
    async with StoreClient.connect(cluster.cluster_path) as old:
        assert all(report.is_alive for report in await old.node_reports())
        for epoch in range(2, 5):
            raise_epoch(cluster)
            async with StoreClient.connect(cluster.cluster_path) as new:
                assert all(report.is_alive for report in await new.node_reports())
            assert all(report.is_alive for report in await old.node_reports())
            assert old.map.epoch == epoch


@pytest.fixture
def asked(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Epoch and deadline of each round of questions to all nodes; the map grows in the first."""
    rounds: list[tuple[int, float]] = []

    async def ask_and_grow(context: ClientContext, deadline_s: float) -> list[NodeReport]:
        rounds.append((context.router.map.epoch, deadline_s))
        if len(rounds) == 1:
            raise_epoch(cluster)
            async with StoreClient.connect(cluster.cluster_path) as new:
                assert await ask_statistics(new._context("test"), PATIENCE_S)
        return await ask_statistics(context, deadline_s)

    monkeypatch.setattr(store_client, "ask_statistics", ask_and_grow)
    return rounds


async def test_nodes_are_asked_anew_when_the_map_grows_while_they_are_asked(
    cluster: LocalCluster, asked: list[tuple[int, float]]
) -> None:
    async with StoreClient.connect(cluster.cluster_path) as store:
        assert all(report.is_alive for report in await store.node_reports(deadline_s=PATIENCE_S))
    first, second = asked
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == PATIENCE_S
    assert second[1] < PATIENCE_S, "both rounds together are within the deadline"


async def test_nodes_are_asked_once_when_the_first_round_took_all_the_time(
    cluster: LocalCluster, asked: list[tuple[int, float]]
) -> None:
    async with StoreClient.connect(cluster.cluster_path) as store:
        assert not any(report.is_alive for report in await store.node_reports(deadline_s=1e-6))
    assert [epoch for epoch, _ in asked] == [1]
