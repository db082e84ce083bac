"""A cluster of real nodes whose map is changed while clients use it."""

import asyncio
from dataclasses import replace
from pathlib import Path

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import StoreClient
from kvstore.client.store_client import MAP_LOOK_INTERVAL_S
from kvstore.cluster.map import load_cluster_map, write_cluster_map
from tests.kvstore.blocks import RandomBlocks


async def test_clients_opened_before_and_after_a_new_map_both_work(tmp_path: Path) -> None:
    blocks = RandomBlocks(70, block_bytes=4096, seed=3)
    with LocalCluster.start(
        tmp_path / "c", nodes=4, k=2, m=1, target_size_bytes=32 << 20
    ) as cluster:
        path = cluster.cluster_path
        async with StoreClient.connect(path) as before:
            await before.save(blocks.namespace, blocks.keys, blocks.sources)
            old = load_cluster_map(path)
            write_cluster_map(replace(old, epoch=old.epoch + 1), path)
            async with StoreClient.connect(path) as after:
                assert after.map.epoch == old.epoch + 1
                target = blocks.empty_target()
                found = await after.fetch(blocks.namespace, blocks.keys, target.blocks)
                assert found.blocks == 70
                await asyncio.sleep(MAP_LOOK_INTERVAL_S)
                target = blocks.empty_target()
                found = await before.fetch(blocks.namespace, blocks.keys, target.blocks)
                assert found.blocks == 70
                assert before.map.epoch == old.epoch + 1
                reports = await after.node_reports()
                assert len(reports) == 4
