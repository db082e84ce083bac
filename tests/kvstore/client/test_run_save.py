"""Saving out of a run of the arena: the same shards as out of buffers, and nothing held after."""

import asyncio
import itertools
import os

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import FetchEnd, SaveResult, StoreClient, batch_save
from kvstore.client.router import Lane
from kvstore.client.shards import read_shards
from kvstore.cluster.map import load_cluster_map
from kvstore.layout import BlockLayout, shard_bytes
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults.lost_nodes import client_of, nodes_by_shard, without_nodes
from tests.kvstore.runs import ODD, RAGGED, SMOLLM2, V41_FLASH, PlainRun, blocks_of
from tests.patience import OPERATION_S, PATIENCE_S

PLACE = 2
LAYOUTS = [(V41_FLASH, 70), (SMOLLM2, 5), (ODD, 70), (RAGGED, 130)]


@pytest.fixture(params=["10+2", "4+2"])
def path(cluster_path: str, small_cluster: LocalCluster, request: pytest.FixtureRequest) -> str:
    return cluster_path if request.param == "10+2" else str(small_cluster.cluster_path)


def filled_run(blocks: RandomBlocks, first_block: int = 0) -> PlainRun:
    """A run that holds the blocks from `first_block` on at PLACE."""
    run = PlainRun(blocks.namespace.layout, len(blocks.keys) + PLACE + 1)
    run.put(PLACE, blocks.sources[first_block:])
    return run


def blocks_for(request: pytest.FixtureRequest, layout: BlockLayout, count: int) -> RandomBlocks:
    """Blocks that no other test has."""
    return blocks_of(layout, count, seed=count, tenant=f"{os.getpid()}-{request.node.name}")


async def save_run(
    store: StoreClient, blocks: RandomBlocks, run: PlainRun, *, first_block: int = 0
) -> SaveResult:
    return await store.save_run(
        blocks.namespace,
        blocks.keys,
        run.memory,
        first_block=first_block,
        place=PLACE,
        deadline_s=OPERATION_S,
    )


async def shards_of(store: StoreClient, blocks: RandomBlocks) -> list[bytes]:
    """What each node of the first span holds of its blocks, in shard order."""
    router = store._shared.router
    count, size = min(len(blocks.keys), 64), shard_bytes(blocks.block_bytes, router.code.k)
    found = []
    for channel in router.shard_channels(router.span_of(blocks.keys, 0), Lane.READ):
        area = np.zeros((count, size), np.uint8)
        answers = await read_shards(
            channel,
            blocks.keys[:count],
            into=[row.data for row in area],
            deadline_s=OPERATION_S,
            loop=asyncio.get_running_loop(),
        )
        assert answers.is_good.all()
        found.append(area.tobytes())
    return found


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
async def test_nodes_get_the_shards_that_they_get_out_of_buffers(
    path: str,
    request: pytest.FixtureRequest,
    layout: BlockLayout,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_save, "STRAGGLER_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(batch_save, "SILENT_S", PATIENCE_S)
    blocks = blocks_for(request, layout, count)
    run = filled_run(blocks)
    before = run.area.copy()
    async with StoreClient.connect(path) as store:
        saved = await save_run(store, blocks, run)
        assert (saved.stored, saved.known, saved.failed, saved.degraded) == (count, 0, 0, 0)
        await store.finish_writes(deadline_s=PATIENCE_S)
        assert np.array_equal(run.area, before), "a save changes nothing of the run"
        assert store.counters.blocks_saved == count
        out_of_run = await shards_of(store, blocks)
        await store.forget(blocks.namespace, blocks.keys)
        again = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert again.stored == count
        await store.finish_writes(deadline_s=PATIENCE_S)
        assert await shards_of(store, blocks) == out_of_run


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
async def test_what_was_saved_out_of_a_run_is_fetched_to_the_bit(
    path: str, request: pytest.FixtureRequest, layout: BlockLayout, count: int
) -> None:
    blocks = blocks_for(request, layout, count)
    async with StoreClient.connect(path) as store:
        assert (await save_run(store, blocks, filled_run(blocks))).stored == count
        target = blocks.empty_target()
        fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert (fetched.blocks, fetched.ended) == (count, FetchEnd.COMPLETE)
        assert np.array_equal(target.area, blocks.area)


@pytest.mark.parametrize("layout", [ODD, RAGGED], ids=["odd", "ragged"])
async def test_any_four_shards_of_six_are_enough_for_what_was_saved_out_of_a_run(
    small_cluster: LocalCluster,
    request: pytest.FixtureRequest,
    layout: BlockLayout,
    closed_port: int,
) -> None:
    cluster_map = load_cluster_map(small_cluster.cluster_path)
    blocks = blocks_for(request, layout, 12)
    async with StoreClient.connect(small_cluster.cluster_path) as store:
        assert (await save_run(store, blocks, filled_run(blocks))).stored == 12
    for lost in itertools.combinations(range(6), 2):
        async with client_of(without_nodes(cluster_map, set(lost), closed_port)) as store:
            target = blocks.empty_target()
            fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
            assert fetched.blocks == 12, lost
            assert np.array_equal(target.area, blocks.area), lost


async def test_the_end_of_a_chain_is_saved_from_the_place_that_was_named(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, RAGGED, 100)
    async with StoreClient.connect(cluster_path) as store:
        saved = await save_run(store, blocks, filled_run(blocks, 70), first_block=70)
        assert saved.stored == 30
        assert await store.match(blocks.namespace, blocks.keys) == 0
        target = blocks.empty_target()
        fetched = await store.fetch(
            blocks.namespace, blocks.keys, target.blocks[70:], first_block=70
        )
        assert fetched.blocks == 30
        assert np.array_equal(target.area[70 * 12_345 :], blocks.area[70 * 12_345 :])


@pytest.mark.usefixtures("patient_inquiry")
async def test_known_blocks_are_not_sent_again(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    """The holes of what is known lie in the middle of the run."""
    blocks = blocks_for(request, V41_FLASH, 40)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys[:10], blocks.sources[:10])
        await store.save(blocks.namespace, blocks.keys[:30], blocks.sources[20:30], first_block=20)
        again = await save_run(store, blocks, filled_run(blocks))
        assert (again.stored, again.known, again.failed) == (20, 20, 0)
        target = blocks.empty_target()
        assert (await store.fetch(blocks.namespace, blocks.keys, target.blocks)).blocks == 40
        assert np.array_equal(target.area, blocks.area)


async def test_blocks_saved_while_two_nodes_are_lost_are_degraded_and_can_be_read(
    cluster_path: str, request: pytest.FixtureRequest, closed_port: int
) -> None:
    blocks = blocks_for(request, V41_FLASH, 20)
    cluster_map = load_cluster_map(cluster_path)
    names = nodes_by_shard(cluster_map, blocks.keys)
    lost = {i for i, node in enumerate(cluster_map.nodes) if node.name in (names[0], names[5])}
    async with client_of(without_nodes(cluster_map, lost, closed_port)) as store:
        saved = await save_run(store, blocks, filled_run(blocks))
        assert (saved.stored, saved.degraded, saved.failed) == (20, 20, 0)
    async with StoreClient.connect(cluster_path) as store:
        target = blocks.empty_target()
        fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert (fetched.blocks, fetched.decoded_blocks) == (20, 20)
        assert np.array_equal(target.area, blocks.area)


@pytest.mark.parametrize("layout", [V41_FLASH, SMOLLM2], ids=["v41_flash", "smollm2"])
async def test_the_run_may_be_changed_as_soon_as_a_save_returns(
    cluster_path: str, request: pytest.FixtureRequest, layout: BlockLayout
) -> None:
    count = 64 if layout is V41_FLASH else 6
    blocks = blocks_for(request, layout, count)
    run = filled_run(blocks)
    async with StoreClient.connect(cluster_path) as store:
        assert (await save_run(store, blocks, run)).stored == count
        run.area[:] = 0
        await asyncio.sleep(0.3)
        target = blocks.empty_target()
        result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert (result.blocks, result.rejected_shards) == (count, 0)
        assert np.array_equal(target.area, blocks.area)


async def test_the_run_may_be_changed_as_soon_as_a_save_was_cancelled(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    """What was sent until then is what the run held; a block is stored right or not at all."""
    for number, delay_s in enumerate((0.0, 0.002, 0.005, 0.01, 0.02)):
        blocks = blocks_of(V41_FLASH, 64, seed=number, tenant=f"{os.getpid()}-cancelled")
        run = filled_run(blocks)
        async with StoreClient.connect(cluster_path) as store:
            save = asyncio.create_task(save_run(store, blocks, run))
            await asyncio.sleep(delay_s)
            save.cancel()
            await asyncio.gather(save, return_exceptions=True)
            run.area[:] = 0
            await store.finish_writes(deadline_s=PATIENCE_S)
            target = blocks.empty_target()
            result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
            size = result.blocks * blocks.block_bytes
            assert result.rejected_shards == 0
            assert np.array_equal(target.area[:size], blocks.area[:size])


async def test_a_run_without_a_block_to_save_is_answered_at_once(cluster_path: str) -> None:
    blocks = blocks_of(RAGGED, 3, seed=1, tenant="nothing")
    run = PlainRun(RAGGED, 1)
    async with StoreClient.connect(cluster_path) as store:
        saved = await store.save_run(
            blocks.namespace, blocks.keys, run.memory, first_block=3, deadline_s=1.0
        )
        assert (saved.stored, saved.known, saved.failed) == (0, 0, 0)
