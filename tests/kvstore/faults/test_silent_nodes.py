"""Nodes that stand still: no operation waits longer for them than it says, and none keeps hold of
the caller's memory."""

import asyncio
import mmap
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import batch_save, saving
from kvstore.client.store_client import StoreClient
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults.lost_nodes import (
    client_of,
    count_descriptors,
    nodes_by_shard,
    resident_bytes,
    stopped,
)
from tests.patience import OPERATION_S, PATIENCE_S, WELL_BEFORE_S


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("twelve")
    with LocalCluster.start(
        folder / "c", nodes=12, k=10, m=2, target_size_bytes=128 << 20
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("six")
    with LocalCluster.start(folder / "c", nodes=6, k=4, m=2, target_size_bytes=128 << 20) as it:
        yield it


async def save_all(store: StoreClient, blocks: RandomBlocks) -> None:
    result = await store.save(blocks.namespace, blocks.keys, blocks.sources)
    assert result.stored == len(blocks.keys)
    await store.finish_writes(deadline_s=PATIENCE_S)


class TestTime:
    """Each operation has its own bound."""

    async def test_a_save_ends_at_its_deadline_in_bounded_memory_when_all_nodes_stand_still(
        self, twelve: LocalCluster
    ) -> None:
        blocks = RandomBlocks(640, block_bytes=113_920, seed=31)
        with stopped(twelve, twelve.node_names):
            async with client_of(twelve.map) as store:
                before_bytes = resident_bytes()
                for _ in range(6):
                    async with asyncio.timeout(WELL_BEFORE_S):
                        result = await store.save(
                            blocks.namespace, blocks.keys, blocks.sources, deadline_s=0.5
                        )
                    assert (result.stored, result.failed) == (0, 640)
                # Two batches of 8 MiB and a fifth are kept for each of the first two saves.
                grown_bytes = resident_bytes() - before_bytes
                assert grown_bytes < 80 << 20, f"{grown_bytes >> 20} MiB for 6 x 70 MiB"

    async def test_client_that_stood_still_itself_calls_no_node_silent(
        self, twelve: LocalCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, batches = batch_save.BatchSave.run, []

        async def run_after_a_stall(batch: batch_save.BatchSave, deadline_s: float) -> object:
            batches.append(batch)
            if len(batches) == 3:
                # The batch before was sent just now: what the nodes answer lies in the sockets.
                time.sleep(batch_save.SILENT_S * 1.2)
            return await run(batch, deadline_s)

        monkeypatch.setattr(batch_save.BatchSave, "run", run_after_a_stall)
        async with client_of(twelve.map) as store:
            await save_all(store, RandomBlocks(1, block_bytes=113_920, seed=341))
            await save_all(store, RandomBlocks(200, block_bytes=113_920, seed=342))
        assert len(batches) >= 3

    @pytest.mark.parametrize("shard", [0, 6, 11])
    async def test_one_node_that_stands_still_costs_no_block_and_is_not_waited_for(
        self, twelve: LocalCluster, shard: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The others may take their time.
        monkeypatch.setattr(batch_save, "STRAGGLER_WAIT_S", PATIENCE_S)
        monkeypatch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)
        blocks = RandomBlocks(100, block_bytes=12_345, seed=320 + shard)
        silent = nodes_by_shard(twelve.map, blocks.keys)[shard]
        with stopped(twelve, [silent]):
            async with client_of(twelve.map) as store:
                async with asyncio.timeout(WELL_BEFORE_S):
                    assert await store.match(blocks.namespace, blocks.keys) == 0
                    saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
                assert (saved.stored, saved.degraded, saved.failed) == (100, 0, 0)
                async with asyncio.timeout(WELL_BEFORE_S):
                    again = await store.save(blocks.namespace, blocks.keys, blocks.sources)
                assert (again.known, again.stored, again.failed) == (100, 0, 0)

    @pytest.mark.slow
    async def test_two_nodes_that_stand_still_are_waited_for_once_and_not_for_each_batch(
        self, twelve: LocalCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """640 blocks are ten batches; four seconds for each pair would be 20 s."""
        monkeypatch.setattr(batch_save, "STRAGGLER_WAIT_S", 4.0)
        monkeypatch.setattr(batch_save, "SILENT_S", PATIENCE_S)
        blocks = RandomBlocks(640, block_bytes=12_345, seed=33)
        with stopped(twelve, ["n03", "n08"]):
            async with client_of(twelve.map) as store:
                async with asyncio.timeout(WELL_BEFORE_S):
                    saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
                assert (saved.stored, saved.degraded, saved.failed) == (640, 640, 0)

    async def test_a_block_that_can_never_have_k_shards_does_not_wait_for_a_silent_node(
        self, six: LocalCluster
    ) -> None:
        blocks = RandomBlocks(64, block_bytes=12_345, seed=34)
        async with client_of(six.map) as store:
            await store.save(blocks.namespace, blocks.keys[:60], blocks.sources[:60])
            await store.finish_writes(deadline_s=PATIENCE_S)
        for silent in nodes_by_shard(six.map, blocks.keys)[::2]:
            with stopped(six, [silent]):
                async with client_of(six.map) as store:
                    target = blocks.empty_target()
                    async with asyncio.timeout(WELL_BEFORE_S):
                        result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
                    assert result.blocks == 60
                    delivered = 60 * blocks.block_bytes
                    assert np.array_equal(target.area[:delivered], blocks.area[:delivered])


class TestMemory:
    """The caller's buffers are free as soon as an operation returns, whoever is silent."""

    @pytest.mark.parametrize("silent_count", [1, 2, 3])
    async def test_bytearrays_can_be_resized_after_a_fetch(
        self, six: LocalCluster, silent_count: int
    ) -> None:
        blocks = RandomBlocks(64, block_bytes=12_345, seed=35)
        async with client_of(six.map) as store:
            await store.save(blocks.namespace, blocks.keys, blocks.sources)
            await store.finish_writes(deadline_s=PATIENCE_S)
            buffers = [bytearray(blocks.block_bytes) for _ in blocks.keys]
            with stopped(six, six.node_names[:silent_count]):
                deadline_s = OPERATION_S if silent_count <= 2 else 0.3
                result = await store.fetch(
                    blocks.namespace, blocks.keys, buffers, deadline_s=deadline_s
                )
                assert result.blocks == (64 if silent_count <= 2 else 0)
                for buffer in buffers:
                    buffer.clear()  # raises BufferError if anything still points into it
            await asyncio.sleep(0.05)
            assert not any(buffers)

    @pytest.mark.parametrize("silent_count", [1, 6])
    async def test_bytearrays_can_be_resized_after_a_save(
        self, six: LocalCluster, silent_count: int
    ) -> None:
        blocks = RandomBlocks(64, block_bytes=113_920, seed=360 + silent_count)
        async with client_of(six.map) as store:
            buffers = [bytearray(source) for source in blocks.sources]
            with stopped(six, six.node_names[:silent_count]):
                deadline_s = OPERATION_S if silent_count == 1 else 0.6
                result = await store.save(
                    blocks.namespace, blocks.keys, buffers, deadline_s=deadline_s
                )
                assert result.stored == (64 if silent_count == 1 else 0)
                for buffer in buffers:
                    buffer.clear()
            await store.finish_writes(deadline_s=PATIENCE_S)
            target = blocks.empty_target()
            fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
            assert (fetched.blocks, fetched.rejected_shards) == (64, 0)
            assert np.array_equal(target.area, blocks.area), "a copy was sent, not what came later"

    async def test_mapped_and_shared_memory_can_be_closed(self, six: LocalCluster) -> None:
        blocks = RandomBlocks(8, block_bytes=12_345, seed=37)
        size_bytes = len(blocks.area)
        async with client_of(six.map) as store:
            await save_all(store, blocks)
            mapped = mmap.mmap(-1, size_bytes)
            shared = SharedMemory(create=True, size=size_bytes)
            try:
                assert shared.buf is not None
                with stopped(six, six.node_names[:3]):
                    for memory in (memoryview(mapped), shared.buf[:size_bytes]):
                        starts = range(0, size_bytes, blocks.block_bytes)
                        places = [memory[at : at + blocks.block_bytes] for at in starts]
                        await store.fetch(blocks.namespace, blocks.keys, places, deadline_s=0.2)
                        for place in (*places, memory):
                            place.release()
                    mapped.close()
            finally:
                shared.close()
                shared.unlink()


class TestConnections:
    """What is left behind when a client ends while nodes stand still."""

    async def test_a_client_that_is_cancelled_while_it_finishes_writes_leaks_no_descriptor(
        self, six: LocalCluster
    ) -> None:
        blocks = RandomBlocks(64, block_bytes=12_345, seed=38)
        is_saved = asyncio.Event()

        async def save_and_leave() -> None:
            async with StoreClient.connect(six.cluster_path) as store:
                await store.save(blocks.namespace, blocks.keys, blocks.sources)
                is_saved.set()

        descriptors = count_descriptors()
        with stopped(six, six.node_names[:1]):
            leaving = asyncio.create_task(save_and_leave())
            await is_saved.wait()
            await asyncio.sleep(0.05)
            assert not leaving.done(), "it waits for the node that stands still"
            assert count_descriptors() > descriptors
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert count_descriptors() == descriptors
            assert len(asyncio.all_tasks()) == 1
