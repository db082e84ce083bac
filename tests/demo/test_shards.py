"""The demo finds the shards that a real node stored, and what it damages is noticed as damage."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.shards import find_shards, flip_bytes
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import StoreClient, batch_fetch
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S

BLOCKS = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster.start(
        tmp_path / "c", nodes=3, k=2, m=1, target_size_bytes=16 << 20
    ) as cluster:
        yield cluster


def save_on_every_node(cluster: LocalCluster, blocks: RandomBlocks) -> None:
    """Save, and wait for the node that a save need not wait for."""
    due_s = time.monotonic() + PATIENCE_S
    with StoreClient.open(cluster.cluster_path) as store:
        assert store.save(blocks.namespace, blocks.keys, blocks.sources).stored == BLOCKS
        while time.monotonic() < due_s:
            held = [report.statistics["targets"][0]["blocks"] for report in store.node_reports()]
            if min(held) == BLOCKS:
                return
            time.sleep(0.02)
    raise AssertionError(f"blocks on the nodes: {held}")


@pytest.mark.slow
def test_flipped_shards_are_found_rejected_and_replaced(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a node that is late nothing is wanted, and so nothing found wrong.
    for name in ("HEDGE_MIN_S", "HEDGE_MAX_S", "LATE_MIN_S"):
        monkeypatch.setattr(batch_fetch, name, PATIENCE_S)
    blocks = RandomBlocks(BLOCKS, block_bytes=100_000, seed=3)
    keys = set(blocks.keys)
    save_on_every_node(cluster, blocks)
    found = {name: find_shards(cluster.target_folder(name), keys) for name in cluster.node_names}
    assert [len(shards) for shards in found.values()] == [BLOCKS] * 3
    assert {frozenset(shard.key for shard in shards) for shards in found.values()} == {
        frozenset(keys)
    }
    indexes = [{shard.index for shard in shards} for shards in found.values()]
    assert sorted(indexes, key=min) == [{0}, {1}, {2}]

    data_shards = next(shards for shards in found.values() if shards[0].index == 0)
    for shard in data_shards:
        flip_bytes(shard)
    target = blocks.empty_target()
    with StoreClient.open(cluster.cluster_path) as store:
        result = store.fetch(blocks.namespace, blocks.keys, target.blocks)
    assert result.blocks == BLOCKS
    assert result.rejected_shards >= 1
    assert np.array_equal(target.area, blocks.area)


@pytest.mark.slow
def test_shards_of_other_blocks_are_left_out(cluster: LocalCluster) -> None:
    blocks = RandomBlocks(BLOCKS, block_bytes=100_000, seed=4)
    save_on_every_node(cluster, blocks)
    (shard,) = find_shards(cluster.target_folder("n01"), {blocks.keys[2]})
    before = shard.path.read_bytes()
    flip_bytes(shard)
    after = shard.path.read_bytes()
    changed = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    payload = range(shard.offset, shard.offset + shard.payload_bytes)
    assert len(changed) == 16
    assert all(at in payload for at in changed)
    flip_bytes(shard)
    assert shard.path.read_bytes() == before
