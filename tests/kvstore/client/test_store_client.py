"""The public surface: match, fetch, save, forget against real nodes."""

import asyncio
import mmap
import os
import threading
import zlib
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingStoreClient, FetchEnd, StoreClient
from kvstore.errors import ClientClosed, InvalidArgument, InvalidClusterMap, MissingClusterMap
from tests.kvstore.blocks import RandomBlocks

V41_BLOCK_BYTES = 113_920


def blocks_for(request: pytest.FixtureRequest, count: int, block_bytes: int) -> RandomBlocks:
    """Blocks that no other test has."""
    seed = zlib.crc32(request.node.nodeid.encode())
    return RandomBlocks(
        count, block_bytes=block_bytes, seed=seed, tenant=f"{os.getpid()}-{request.node.name}"
    )


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("block_bytes", [1024, 12_345, V41_BLOCK_BYTES])
async def test_what_was_saved_is_matched_and_fetched_to_the_bit(
    cluster_path: str, request: pytest.FixtureRequest, count: int, block_bytes: int
) -> None:
    blocks = blocks_for(request, count, block_bytes)
    async with StoreClient.connect(cluster_path) as store:
        assert await store.match(blocks.namespace, blocks.keys) == 0
        saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert (saved.stored, saved.known, saved.failed) == (count, 0, 0)
        assert await store.match(blocks.namespace, blocks.keys) == count
        target = blocks.empty_target()
        fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert (fetched.blocks, fetched.ended) == (count, FetchEnd.COMPLETE)
        assert fetched.rejected_shards == 0
        assert np.array_equal(target.area, blocks.area)


async def test_large_blocks_cross_the_wire_in_several_frames(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 5, 2_949_120)
    async with StoreClient.connect(cluster_path) as store:
        assert (await store.save(blocks.namespace, blocks.keys, blocks.sources)).stored == 5
        target = blocks.empty_target()
        assert (await store.fetch(blocks.namespace, blocks.keys, target.blocks)).blocks == 5
        assert np.array_equal(target.area, blocks.area)
        assert await store.forget(blocks.namespace, blocks.keys) == 5


async def test_a_range_in_the_middle_of_a_chain_is_saved_and_fetched_by_its_first_block(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 100, 1024)
    async with StoreClient.connect(cluster_path) as store:
        saved = await store.save(blocks.namespace, blocks.keys, blocks.sources[30:], first_block=30)
        assert saved.stored == 70
        assert await store.match(blocks.namespace, blocks.keys) == 0
        target = blocks.empty_target()
        fetched = await store.fetch(
            blocks.namespace, blocks.keys, target.blocks[50:], first_block=50
        )
        assert fetched.blocks == 50
        assert np.array_equal(target.area[50 * 1024 :], blocks.area[50 * 1024 :])
        assert not target.area[: 50 * 1024].any()


@pytest.mark.usefixtures("patient_inquiry")
async def test_known_blocks_are_not_sent_again(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 80, 1024)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys[:50], blocks.sources[:50])
        again = await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert (again.stored, again.known, again.failed) == (30, 50, 0)


async def test_a_missing_block_ends_the_run_and_is_no_error(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 90, 1024)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys[:40], blocks.sources[:40])
        await store.save(blocks.namespace, blocks.keys, blocks.sources[41:], first_block=41)
        assert await store.match(blocks.namespace, blocks.keys) == 40
        target = blocks.empty_target()
        fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert (fetched.blocks, fetched.ended) == (40, FetchEnd.TOO_FEW_SHARDS)
        assert np.array_equal(target.area[: 40 * 1024], blocks.area[: 40 * 1024])


async def test_forgotten_blocks_are_gone(cluster_path: str, request: pytest.FixtureRequest) -> None:
    blocks = blocks_for(request, 10, 1024)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        assert await store.forget(blocks.namespace, blocks.keys, first_block=4) == 6
        assert await store.match(blocks.namespace, blocks.keys) == 4


async def test_tenants_do_not_see_each_others_blocks(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    mine = RandomBlocks(3, block_bytes=1024, seed=5, tenant=f"a{os.getpid()}")
    theirs = RandomBlocks(3, block_bytes=1024, seed=5, tenant=f"b{os.getpid()}")
    async with StoreClient.connect(cluster_path) as store:
        await store.save(mine.namespace, mine.keys, mine.sources)
        assert await store.match(mine.namespace, mine.keys) == 3
        assert await store.match(theirs.namespace, theirs.keys) == 0


async def test_racing_writers_of_one_key_end_with_one_good_block(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    first = blocks_for(request, 64, 12_345)
    rng = np.random.default_rng(1)
    versions = [first.area]
    versions += [rng.integers(0, 256, len(first.area), dtype=np.uint8) for _ in range(3)]

    async def write(area: np.ndarray) -> None:
        sources = [area.data[i : i + 12_345] for i in range(0, len(area), 12_345)]
        async with StoreClient.connect(cluster_path) as store:
            await store.save(first.namespace, first.keys, sources)

    await asyncio.gather(*map(write, versions))
    await asyncio.sleep(0.3)
    async with StoreClient.connect(cluster_path) as store:
        target = first.empty_target()
        fetched = await store.fetch(first.namespace, first.keys, target.blocks)
        assert fetched.blocks == 64
        for at in range(0, len(target.area), 12_345):
            block = target.area[at : at + 12_345]
            assert any(np.array_equal(block, area[at : at + 12_345]) for area in versions)


async def test_concurrent_fetches_of_one_client_do_not_disturb_each_other(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 66, 12_345)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        targets = [blocks.empty_target() for _ in range(8)]
        results = await asyncio.gather(
            *(store.fetch(blocks.namespace, blocks.keys, one.blocks) for one in targets)
        )
        assert [one.blocks for one in results] == [66] * 8
        assert all(np.array_equal(one.area, blocks.area) for one in targets)


async def test_a_cancelled_fetch_writes_nothing_more(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 128, V41_BLOCK_BYTES)
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
        for delay_s in (0.0, 0.001, 0.003, 0.006):
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
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 64, V41_BLOCK_BYTES)
    scribbled = blocks.area.copy()
    sources = [
        scribbled.data[i : i + V41_BLOCK_BYTES] for i in range(0, len(scribbled), V41_BLOCK_BYTES)
    ]
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, sources)
        scribbled[:] = 0
        await asyncio.sleep(0.3)
        target = blocks.empty_target()
        result = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
        assert (result.blocks, result.rejected_shards) == (64, 0)
        assert np.array_equal(target.area, blocks.area)


@pytest.mark.parametrize("kind", ["bytearray", "float32 array", "mmap"])
async def test_any_writable_buffer_will_do(
    cluster_path: str, request: pytest.FixtureRequest, kind: str
) -> None:
    def make() -> Any:  # noqa: ANN401 (whatever has the buffer protocol)
        if kind == "bytearray":
            return bytearray(2048)
        return np.zeros(512, np.float32) if kind == "float32 array" else mmap.mmap(-1, 2048)

    blocks = blocks_for(request, 2, 2048)
    made = [make(), make()]
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, [bytes(one) for one in blocks.sources])
        assert (await store.fetch(blocks.namespace, blocks.keys, made)).blocks == 2
        assert b"".join(bytes(memoryview(one)) for one in made) == blocks.area.tobytes()


@pytest.fixture
def shared_memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=2 * 3 * 2048)
    yield memory
    memory.close()
    memory.unlink()


async def test_memory_that_processes_share_is_saved_from_and_fetched_into(
    cluster_path: str, request: pytest.FixtureRequest, shared_memory: SharedMemory
) -> None:
    blocks = blocks_for(request, 3, 2048)
    assert shared_memory.buf is not None
    views = [shared_memory.buf[at : at + 2048] for at in range(0, 2 * 3 * 2048, 2048)]
    try:
        for view, source in zip(views[:3], blocks.sources, strict=True):
            view[:] = source
        async with StoreClient.connect(cluster_path) as store:
            saved = await store.save(blocks.namespace, blocks.keys, views[:3])
            assert (saved.stored, saved.failed) == (3, 0)
            assert (await store.fetch(blocks.namespace, blocks.keys, views[3:])).blocks == 3
        assert b"".join(views[3:]) == blocks.area.tobytes()
    finally:
        for view in views:
            view.release()


@pytest.mark.parametrize(("k", "m", "nodes"), [(1, 0, 1), (1, 0, 3), (4, 2, 6), (4, 2, 7)])
async def test_other_codes_save_and_fetch_to_the_bit(
    tmp_path: Path, request: pytest.FixtureRequest, k: int, m: int, nodes: int
) -> None:
    blocks = blocks_for(request, 130, 12_345)
    with LocalCluster.start(
        tmp_path / "c", nodes=nodes, k=k, m=m, target_size_bytes=64 << 20
    ) as cluster:
        async with StoreClient.connect(cluster.cluster_path) as store:
            saved = await store.save(blocks.namespace, blocks.keys, blocks.sources)
            assert (saved.stored, saved.known, saved.failed) == (130, 0, 0)
        # Another client, which knows of nothing that was saved; and as many nodes less as it may.
        for node in cluster.node_names[:m]:
            cluster.kill(node)
        async with StoreClient.connect(cluster.cluster_path) as store:
            assert await store.match(blocks.namespace, blocks.keys) == 130
            target = blocks.empty_target()
            fetched = await store.fetch(blocks.namespace, blocks.keys, target.blocks)
            assert (fetched.blocks, fetched.ended) == (130, FetchEnd.COMPLETE)
            assert np.array_equal(target.area, blocks.area)


async def test_mistakes_of_the_caller_are_named(cluster_path: str) -> None:
    blocks = RandomBlocks(3, block_bytes=2048, seed=4)
    ns, keys = blocks.namespace, blocks.keys
    good = blocks.empty_target().blocks
    async with StoreClient.connect(cluster_path) as store:
        mistakes = [
            (store.fetch(ns, keys, good[:2]), "given 2 buffers, expected 3"),
            (store.fetch(ns, [b"short", *keys[1:]], good), r"keys\[0\]: given 5 bytes"),
            (store.fetch(ns, keys, [bytearray(7), *good[1:]]), r"buffers\[0\]: given 7 bytes"),
            (store.fetch(ns, keys, [bytes(2048), *good[1:]]), "writable"),
            (store.fetch(ns, keys, [memoryview(bytes(4096))[::2], *good[1:]]), "contiguous"),
            (store.fetch(ns, keys, [object(), *good[1:]]), "buffers"),  # type: ignore[list-item]
            (store.fetch(ns, keys, good, first_block=-1), "first_block: given -1"),
            (store.fetch(ns, keys, good, deadline_s=0), "deadline_s: given 0"),
            (store.fetch(ns, keys, good, deadline_s=float("nan")), "deadline_s: given nan"),
            (store.save(ns, keys, good, ttl_class="Long Class"), "ttl_class: given 'Long Class'"),
            (store.match("ns", keys), "namespace: given str"),  # type: ignore[arg-type]
        ]
        for operation, message in mistakes:
            with pytest.raises(InvalidArgument, match=message):
                await operation


async def test_a_closed_client_says_so(cluster_path: str) -> None:
    blocks = RandomBlocks(1, block_bytes=2048, seed=4)
    async with StoreClient.connect(cluster_path) as store:
        pass
    with pytest.raises(ClientClosed, match="match: the client is closed"):
        await store.match(blocks.namespace, blocks.keys)


async def test_a_client_that_ends_has_written_to_every_node(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_for(request, 20, 123_450)

    async def count_shards() -> int:
        async with StoreClient.connect(cluster_path) as store:
            reports = await store.node_reports()
        return sum(one["blocks"] for node in reports for one in node.statistics["targets"])

    before = await count_shards()
    async with StoreClient.connect(cluster_path) as store:
        await store.save(blocks.namespace, blocks.keys, blocks.sources)
    assert await count_shards() == before + 20 * 12


async def test_a_missing_and_a_broken_map_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingClusterMap, match="no cluster map at"):
        async with StoreClient.connect(tmp_path / "none.toml"):
            pass
    (tmp_path / "bad.toml").write_text("format = 99\n")
    with pytest.raises(InvalidClusterMap, match=r"mistake"):
        async with StoreClient.connect(tmp_path / "bad.toml"):
            pass


async def test_empty_chains_are_answered_at_once(cluster_path: str) -> None:
    namespace = RandomBlocks(1, block_bytes=2048, seed=4).namespace
    async with StoreClient.connect(cluster_path) as store:
        assert await store.match(namespace, []) == 0
        assert (await store.fetch(namespace, [], [])).ended is FetchEnd.COMPLETE
        assert (await store.save(namespace, [], [])).stored == 0


class TestBlockingClient:
    """The same, for code without an event loop."""

    def test_saves_matches_and_fetches(
        self, cluster_path: str, request: pytest.FixtureRequest
    ) -> None:
        blocks = blocks_for(request, 70, 12_345)
        with StoreClient.open(cluster_path) as store:
            assert store.save(blocks.namespace, blocks.keys, blocks.sources).stored == 70
            assert store.match(blocks.namespace, blocks.keys) == 70
            target = blocks.empty_target()
            assert store.fetch(blocks.namespace, blocks.keys, target.blocks).blocks == 70
            assert np.array_equal(target.area, blocks.area)
            assert store.forget(blocks.namespace, blocks.keys) == 70

    def test_serves_many_threads_at_once(
        self, cluster_path: str, request: pytest.FixtureRequest
    ) -> None:
        blocks = blocks_for(request, 20, 12_345)
        wrong: list[str] = []

        def work(store: BlockingStoreClient) -> None:
            for _ in range(5):
                target = blocks.empty_target()
                result = store.fetch(blocks.namespace, blocks.keys, target.blocks)
                if result.blocks != 20 or not np.array_equal(target.area, blocks.area):
                    wrong.append(str(result))

        with StoreClient.open(cluster_path) as store:
            store.save(blocks.namespace, blocks.keys, blocks.sources)
            threads = [threading.Thread(target=work, args=(store,)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong

    def test_leaves_no_thread_and_says_when_it_is_closed(self, cluster_path: str) -> None:
        namespace = RandomBlocks(1, block_bytes=2048, seed=4).namespace
        threads = threading.active_count()
        store = StoreClient.open(cluster_path)
        assert store.match(namespace, [bytes(32)]) == 0
        store.close()
        store.close()
        assert threading.active_count() == threads
        with pytest.raises(ClientClosed):
            store.match(namespace, [])
