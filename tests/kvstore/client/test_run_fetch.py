"""Fetching into a run of the arena: every byte where its section has it, and never a wrong one."""

import asyncio
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.arena.region import ArenaRegion
from kvstore.arena.run_layout import RunLayout
from kvstore.client import FetchEnd, StoreClient, batch_fetch
from kvstore.client.results import FetchResult
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import ClientClosed, InvalidArgument
from kvstore.layout import BlockLayout
from tests.kvstore.blocks import RandomBlocks, store_whole
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lost_nodes import client_of, nodes_by_shard, without_nodes
from tests.kvstore.faults.lying_proxy import Lie, lying_client
from tests.kvstore.runs import (
    FILL,
    ODD,
    RAGGED,
    SMOLLM2,
    V41_FLASH,
    PlainRun,
    blocks_of,
)
from tests.patience import OPERATION_S, PATIENCE_S

COUNTS = {V41_FLASH: 70, SMOLLM2: 5, ODD: 70, RAGGED: 130}
"""Blocks of each layout: more than a batch or more than a span."""
PLACE = 3
"""Where in the run they go: not at its beginning."""


class Stored:
    """Blocks that every node of a cluster has its shard of."""

    def __init__(
        self, path: str, layout: BlockLayout, *, count: int, tenant: str, seed: int = 31
    ) -> None:
        self.path = path
        self.map = load_cluster_map(path)
        self.layout = layout
        self.count = count
        self.blocks = blocks_of(layout, count, seed=seed, tenant=f"{tenant}-{os.getpid()}")
        store_whole(path, self.blocks)

    def empty_run(self) -> "CheckedRun":
        return CheckedRun(self)

    def lose(self, shards: set[int]) -> set[int]:
        """The places in the map of the nodes that hold these shards of the first span."""
        names = nodes_by_shard(self.map, self.blocks.keys)
        places = {node.name: index for index, node in enumerate(self.map.nodes)}
        return {places[names[shard]] for shard in shards}


class CheckedRun(PlainRun):
    """A run that looks, whenever it is told of a ready section, whether that is true."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored.layout, stored.count + PLACE + 2)
        self.stored = stored
        self.ready = [0] * len(stored.layout.sections)
        self.told: list[tuple[int, int]] = []
        self.first_block = 0

    async def fetch(
        self, store: StoreClient, *, first_block: int = 0, deadline_s: float = OPERATION_S
    ) -> FetchResult:
        blocks, self.first_block = self.stored.blocks, first_block
        result = await store.fetch_run(
            blocks.namespace,
            blocks.keys,
            self.memory,
            first_block=first_block,
            place=PLACE,
            on_ready=self.on_ready,
            deadline_s=deadline_s,
        )
        assert self.ready == [result.blocks] * len(self.ready)
        assert self.is_right(result.blocks)
        return result

    def on_ready(self, section: int, blocks: int) -> None:
        assert blocks > self.ready[section], "told only of more"
        begin = sum(one.bytes for one in self.layout.layout.sections[:section])
        size = self.layout.layout.sections[section].bytes
        for block in range(self.ready[section], blocks):
            truth = self.stored.blocks.sources[self.first_block + block][begin : begin + size]
            assert self.memory.part(section, PLACE + block) == truth, (section, block)
        self.ready[section] = blocks
        self.told.append((section, blocks))

    def is_right(self, count: int) -> bool:
        """Are the first `count` blocks those that were stored, and the neighbours untouched?"""
        sources = self.stored.blocks.sources[self.first_block :]
        are_equal = all(self.block(PLACE + b) == bytes(sources[b]) for b in range(count))
        return are_equal and self.untouched(PLACE, PLACE + len(sources))


LAYOUTS = [V41_FLASH, SMOLLM2, ODD, RAGGED]
LAYOUT_IDS = ["v41_flash", "smollm2", "odd", "ragged"]


@pytest.fixture(scope="module", params=LAYOUTS, ids=LAYOUT_IDS)
def stored(cluster_path: str, request: pytest.FixtureRequest) -> Stored:
    """Each layout under 10+2."""
    layout = request.param
    return Stored(cluster_path, layout, count=COUNTS[layout], tenant="run-fetch")


@pytest.fixture(scope="module", params=LAYOUTS, ids=LAYOUT_IDS)
def stored_small(small_cluster: LocalCluster, request: pytest.FixtureRequest) -> Stored:
    """Each layout under 4+2."""
    layout = request.param
    count = min(COUNTS[layout], 20)
    return Stored(str(small_cluster.cluster_path), layout, count=count, tenant="run-fetch")


@pytest.fixture
def no_node_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are asked for because of answers, and never because the machine is busy."""
    for name in ("HEDGE_MIN_S", "HEDGE_MAX_S", "LATE_MIN_S"):
        monkeypatch.setattr(batch_fetch, name, PATIENCE_S)


async def test_a_run_gets_the_bytes_that_buffers_get(stored: Stored) -> None:
    async with StoreClient.connect(stored.path) as store:
        target = stored.blocks.empty_target()
        in_buffers = await store.fetch(stored.blocks.namespace, stored.blocks.keys, target.blocks)
        run = stored.empty_run()
        result = await run.fetch(store)
        assert (result.blocks, result.ended) == (stored.count, FetchEnd.COMPLETE)
        assert (result.rejected_shards, in_buffers.blocks) == (0, stored.count)
        got = b"".join(run.block(PLACE + block) for block in range(stored.count))
        assert got == target.area.tobytes() == stored.blocks.area.tobytes()
        assert store.counters.blocks_fetched == 2 * stored.count


async def test_a_run_gets_the_bytes_under_another_code(stored_small: Stored) -> None:
    async with StoreClient.connect(stored_small.path) as store:
        result = await stored_small.empty_run().fetch(store)
        assert result.blocks == stored_small.count


async def test_blocks_are_told_of_batch_by_batch_and_in_order(stored: Stored) -> None:
    async with StoreClient.connect(stored.path) as store:
        run = stored.empty_run()
        await run.fetch(store)
    sections = len(stored.layout.sections)
    batches = [blocks for section, blocks in run.told if section == 0]
    assert run.told == [(s, blocks) for blocks in batches for s in range(sections)]
    assert len(batches) > 1
    assert batches[-1] == stored.count


async def test_the_end_of_a_chain_goes_to_the_place_that_was_named(stored: Stored) -> None:
    first = stored.count // 2
    async with StoreClient.connect(stored.path) as store:
        run = stored.empty_run()
        assert (await run.fetch(store, first_block=first)).blocks == stored.count - first
        empty = stored.empty_run()
        nothing = await empty.fetch(store, first_block=stored.count)
        assert (nothing.blocks, nothing.ended, empty.told) == (0, FetchEnd.COMPLETE, [])
        assert (empty.area == FILL).all()


@pytest.mark.usefixtures("no_node_is_late")
async def test_all_double_losses_under_4_2_read_back_to_the_bit(
    stored_small: Stored, closed_port: int
) -> None:
    for lost in itertools.combinations(range(6), 2):
        lossy = without_nodes(stored_small.map, stored_small.lose(set(lost)), closed_port)
        async with client_of(lossy) as store:
            result = await stored_small.empty_run().fetch(store)
            assert result.blocks == stored_small.count, lost
            is_data_lost = min(lost) < 4
            assert result.decoded_blocks == (stored_small.count if is_data_lost else 0), lost


async def test_double_losses_under_10_2_read_back_to_the_bit(
    stored: Stored, closed_port: int, rng: random.Random
) -> None:
    pairs = [(0, 9), (10, 11), *rng.sample(list(itertools.combinations(range(12), 2)), 6)]
    for lost in pairs:
        async with client_of(
            without_nodes(stored.map, stored.lose(set(lost)), closed_port)
        ) as store:
            assert (await stored.empty_run().fetch(store)).blocks == stored.count, lost


LIES = [
    lying_proxy.flips_a_byte_of_each_payload,
    lying_proxy.claims_another_shard,
    lying_proxy.stops_in_the_middle_of_a_payload,
    lying_proxy.closes_in_the_middle_of_a_payload,
    lying_proxy.takes_a_tenth_of_a_second,
    lying_proxy.refuses_as_busy,
    lying_proxy.says_that_everything_is_missing,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_every_block_arrives_when_two_nodes(stored: Stored, lie: Lie) -> None:
    liars = nodes_by_shard(stored.map, stored.blocks.keys)
    async with lying_client(stored.map, [liars[0], liars[7]]) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lie
        assert (await stored.empty_run().fetch(store)).blocks == stored.count


async def test_every_block_arrives_when_one_node_lies_consistently(stored_small: Stored) -> None:
    """Wrong bytes with checksums that fit them: only the block's own checksum tells, and the
    decoded shard replaces the lie in its pieces."""
    for liar in stored_small.map.nodes:
        async with lying_client(stored_small.map, [liar.name]) as (store, proxies):
            proxies[0].lie = lying_proxy.lies_consistently
            assert (await stored_small.empty_run().fetch(store)).blocks == stored_small.count


async def test_a_late_shard_does_not_touch_blocks_that_are_verified_already(
    stored: Stored,
) -> None:
    """Two nodes lag, so the first try has k shards and a lie among them: all blocks but one are
    whole. When the late shards come, only those of that block have a place still."""
    names = nodes_by_shard(stored.map, stored.blocks.keys)
    async with lying_client(stored.map, [names[0], names[7], names[8]]) as (store, proxies):
        proxies[0].lie = lying_proxy.lies_consistently_of_block(0)
        for proxy in proxies[1:]:
            proxy.lie = lying_proxy.takes_a_tenth_of_a_second
        run = stored.empty_run()
        result = await run.fetch(store)
        assert result.blocks == stored.count
        assert 1 <= result.rejected_shards <= stored.count


async def test_a_shard_that_was_given_up_and_asked_for_again_lands_in_its_pieces(
    stored: Stored,
) -> None:
    """Two nodes answer with other blocks, so the third, which lags, is needed after all."""
    names = nodes_by_shard(stored.map, stored.blocks.keys)
    async with lying_client(stored.map, [names[2], names[6], names[9]]) as (store, proxies):
        for proxy in proxies[:2]:
            proxy.reads_other_keys = True
        proxies[2].lie = lying_proxy.takes_a_tenth_of_a_second
        assert (await stored.empty_run().fetch(store)).blocks == stored.count


async def test_three_liars_cost_blocks_and_never_a_wrong_byte(stored: Stored) -> None:
    liars = nodes_by_shard(stored.map, stored.blocks.keys)
    async with lying_client(stored.map, [liars[1], liars[5], liars[8]]) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lying_proxy.lies_consistently
        run = stored.empty_run()
        assert (await run.fetch(store, deadline_s=0.5)).blocks < stored.count


@pytest.mark.usefixtures("no_node_is_late")
async def test_bytes_flipped_on_disk_are_decoded_anew(
    small_cluster: LocalCluster, request: pytest.FixtureRequest
) -> None:
    """A byte of two shards of every block, in the files of the nodes that hold them."""
    path = str(small_cluster.cluster_path)
    for seed, layout in ((32, ODD), (33, V41_FLASH)):
        # Seeds of their own: the files hold no other blocks with these bytes.
        stored = Stored(path, layout, count=10, tenant=request.node.name, seed=seed)
        size = -(-layout.block_bytes // 256) * 64
        starts = [
            bytes(source[shard * size : shard * size + 64])
            for block, source in enumerate(stored.blocks.sources)
            for shard in (block % 4, (block + 2) % 4)
        ]
        assert flip_bytes_behind(small_cluster.cluster_path.parent, starts) == len(starts)
        async with StoreClient.connect(path) as store:
            result = await stored.empty_run().fetch(store)
            assert (result.blocks, result.decoded_blocks) == (10, 10)
            assert result.rejected_shards == len(starts)


def flip_bytes_behind(folder: Path, starts: list[bytes]) -> int:
    """Flips the byte 17 bytes behind the beginning of each of these payloads in segment files,
    where they begin at multiples of 64; how many were found."""
    wanted = np.array([int.from_bytes(start[:8], "little") for start in starts], np.uint64)
    found = 0
    for file in sorted(folder.rglob("*.seg")):
        content = np.memmap(file, np.uint8, mode="r+")
        words = content[: len(content) // 64 * 64].view(np.uint64)[::8]
        for at in (np.flatnonzero(np.isin(words, wanted)) * 64).tolist():
            content[at + 17] ^= 0x40
            found += 1
        del content, words
    return found


async def test_a_missing_block_ends_the_run_and_is_no_error(
    cluster_path: str, request: pytest.FixtureRequest
) -> None:
    stored = Stored(cluster_path, RAGGED, count=90, tenant=request.node.name)
    async with StoreClient.connect(cluster_path) as store:
        await store.forget(stored.blocks.namespace, stored.blocks.keys[:41], first_block=40)
        run = stored.empty_run()
        result = await run.fetch(store)
        assert (result.blocks, result.ended) == (40, FetchEnd.TOO_FEW_SHARDS)


async def test_nothing_is_written_after_a_fetch_was_cancelled(stored: Stored) -> None:
    async with StoreClient.connect(stored.path) as store:
        for delay_s in (0.0, 0.001, 0.003, 0.006):
            run = stored.empty_run()
            fetch = asyncio.create_task(run.fetch(store))
            await asyncio.sleep(delay_s)
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
            before = run.area.copy()
            assert run.is_right(run.ready[0])
            await asyncio.sleep(0.03)
            assert np.array_equal(before, run.area)
        assert (await stored.empty_run().fetch(store)).blocks == stored.count


async def test_a_deadline_ends_the_run_and_nothing_is_written_after_it(stored: Stored) -> None:
    liars = nodes_by_shard(stored.map, stored.blocks.keys)[:3]
    async with lying_client(stored.map, liars) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lying_proxy.takes_a_second_for_each_answer
        run = stored.empty_run()
        result = await run.fetch(store, deadline_s=0.3)
        assert (result.blocks, result.ended) == (0, FetchEnd.DEADLINE)
        before = run.area.copy()
        await asyncio.sleep(1.0)
        assert np.array_equal(before, run.area)


async def test_runs_of_one_arena_are_filled_at_one_time(stored_small: Stored) -> None:
    """Several fetches of one client into neighbouring runs of shared memory."""
    layout = RunLayout(stored_small.layout, stored_small.count)
    blocks = stored_small.blocks
    descriptor = ArenaRegion.create(max(3 * layout.run_bytes, 1 << 20))
    with ArenaRegion(descriptor) as region:
        runs = [region.run(at * layout.run_bytes, layout) for at in range(3)]
        async with StoreClient.connect(stored_small.path) as store:
            results = await asyncio.gather(
                *(
                    store.fetch_run(
                        blocks.namespace,
                        blocks.keys,
                        run,
                        first_block=0,
                        on_ready=lambda section, count: None,
                        deadline_s=OPERATION_S,
                    )
                    for run in runs
                )
            )
        assert [one.blocks for one in results] == [stored_small.count] * 3
        for run in runs:
            for block, source in enumerate(blocks.sources):
                sections = range(len(layout.layout.sections))
                assert b"".join(run.part(s, block) for s in sections) == source
        del runs, run
    os.close(descriptor)


async def test_mistakes_of_the_caller_are_named(cluster_path: str) -> None:
    blocks = RandomBlocks(3, block_bytes=2048, seed=4)
    ns, keys = blocks.namespace, blocks.keys
    run = PlainRun(ns.layout, 4).memory
    other = PlainRun(V41_FLASH, 4).memory
    calls: list[tuple[object, dict[str, float], str]] = [
        (run, {"place": 2}, "place: given 2 for 3 blocks, expected room for them in a run of 4"),
        (run, {"place": -1}, "place: given -1"),
        (run, {"place": True}, "place: given True"),
        (run, {"first_block": 4}, "first_block: given 4"),
        (run, {"deadline_s": 0}, "deadline_s: given 0"),
        (other, {}, "run: given one of the layout"),
        (bytearray(9000), {}, "run: given bytearray"),
    ]
    async with StoreClient.connect(cluster_path) as store:
        for where, changes, message in calls:
            arguments = {"first_block": 0, "place": 0, "deadline_s": 1.0, **changes}
            with pytest.raises(InvalidArgument, match=message):
                await store.fetch_run(ns, keys, where, on_ready=print, **arguments)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match=message):
                await store.save_run(ns, keys, where, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ClientClosed, match="fetch_run: the client is closed"):
        await store.fetch_run(ns, keys, run, first_block=0, on_ready=print, deadline_s=1.0)
    with pytest.raises(ClientClosed, match="save_run: the client is closed"):
        await store.save_run(ns, keys, run, first_block=0, deadline_s=1.0)


async def test_a_fetch_into_a_run_is_noted_like_any_other(stored_small: Stored) -> None:
    async def noted_tokens() -> int:
        async with StoreClient.connect(stored_small.path) as store:
            reports = await store.node_reports()
        return sum(
            counts["hit_tokens"]
            for report in reports
            for counts in report.statistics["namespaces"].values()
        )

    before = await noted_tokens()
    async with StoreClient.connect(stored_small.path) as store:
        await stored_small.empty_run().fetch(store)
    assert await noted_tokens() == before + stored_small.count * 128
