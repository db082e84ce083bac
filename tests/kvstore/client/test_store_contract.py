"""What every client of the store does, against real nodes and real agents."""

import asyncio
import mmap
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.client import BlockLayout, FetchEnd, Section
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import ClientClosed, InvalidArgument
from tests.kvstore.agent.agent_process import AgentProcess
from tests.kvstore.blocks import RandomBlocks, save_in_full
from tests.kvstore.client.any_store import KINDS, AnyStore, open_store

LAYOUTS = {
    "one section": BlockLayout((Section("all", 1024),)),
    "V4.1-Flash": BlockLayout(
        tuple(
            Section(name, size)
            for name, size in (("2", 22_784), ("8", 22_784), ("14", 22_784), ("20", 45_568))
        )
    ),
    "odd sections": BlockLayout(
        tuple(Section(str(size), size) for size in (1, 61, 997, 64, 3571, 128, 2))
    ),
}


@pytest.fixture(scope="module")
def agents(cluster_path: str) -> Iterator[dict[bool, AgentProcess]]:
    """An agent with a large arena, and (True) one whose arena holds few blocks."""
    with (
        AgentProcess(cluster_path) as large,
        AgentProcess(cluster_path, ("--arena", "2MiB", "--window-memory", "16MiB")) as small,
    ):
        yield {False: large, True: small}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def socket_path(agents: dict[bool, AgentProcess], kind: str) -> str:
    return str(agents["small" in kind].socket_path)


@pytest.fixture
async def store(kind: str, cluster_path: str, socket_path: str) -> AsyncIterator[AnyStore]:
    async with open_store(kind, cluster_path, socket_path) as opened:
        yield opened


def blocks_for(
    request: pytest.FixtureRequest, count: int, layout: BlockLayout | None = None
) -> RandomBlocks:
    """Blocks that no other test has."""
    layout = layout or LAYOUTS["one section"]
    return RandomBlocks(
        count,
        block_bytes=layout.block_bytes,
        layout=layout,
        seed=zlib.crc32(request.node.nodeid.encode()),
        tenant=f"{os.getpid()}-{request.node.name}",
    )


@pytest.mark.parametrize("count", [1, 65, 130])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_was_saved_is_matched_and_fetched_to_the_bit(
    store: AnyStore, request: pytest.FixtureRequest, count: int, layout: str
) -> None:
    blocks = blocks_for(request, count, LAYOUTS[layout])
    assert await store.match(blocks.namespace, blocks.keys) == 0
    saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
    assert (saved.stored, saved.known, saved.failed) == (count, 0, 0)
    assert await store.match(blocks.namespace, blocks.keys) == count
    target = blocks.empty_target()
    fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
    assert (fetched.blocks, fetched.ended) == (count, FetchEnd.COMPLETE)
    assert fetched.rejected_shards == 0
    assert np.array_equal(target.area, blocks.area)
    assert (store.counters.blocks_saved, store.counters.blocks_fetched) == (count, count)


async def test_a_range_in_the_middle_of_a_chain_is_saved_and_fetched_by_its_first_block(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 100)
    ns, keys = blocks.namespace, blocks.keys
    assert (await store.save(ns, keys, blocks.sources[30:], first_block=30)).stored == 70
    assert await store.match(ns, keys) == 0
    target = blocks.empty_target()
    fetched = await store.fetch(ns, keys, target.blocks[50:], first_block=50)
    assert fetched.blocks == 50
    assert np.array_equal(target.area[50 * 1024 :], blocks.area[50 * 1024 :])
    assert not target.area[: 50 * 1024].any()


async def test_known_blocks_are_not_stored_again(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 80)
    await store.save(blocks.namespace, blocks.keys[:50], blocks.sources[:50])
    found = await save_in_full(lambda: store.save(blocks.namespace, blocks.keys, blocks.sources))
    assert found == (30, 50)


async def test_a_missing_block_ends_the_run_and_is_no_error(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 90)
    ns, keys = blocks.namespace, blocks.keys
    await store.save(ns, keys[:40], blocks.sources[:40])
    await store.save(ns, keys, blocks.sources[41:], first_block=41)
    assert await store.match(ns, keys) == 40
    target = blocks.empty_target()
    fetched = await store.fetch(ns, keys, target.blocks)
    assert (fetched.blocks, fetched.ended) == (40, FetchEnd.TOO_FEW_SHARDS)
    assert np.array_equal(target.area[: 40 * 1024], blocks.area[: 40 * 1024])


async def test_blocks_that_nobody_saved_are_a_miss(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 5)
    assert await store.match(blocks.namespace, blocks.keys) == 0
    fetched = await store.fetch(blocks.namespace, blocks.keys, blocks.empty_target().blocks)
    assert (fetched.blocks, fetched.ended) == (0, FetchEnd.TOO_FEW_SHARDS)


async def test_forgotten_blocks_are_gone(store: AnyStore, request: pytest.FixtureRequest) -> None:
    blocks = blocks_for(request, 10)
    await store.save(blocks.namespace, blocks.keys, blocks.sources)
    assert await store.forget(blocks.namespace, blocks.keys, first_block=4) == 6
    assert await store.match(blocks.namespace, blocks.keys) == 4


async def test_tenants_do_not_see_each_others_blocks(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    mine = blocks_for(request, 3)
    theirs = RandomBlocks(3, block_bytes=1024, seed=5, tenant=f"other {os.getpid()}")
    await store.save(mine.namespace, mine.keys, mine.sources)
    assert await store.match(mine.namespace, mine.keys) == 3
    assert await store.match(theirs.namespace, theirs.keys) == 0


async def test_concurrent_fetches_of_one_client_do_not_disturb_each_other(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 66, LAYOUTS["odd sections"])
    await store.save(blocks.namespace, blocks.keys, blocks.sources)
    targets = [blocks.empty_target() for _ in range(8)]
    results = await asyncio.gather(
        *(store.fetch(blocks.namespace, blocks.keys, one.blocks) for one in targets)
    )
    assert [one.blocks for one in results] == [66] * 8
    assert all(np.array_equal(one.area, blocks.area) for one in targets)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("Blocking")])
async def test_a_cancelled_fetch_writes_nothing_more(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 128, LAYOUTS["V4.1-Flash"])
    await store.save(blocks.namespace, blocks.keys, blocks.sources)
    for delay_s in (0.0, 0.001, 0.005, 0.02):
        target = blocks.empty_target()
        fetch = asyncio.create_task(store.fetch(blocks.namespace, blocks.keys, target.blocks))
        await asyncio.sleep(delay_s)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        before = target.area.copy()
        await asyncio.sleep(0.05)
        assert np.array_equal(before, target.area)
    target = blocks.empty_target()
    assert (await store.fetch(blocks.namespace, blocks.keys, target.blocks)).blocks == 128
    assert np.array_equal(target.area, blocks.area)


async def test_buffers_are_the_callers_again_as_soon_as_a_save_returns(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 64, LAYOUTS["V4.1-Flash"])
    size = blocks.block_bytes
    scribbled = blocks.area.copy()
    sources = [scribbled.data[at : at + size] for at in range(0, len(scribbled), size)]
    await store.save(blocks.namespace, blocks.keys, sources)
    scribbled[:] = 0
    await asyncio.sleep(0.2)
    target = blocks.empty_target()
    result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
    assert (result.blocks, result.rejected_shards) == (64, 0)
    assert np.array_equal(target.area, blocks.area)


@pytest.mark.parametrize("buffer", ["bytearray", "float32 array", "mmap"])
async def test_any_writable_buffer_will_do(
    store: AnyStore, request: pytest.FixtureRequest, buffer: str
) -> None:
    def make() -> Any:  # noqa: ANN401 (whatever has the buffer protocol)
        if buffer == "bytearray":
            return bytearray(1024)
        return np.zeros(256, np.float32) if buffer == "float32 array" else mmap.mmap(-1, 1024)

    blocks = blocks_for(request, 2)
    made = [make(), make()]
    await store.save(blocks.namespace, blocks.keys, [bytes(one) for one in blocks.sources])
    assert (await store.fetch(blocks.namespace, blocks.keys, made)).blocks == 2
    assert b"".join(bytes(memoryview(one)) for one in made) == blocks.area.tobytes()


async def test_mistakes_of_the_caller_are_named(store: AnyStore) -> None:
    blocks = RandomBlocks(3, block_bytes=2048, seed=4)
    ns, keys = blocks.namespace, blocks.keys
    good = blocks.empty_target().blocks
    strided = memoryview(bytes(4096))[::2]
    wrong: Any = [object(), *good[1:]]
    no_namespace: Any = "ns"
    no_key: Any = "key"
    mistakes = [
        (store.fetch(ns, keys, good[:2]), "given 2 buffers, expected 3"),
        (store.fetch(ns, [b"short", *keys[1:]], good), r"keys\[0\]: given 5 bytes, expected 32"),
        (store.fetch(ns, keys, [bytearray(7), *good[1:]]), r"buffers\[0\]: given 7 bytes"),
        (store.fetch(ns, keys, [bytes(2048), *good[1:]]), "writable"),
        (store.fetch(ns, keys, [strided, *good[1:]]), "contiguous"),
        (store.fetch(ns, keys, [good[0], good[0], good[1]]), "which share memory"),
        (store.fetch(ns, keys, wrong), "buffers"),
        (store.fetch(ns, keys, good, first_block=-1), "first_block: given -1"),
        (store.fetch(ns, keys, good, deadline_s=0), "deadline_s: given 0"),
        (store.fetch(ns, keys, good, deadline_s=float("nan")), "deadline_s: given nan"),
        (store.save(ns, keys, good, ttl_class="Long Class"), "ttl_class: given 'Long Class'"),
        (store.save(ns, keys, good, first_block=1), "expected 2, one for each of 3 keys from"),
        (store.forget(ns, keys, first_block=4), "first_block: given 4"),
        (store.match(no_namespace, keys), "namespace: given str"),
        (store.match(ns, [no_key]), r"keys\[0\]: given str, expected 32 bytes"),
        (store.match(ns, [keys[0], keys[1][:5]]), r"keys\[1\]: given 5 bytes"),
        (store.match(ns, keys, deadline_s=-1), "deadline_s: given -1"),
        (store.node_reports(deadline_s=float("inf")), "deadline_s: given inf"),
    ]
    for operation, message in mistakes:
        with pytest.raises(InvalidArgument, match=message):
            await operation


async def test_a_closed_client_says_so(kind: str, cluster_path: str, socket_path: str) -> None:
    blocks = RandomBlocks(1, block_bytes=2048, seed=4)
    async with open_store(kind, cluster_path, socket_path) as store:
        pass
    buffers = blocks.empty_target().blocks
    operations = {
        "match": store.match(blocks.namespace, blocks.keys),
        "fetch": store.fetch(blocks.namespace, blocks.keys, buffers),
        "save": store.save(blocks.namespace, blocks.keys, buffers),
        "forget": store.forget(blocks.namespace, blocks.keys),
        "node_reports": store.node_reports(),
    }
    for name, operation in operations.items():
        with pytest.raises(ClientClosed, match=f"{name}: the client is closed"):
            await operation


async def test_empty_chains_are_answered_at_once(store: AnyStore) -> None:
    namespace = RandomBlocks(1, block_bytes=2048, seed=4).namespace
    assert await store.match(namespace, []) == 0
    assert (await store.fetch(namespace, [], [])).ended is FetchEnd.COMPLETE
    assert (await store.save(namespace, [], [])).stored == 0
    assert await store.forget(namespace, []) == 0


async def test_fetch_whose_time_is_up_returns_what_it_has(
    store: AnyStore, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 128, LAYOUTS["V4.1-Flash"])
    await store.save(blocks.namespace, blocks.keys, blocks.sources)
    for deadline_s in (1e-6, 0.001, 0.004, 0.01):
        target = blocks.empty_target()
        result = await store.fetch(
            blocks.namespace, blocks.keys, target.blocks, deadline_s=deadline_s
        )
        assert (result.ended is FetchEnd.COMPLETE) == (result.blocks == 128)
        bytes_there = result.blocks * blocks.block_bytes
        assert np.array_equal(target.area[:bytes_there], blocks.area[:bytes_there])


async def test_nodes_and_map_are_those_of_the_cluster(store: AnyStore, cluster_path: str) -> None:
    cluster_map = load_cluster_map(cluster_path)
    assert store.map == cluster_map
    reports = await store.node_reports()
    assert [one.node for one in reports] == [one.name for one in cluster_map.nodes]
    assert all(one.is_alive and one.statistics["targets"] for one in reports)


async def test_client_has_done_nothing_when_it_was_just_opened(store: AnyStore) -> None:
    counters = store.counters
    assert (counters.blocks_saved, counters.blocks_fetched, counters.blocks_decoded) == (0, 0, 0)
