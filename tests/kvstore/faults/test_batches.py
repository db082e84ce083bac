"""What one batch makes of lost, lying and lagging nodes, told by results and counters."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import FetchEnd, batch_fetch, matching, saving
from kvstore.client.inquiry import ask_node
from kvstore.client.router import Lane
from kvstore.client.store_client import StoreClient
from kvstore.cluster.entities import ClusterMap
from kvstore.cluster.map import load_cluster_map
from tests.kvstore.blocks import RandomBlocks, store_whole
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lost_nodes import nodes_by_shard, without_nodes
from tests.kvstore.faults.lying_proxy import Lie, lying_client
from tests.patience import PATIENCE_S

BLOCKS = 64
"""One span of small blocks: one batch, and one READ to each node."""


@pytest.fixture(scope="module")
def cluster_map(cluster_path: str) -> ClusterMap:
    return load_cluster_map(cluster_path)


@pytest.fixture(scope="module")
def stored(cluster_path: str) -> RandomBlocks:
    blocks = RandomBlocks(BLOCKS, block_bytes=12_800, seed=51)
    store_whole(cluster_path, blocks)
    return blocks


@pytest.fixture
def no_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further shards because of time, so that the counters depend on answers alone."""
    monkeypatch.setattr(batch_fetch, "HEDGE_MIN_S", 30.0)
    monkeypatch.setattr(batch_fetch, "HEDGE_MAX_S", 30.0)
    monkeypatch.setattr(batch_fetch, "LATE_MIN_S", 30.0)


async def fetch_right(store: StoreClient, blocks: RandomBlocks) -> tuple[int, int]:
    """Fetches all blocks, checks every byte; decoded blocks and rejected shards."""
    target = blocks.empty_target()
    result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
    assert (result.blocks, result.ended) == (len(blocks.keys), FetchEnd.COMPLETE)
    assert np.array_equal(target.area, blocks.area)
    return result.decoded_blocks, result.rejected_shards


async def count_reports(store: StoreClient) -> dict[str, int]:
    """False reports that each node has counted."""
    reports = await store.node_reports()
    return {
        report.node: sum(target["false_reports"] for target in report.statistics["targets"])
        for report in reports
    }


class TestSaving:
    async def test_a_node_that_was_lost_before_costs_one_acknowledgement_and_no_block(
        self, cluster_map: ClusterMap, closed_port: int
    ) -> None:
        for shard in (0, 5, 11):
            blocks = RandomBlocks(BLOCKS, block_bytes=12_345, seed=520 + shard)
            lost = nodes_by_shard(cluster_map, blocks.keys)[shard]
            index = [node.name for node in cluster_map.nodes].index(lost)
            store = StoreClient(without_nodes(cluster_map, {index}, closed_port))
            try:
                saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
                assert (saved.stored, saved.degraded, saved.failed) == (BLOCKS, 0, 0), shard
                await fetch_right(store, blocks)
            finally:
                store.close()


class TestCounters:
    """Each kind of fault is counted, once for each shard or request that it cost."""

    async def test_healthy_nodes_cost_nothing(
        self, cluster_map: ClusterMap, stored: RandomBlocks, no_hedges: None
    ) -> None:
        store = StoreClient(cluster_map)
        try:
            assert (await fetch_right(store, stored))[1] == 0
            counters = store.counters
            assert counters.blocks_fetched == BLOCKS
            assert (counters.shards_rejected, counters.shards_missing) == (0, 0)
            assert (counters.shards_failed, counters.hedges) == (0, 0)
        finally:
            store.close()

    @pytest.mark.parametrize(
        ("lie", "rejected", "missing", "failed"),
        [
            (lying_proxy.flips_a_byte_of_each_payload, 1, 0, 0),
            (lying_proxy.says_that_everything_is_missing, 0, BLOCKS, 0),
            (lying_proxy.claims_another_shard, 0, BLOCKS, 0),
            (lying_proxy.closes_in_the_middle_of_a_payload, 0, 0, 1),
            (lying_proxy.refuses_as_busy, 0, 0, 1),
            (lying_proxy.flips_a_byte_of_each_header, 0, 0, 1),
        ],
        ids=lambda value: getattr(value, "__name__", str(value)),
    )
    async def test_one_bad_node_is_counted_and_replaced_by_one_more_shard(
        self,
        cluster_map: ClusterMap,
        stored: RandomBlocks,
        no_hedges: None,
        lie: Lie,
        rejected: int,
        missing: int,
        failed: int,
    ) -> None:
        liar = nodes_by_shard(cluster_map, stored.keys)[0]
        laggards = nodes_by_shard(cluster_map, stored.keys)[1:2]
        async with lying_client(cluster_map, [liar, *laggards]) as (store, proxies):
            proxies[0].lie = lie
            proxies[1].lie = lying_proxy.takes_a_tenth_of_a_second  # the liar is heard first
            decoded, said_rejected = await fetch_right(store, stored)
            assert (decoded, said_rejected) == (BLOCKS, rejected)
            counters = store.counters
            assert counters.blocks_decoded == BLOCKS
            assert counters.shards_rejected == rejected
            assert counters.shards_missing == missing
            assert counters.shards_failed == failed
            assert counters.hedges == 1

    @pytest.mark.parametrize("count", [1, 2])
    async def test_slow_nodes_are_replaced_when_the_others_have_answered(
        self, cluster_map: ClusterMap, stored: RandomBlocks, count: int
    ) -> None:
        slow = nodes_by_shard(cluster_map, stored.keys)[:count]
        async with lying_client(cluster_map, slow) as (store, proxies):
            for proxy in proxies:
                proxy.lie = lying_proxy.never_answers
            assert await fetch_right(store, stored) == (BLOCKS, 0)
            assert store.counters.hedges == 2


class TestLies:
    async def test_a_lie_about_one_block_is_counted_alone_and_no_honest_node_is_reported(
        self, cluster_map: ClusterMap, stored: RandomBlocks
    ) -> None:
        """Two nodes lag, so the first try has only k shards, the lie among them. What is decoded
        from it must not count against the nodes that come later."""
        by_shard = nodes_by_shard(cluster_map, stored.keys)
        for liar in (0, 4):
            names = [by_shard[liar], by_shard[7], by_shard[8]]
            async with lying_client(cluster_map, names) as (store, proxies):
                before = await count_reports(store)
                proxies[0].lie = lying_proxy.lies_consistently_of_block(13)
                for proxy in proxies[1:]:
                    proxy.lie = lying_proxy.takes_a_tenth_of_a_second
                _, rejected = await fetch_right(store, stored)
                assert (rejected, store.counters.shards_rejected) == (1, 1)
                await asyncio.sleep(0.15)  # whatever was said of others has arrived by then
                for proxy in proxies:
                    proxy.lie = None
                assert await count_reports(store) == before

    @pytest.mark.usefixtures("no_hedges")
    async def test_a_node_that_flips_bytes_is_told_of_it(
        self, cluster_map: ClusterMap, stored: RandomBlocks
    ) -> None:
        """The node behind the proxy is honest, so its own check finds that the report is false."""
        liar = nodes_by_shard(cluster_map, stored.keys)[0]
        async with lying_client(cluster_map, [liar]) as (store, proxies):
            before = await count_reports(store)
            proxies[0].lie = lying_proxy.flips_a_byte_of_each_payload
            async with asyncio.timeout(PATIENCE_S):
                # A client reads parity instead of a node that was slow, and sees no lie then.
                while not store.counters.shards_rejected:
                    await fetch_right(store, stored)
                proxies[0].lie = None
                while (after := await count_reports(store)) == before:
                    await asyncio.sleep(0.1)
            assert after.pop(liar) == before.pop(liar) + 1
            assert after == before


class TestMatching:
    async def test_a_refused_part_of_a_long_question_costs_neither_hits_nor_the_connection(
        self, cluster_path: str, cluster_map: ClusterMap
    ) -> None:
        count = wire.KEYS_PER_REQUEST_MAX + 80
        blocks = RandomBlocks(count, block_bytes=1024, seed=53)
        async with StoreClient.connect(cluster_path) as store:
            saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
            assert saved.failed == 0
        names = [node.name for node in cluster_map.nodes]
        async with lying_client(cluster_map, names) as (store, proxies):
            for proxy in proxies:
                proxy.lie = lying_proxy.refuses_every_second(wire.Op.MATCH)
            for _ in range(4):
                assert await store.match(blocks.namespace, blocks.keys) == count
            assert max(proxy.connections for proxy in proxies) == 1
            assert sum(proxy.connections for proxy in proxies) >= 2
            assert await store.match(blocks.namespace, blocks.keys) == count


@pytest.fixture(params=[0, 2], ids=["no parity", "two parities"])
def copies(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose shards are whole blocks."""
    m = int(request.param)
    with LocalCluster.start(
        tmp_path / "c", nodes=1 + m, k=1, m=m, target_size_bytes=64 << 20
    ) as cluster:
        yield cluster


async def test_a_whole_block_of_another_key_is_never_delivered(copies: LocalCluster) -> None:
    """With k = 1 a node can answer with another block that is good in itself. One such node costs
    nothing if there are others; two that agree outvote the third: a miss, and no wrong byte.
    """
    names = copies.node_names
    async with lying_client(copies.map, names) as (store, proxies):
        for block_bytes in (12_345, 12_800):
            blocks = RandomBlocks(70, block_bytes=block_bytes, seed=54)
            for proxy in proxies:
                proxy.reads_other_keys = False
            saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
            assert saved.failed == 0
            await store.finish_writes(deadline_s=PATIENCE_S)
            for liars in range(1, len(names) + 1):
                for proxy in proxies[:liars]:
                    proxy.reads_other_keys = True
                target = blocks.empty_target()
                result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
                if liars == 1 or liars == len(names):
                    assert result.blocks == (70 if liars < len(names) else 0)
                delivered = result.blocks * block_bytes
                assert np.array_equal(target.area[:delivered], blocks.area[:delivered])


async def test_a_block_that_the_matched_nodes_lost_is_known_if_k_others_have_it(
    cluster_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two nodes that a match asks had lost one block of ten; the save once called it failed."""
    # The first two nodes are asked and no third, however slow they are.
    monkeypatch.setattr(matching, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(matching, "delay_class", lambda delay_s: 0)
    monkeypatch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)
    blocks = RandomBlocks(10, block_bytes=12_345, seed=31, tenant="lost-by-two")
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        await store.finish_writes(deadline_s=PATIENCE_S)
        context = store._shared
        placement = context.router.span_of(blocks.keys, 0)
        for channel in context.router.shard_channels(placement, Lane.READ)[:2]:
            await ask_node(
                channel,
                wire.Op.FORGET,
                body=blocks.keys[5],
                count=1,
                deadline_s=PATIENCE_S,
                loop=context.loop,
            )
        assert (
            await store.match(
                blocks.namespace,
                blocks.keys,
            )
            == 5
        )
        again = await store.save(blocks.namespace, blocks.keys, blocks.sources, deadline_s=50.0)
        assert (again.known, again.stored, again.failed) == (10, 0, 0)
