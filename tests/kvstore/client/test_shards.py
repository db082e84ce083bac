"""Raw shards: what comes is right or is said to be wrong, whatever the node does."""

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.client.channel import NodeChannel
from kvstore.client.inquiry import ask_node
from kvstore.client.router import Lane
from kvstore.client.shards import read_shards, write_shards
from kvstore.client.store_client import StoreClient
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import NodeError
from tests.kvstore.blocks import RandomBlocks, store_whole
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lying_proxy import Lie, lying_client
from tests.patience import OPERATION_S, PATIENCE_S

BLOCKS = 20
BLOCK_BYTES = 12_800
SHARD_BYTES = 1280

LIES = [
    lying_proxy.flips_a_byte_of_each_payload,
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
    lying_proxy.refuses_as_busy,
    lying_proxy.refuses_with_an_unknown_status,
    lying_proxy.says_that_everything_is_missing,
]


@pytest.fixture(scope="module")
def stored(cluster_path: str) -> RandomBlocks:
    blocks = RandomBlocks(BLOCKS, block_bytes=BLOCK_BYTES, seed=71)
    store_whole(cluster_path, blocks)
    return blocks


def shard_of(blocks: RandomBlocks, block: int, shard: int) -> bytes:
    """The bytes of a data shard."""
    return bytes(blocks.sources[block][shard * SHARD_BYTES : (shard + 1) * SHARD_BYTES])


async def read_from(
    store: StoreClient,
    blocks: RandomBlocks,
    shard: int,
    area: bytearray,
    *,
    deadline_s: float = OPERATION_S,
) -> NDArray[np.bool_]:
    """Reads a shard of every block into `area`; which are good."""
    router = store._shared.router
    channel = router.shard_channels(router.span_of(blocks.keys, 0), Lane.READ)[shard]
    view = memoryview(area)
    into = [view[i * SHARD_BYTES : (i + 1) * SHARD_BYTES] for i in range(BLOCKS)]
    loop = asyncio.get_running_loop()
    answers = await read_shards(channel, blocks.keys, into=into, deadline_s=deadline_s, loop=loop)
    assert (answers.records["status"] == 1).all() or not answers.is_good.all()
    return answers.is_good


async def test_shards_arrive_where_they_were_asked_to(
    cluster_path: str, stored: RandomBlocks
) -> None:
    async with StoreClient.connect(cluster_path) as store:
        for shard in (0, 3, 9):
            area = bytearray(BLOCKS * SHARD_BYTES)
            assert (await read_from(store, stored, shard, area)).all()
            assert bytes(area) == b"".join(shard_of(stored, i, shard) for i in range(BLOCKS))


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_no_wrong_shard_counts_as_good_when_a_node(
    cluster_path: str, stored: RandomBlocks, lie: Lie
) -> None:
    cluster_map = load_cluster_map(cluster_path)
    names = [node.name for node in cluster_map.nodes]
    async with lying_client(cluster_map, names) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lie
        area = bytearray(BLOCKS * SHARD_BYTES)
        try:
            async with asyncio.timeout(PATIENCE_S):
                is_good = await read_from(store, stored, 2, area, deadline_s=0.5)
        except NodeError:
            is_good = np.zeros(BLOCKS, np.bool_)
        assert not is_good.all()
        for block in np.flatnonzero(is_good).tolist():
            here = area[block * SHARD_BYTES : (block + 1) * SHARD_BYTES]
            assert here == shard_of(stored, block, 2)
        # What comes late must not be written to memory that is ours again.
        area[:] = bytes(len(area))
        await asyncio.sleep(0.05)
        assert not any(area)


async def test_reading_is_no_use_of_a_shard(cluster_path: str, stored: RandomBlocks) -> None:
    async with StoreClient.connect(cluster_path) as store:
        router = store._shared.router
        channel = router.shard_channels(router.span_of(stored.keys, 0), Lane.READ)[1]
        before = await last_uses(channel, stored)
        await asyncio.sleep(1.1)
        assert (await read_from(store, stored, 1, bytearray(BLOCKS * SHARD_BYTES))).all()
        assert await last_uses(channel, stored) == before


async def last_uses(channel: NodeChannel, blocks: RandomBlocks) -> list[int]:
    body = await ask_node(
        channel,
        wire.Op.LOCATE,
        body=wire.join_keys(blocks.keys),
        count=BLOCKS,
        deadline_s=OPERATION_S,
        loop=asyncio.get_running_loop(),
    )
    found: list[int] = wire.parse_records(body, wire.LOCATION, BLOCKS)["last_used_s"].tolist()
    return found


async def test_written_shard_keeps_the_last_use_it_was_given(
    cluster_path: str, stored: RandomBlocks
) -> None:
    other = RandomBlocks(2, block_bytes=BLOCK_BYTES, seed=72)
    async with StoreClient.connect(cluster_path) as store:
        router = store._shared.router
        loop = asyncio.get_running_loop()
        channel = router.shard_channels(router.span_of(other.keys, 0), Lane.WRITE)[0]
        payloads = [memoryview(shard_of(other, i, 0)) for i in range(2)]
        batch, items = np.zeros(1, wire.WRITE_BATCH), np.zeros(2, wire.WRITE_ITEM)
        batch["k"], batch["m"], batch["shard_bytes"] = 10, 2, SHARD_BYTES
        batch["ttl_class"] = b"chat"
        batch["block_bytes"], batch["anchor"] = BLOCK_BYTES, np.void(other.keys[0])
        items["key"] = np.frombuffer(b"".join(other.keys), "V32")
        items["last_used_s"] = [1_000_000, 2_000_000]
        items["payload_xxh3"] = [xxh3_64_intdigest(payload) for payload in payloads]
        items["block_xxh3"] = 5
        for expected in (wire.WriteOutcome.STORED, wire.WriteOutcome.KNOWN):
            outcomes = await write_shards(
                channel, batch, items, payloads, deadline_s=OPERATION_S, loop=loop
            )
            assert outcomes.tolist() == [expected] * 2
        body = wire.join_keys(other.keys)
        answer = await ask_node(
            channel, wire.Op.LOCATE, body=body, count=2, deadline_s=OPERATION_S, loop=loop
        )
        found = wire.parse_records(answer, wire.LOCATION, 2)
        assert found["last_used_s"].tolist() == [1_000_000, 2_000_000]
        await ask_node(
            channel, wire.Op.FORGET, body=body, count=2, deadline_s=OPERATION_S, loop=loop
        )
