"""Nodes that lie, lag or fall silent in the middle: blocks from the others, never a wrong byte."""

import asyncio
import random

import numpy as np
import pytest

from kvstore.admin.cluster_status import describe_cluster
from kvstore.cluster.map import load_cluster_map
from tests.kvstore.blocks import RandomBlocks, store_whole
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lost_nodes import count_descriptors
from tests.kvstore.faults.lying_proxy import Lie, lying_client
from tests.patience import PATIENCE_S, WELL_BEFORE_S, until

BLOCKS = 70
"""More than one span, so that a fetch has several batches."""

LIES = [
    lying_proxy.flips_a_byte_of_each_payload,
    lying_proxy.claims_another_shard,
    lying_proxy.flips_a_byte_of_each_body,
    lying_proxy.flips_a_byte_of_each_header,
    lying_proxy.sends_garbage_before_the_header,
    lying_proxy.announces_a_shorter_payload,
    lying_proxy.announces_a_longer_payload,
    lying_proxy.announces_an_enormous_payload,
    lying_proxy.never_stops_sending,
    lying_proxy.answers_another_request,
    lying_proxy.stops_in_the_middle_of_a_payload,
    lying_proxy.closes_in_the_middle_of_a_payload,
    lying_proxy.never_answers,
    lying_proxy.takes_a_second_for_each_answer,
    lying_proxy.sends_a_byte_at_a_time,
    lying_proxy.refuses_as_busy,
    lying_proxy.refuses_with_an_unknown_status,
    lying_proxy.says_that_everything_is_missing,
]


@pytest.fixture(scope="module")
def stored(cluster_path: str) -> RandomBlocks:
    blocks = RandomBlocks(BLOCKS, block_bytes=12_800, seed=11)
    store_whole(cluster_path, blocks)
    return blocks


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("liar_count", [1, 2])
async def test_every_block_arrives_before_the_deadline_when_up_to_two_nodes(
    cluster_path: str, stored: RandomBlocks, lie: Lie, liar_count: int
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    liars = [cluster_map.nodes[i].name for i in (3, 8)[:liar_count]]
    descriptors = count_descriptors()
    async with lying_client(cluster_map, liars) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lie
        target = stored.empty_target()
        result = await store.fetch(stored.namespace, stored.keys, target.blocks)
        assert result.blocks == BLOCKS
        assert np.array_equal(target.area, stored.area)
    await until(lambda: count_descriptors() <= descriptors)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    "lie", [*LIES, lying_proxy.lies_consistently], ids=lambda lie: lie.__name__
)
async def test_what_is_delivered_is_right_when_three_nodes(
    cluster_path: str, stored: RandomBlocks, lie: Lie
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    async with lying_client(cluster_map, [cluster_map.nodes[i].name for i in (0, 5, 9)]) as (
        store,
        proxies,
    ):
        for proxy in proxies:
            proxy.lie = lie
        target = stored.empty_target()
        async with asyncio.timeout(PATIENCE_S):
            result = await store.fetch(stored.namespace, stored.keys, target.blocks, deadline_s=0.5)
        delivered = result.blocks * stored.block_bytes
        assert np.array_equal(target.area[:delivered], stored.area[:delivered])


async def test_every_block_arrives_when_one_node_lies_consistently(
    cluster_path: str, stored: RandomBlocks
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    for liar in cluster_map.nodes:
        async with lying_client(cluster_map, [liar.name]) as (store, proxies):
            proxies[0].lie = lying_proxy.lies_consistently
            target = stored.empty_target()
            result = await store.fetch(stored.namespace, stored.keys, target.blocks)
            assert result.blocks == BLOCKS, liar.name
            assert np.array_equal(target.area, stored.area), liar.name


async def test_every_block_arrives_when_two_nodes_read_the_wrong_keys(
    cluster_path: str, stored: RandomBlocks
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    async with lying_client(cluster_map, [cluster_map.nodes[i].name for i in (2, 6)]) as (
        store,
        proxies,
    ):
        for proxy in proxies:
            proxy.reads_other_keys = True
        target = stored.empty_target()
        result = await store.fetch(stored.namespace, stored.keys, target.blocks)
        assert result.blocks == BLOCKS
        assert np.array_equal(target.area, stored.area)


async def test_a_shard_that_was_given_up_and_asked_for_again_is_waited_for(
    cluster_path: str, stored: RandomBlocks
) -> None:
    """Two nodes answer with other blocks, so the third, which lags, is given up and needed after
    all. Its first answer once ended the wait for its second."""
    cluster_map = load_cluster_map(cluster_path)
    async with lying_client(cluster_map, [cluster_map.nodes[i].name for i in (2, 6, 9)]) as (
        store,
        proxies,
    ):
        for proxy in proxies[:2]:
            proxy.reads_other_keys = True
        proxies[2].lie = lying_proxy.takes_a_tenth_of_a_second
        target = stored.empty_target()
        result = await store.fetch(stored.namespace, stored.keys, target.blocks)
        assert result.blocks == BLOCKS
        assert np.array_equal(target.area, stored.area)


@pytest.mark.parametrize(
    "lie",
    [
        lying_proxy.never_answers,
        lying_proxy.refuses_as_busy,
        lying_proxy.sends_garbage_before_the_header,
        lying_proxy.flips_a_byte_of_each_body,
        lying_proxy.answers_another_request,
    ],
    ids=lambda lie: lie.__name__,
)
async def test_match_and_save_are_whole_and_do_not_wait_for_a_node_that(
    cluster_path: str, stored: RandomBlocks, rng: random.Random, lie: Lie
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    fresh = RandomBlocks(5, block_bytes=12_800, seed=rng.randrange(2**31))
    async with lying_client(cluster_map, [cluster_map.nodes[4].name]) as (store, proxies):
        proxies[0].lie = lie
        for _ in range(4):
            async with asyncio.timeout(WELL_BEFORE_S):
                assert await store.match(stored.namespace, stored.keys) == BLOCKS
        async with asyncio.timeout(WELL_BEFORE_S):
            result = await store.save(fresh.namespace, fresh.keys, fresh.sources)
        assert (result.stored, result.failed) == (5, 0)


@pytest.mark.parametrize(
    ("statistics", "problem"),
    [
        (b"[" * 200_000, "its statistics are nested too deeply"),
        (b'{"targets": ' + b"[" * 200_000, "its statistics are nested too deeply"),
        (b"not json", "its statistics are not JSON"),
        (b"\xff\xfe\xfd", "its statistics are not JSON"),
        (b'{"pid": ' + b"9" * 5000 + b"}", "its statistics are not JSON"),
        (b"[1]", "its statistics are list, not an object"),
        (b'{"targets": [], "uptime_s": Infinity}', "its figures are not understood"),
        (b'{"targets": [], "uptime_s": 1e999}', "its figures are not understood"),
        (b'{"targets": [], "uptime_s": ' + b"9" * 401 + b"}", "its figures are not understood"),
        (b'{"targets": [{"blocks": ' + b"9" * 4300 + b"}]}", "its figures are not understood"),
    ],
)
async def test_a_node_that_lies_of_itself_is_shown_with_a_reason_beside_the_others(
    cluster_path: str, statistics: bytes, problem: str
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    liar = cluster_map.nodes[3].name
    async with lying_client(cluster_map, [liar]) as (store, proxies):
        proxies[0].lie = lying_proxy.says_of_itself(statistics)
        found = describe_cluster(store.map, await store.node_reports())
    down = [node for node in found.nodes if not node.is_alive]
    assert [node.node for node in down] == [liar]
    assert problem in down[0].problem
