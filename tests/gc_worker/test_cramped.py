"""Blocks of another size come, and the target has only slots of the old one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gc_worker.columns import ColumnsBuilder, TargetColumns
from gc_worker.cramped import plan_segment_eviction
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import StoreClient
from kvstore.client.health import FULL_S
from kvstore.node.segment import LOCATION_BITS
from tests.gc_worker.worker_bench import WorkerBench
from tests.kvstore.blocks import RandomBlocks

NOW_S = 1_700_000_000
LARGE_BYTES, OTHER_BYTES = 128 << 10, 96 << 10


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cramped") / "cluster"
    with LocalCluster.start(folder, nodes=1, k=1, m=0, target_size_bytes=8 << 20) as it:
        yield it


async def test_blocks_of_another_size_find_room_in_a_full_target(cluster: LocalCluster) -> None:
    """Every segment has some free slots of the old size: one after the other would free no more."""
    old = RandomBlocks(80, block_bytes=LARGE_BYTES, seed=1)
    new = RandomBlocks(8, block_bytes=OTHER_BYTES, seed=2)
    async with (
        WorkerBench.open(cluster) as bench,
        StoreClient.connect(str(cluster.cluster_path)) as store,
    ):
        held = (await store.save(old.namespace, old.keys, old.sources)).stored
        assert 40 < held < 70
        for at in range(2, held, 4):
            await store.forget(old.namespace, old.keys[: at + 1], first_block=at)
        eviction = bench.evictions["n01"]
        await eviction.tick()
        before = len(await bench.columns("n01"))
        assert (await store.save(new.namespace, new.keys, new.sources)).failed > 0
        for _ in range(8):
            await eviction.tick()
            await asyncio.sleep(FULL_S * 1.1)  # so long the client believes that the node is full
            await store.save(new.namespace, new.keys, new.sources)
            if await store.match(new.namespace, new.keys) == 8:
                break
        assert await store.match(new.namespace, new.keys) == 8
        evicted = bench.contexts["n01"].counters.evicted["least_used"]
        assert 0 < evicted < before // 3, "a segment or two of the old size, and no more"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.integers(0, 50)),
        min_size=1,
        max_size=40,
    )
)
def test_segment_that_goes_is_the_one_used_longest_ago(shards: list[tuple[int, int, int]]) -> None:
    n = len(shards)
    columns = TargetColumns(
        location=np.array(
            [(s << LOCATION_BITS) + i for i, (s, _, _) in enumerate(shards)], np.int64
        ),
        generation=np.arange(n, dtype=np.uint64),
        last_used_s=np.array([NOW_S - age for _, age, _ in shards], np.uint32),
        block_index=np.array([depth for _, _, depth in shards], np.uint32),
        slot_bytes=np.full(n, 1000, np.uint32),
        ttl_class=np.zeros(n, np.uint8),
        shard=np.zeros(n, np.uint8),
    )
    plan = plan_segment_eviction(columns, now_s=NOW_S, bucket_s=60)
    (gone,) = {shards[row][0] for row in plan.rows.tolist()}
    assert len(plan) == sum(segment == gone for segment, _, _ in shards)
    ages = {
        segment: np.mean([age for one, age, _ in shards if one == segment])
        for segment in {segment for segment, _, _ in shards}
    }
    assert ages[gone] == pytest.approx(max(ages.values()))


def test_empty_target_has_no_segment_to_empty() -> None:
    columns = ColumnsBuilder().build(())
    assert len(plan_segment_eviction(columns, now_s=NOW_S, bucket_s=60)) == 0
