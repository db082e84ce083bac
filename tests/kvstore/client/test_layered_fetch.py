"""Fetching in layer order from healthy nodes: the first sections of all blocks first, every byte
right when it is called ready, and the same bytes in the end as in block order."""

import asyncio
import itertools

import pytest

from kvstore.client import FetchEnd, StoreClient, layered_fetch
from kvstore.client.layered_plan import find_section_shards
from kvstore.layout import BlockLayout
from tests.kvstore.layered_runs import (
    PLACE,
    SMALL_FLASH,
    StoredChain,
    WatchedRun,
    stays_as_it_is,
)
from tests.kvstore.runs import ODD, SMOLLM2, V41_FLASH, PlainRun, layout_of
from tests.patience import OPERATION_S, PATIENCE_S

RAGGED = layout_of(513, 1, 511, 3000, 8320)
"""12,345 bytes: the last shard reaches over the end, and sections end anywhere."""
PADDED = layout_of(500, 560)
"""Of ten shards one is padding only."""
COUNTS = {V41_FLASH: 130, SMOLLM2: 7, ODD: 130, RAGGED: 200, PADDED: 70, layout_of(14_080): 70}


@pytest.fixture(autouse=True)
def no_node_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """These nodes are healthy, and the machine may be busy."""
    monkeypatch.setattr(layered_fetch, "HEDGE_MIN_S", PATIENCE_S)
    monkeypatch.setattr(layered_fetch, "HEDGE_MAX_S", PATIENCE_S)


@pytest.fixture(
    scope="module",
    params=COUNTS,
    ids=["v41_flash", "smollm2", "odd", "ragged", "padded", "one_section"],
)
def chain(cluster_path: str, request: pytest.FixtureRequest) -> StoredChain:
    layout: BlockLayout = request.param
    return StoredChain(cluster_path, layout, count=COUNTS[layout], tenant="layered", seed=51)


@pytest.fixture(scope="module")
def long_chain(cluster_path: str) -> StoredChain:
    """Twenty spans of small blocks."""
    return StoredChain(cluster_path, SMALL_FLASH, count=1280, tenant="layered-long", seed=52)


async def test_every_layout_arrives_as_in_block_order(chain: StoredChain) -> None:
    blocks, in_order = chain.blocks, PlainRun(chain.layout, chain.count + PLACE + 2)
    async with StoreClient.connect(chain.path) as store:
        run = WatchedRun(chain)
        result = await run.fetch(store)
        assert (result.blocks, result.ended) == (chain.count, FetchEnd.COMPLETE)
        assert (result.decoded_blocks, result.rejected_shards) == (0, 0)
        await store.fetch_run(
            blocks.namespace,
            blocks.keys,
            in_order.memory,
            first_block=0,
            place=PLACE,
            on_ready=lambda section, count: None,
            deadline_s=OPERATION_S,
        )
    assert run.area.tobytes() == in_order.area.tobytes()


async def test_a_section_of_all_blocks_is_ready_before_the_last_one_of_most(
    long_chain: StoredChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are small here: so that no more than a few reads are under way, as with large ones."""
    monkeypatch.setattr(layered_fetch, "BYTES_IN_FLIGHT_MAX", 8 * 64 * 1408)
    async with StoreClient.connect(long_chain.path) as store:
        run = WatchedRun(long_chain)
        assert (await run.fetch(store)).blocks == long_chain.count
    finished = [run.told.index((section, long_chain.count)) for section in range(4)]
    assert finished == sorted(finished)
    for section, end in enumerate(finished[:3]):
        so_far = run.told[:end]
        begun = max((blocks for s, blocks in so_far if s == 3), default=0)
        assert begun < long_chain.count / 2, section
    for section, following in itertools.pairwise(range(4)):
        at = run.told.index((section, long_chain.count))
        of_next = max((blocks for s, blocks in run.told[:at] if s == following), default=0)
        assert of_next < long_chain.count / 2, (section, following)


async def test_sections_are_told_block_by_block_and_not_only_at_their_end(
    long_chain: StoredChain,
) -> None:
    async with StoreClient.connect(long_chain.path) as store:
        run = WatchedRun(long_chain)
        await run.fetch(store)
    counts = [blocks for section, blocks in run.told if section == 0]
    assert len(counts) >= 4
    assert {blocks % 64 for blocks in counts} == {0}


async def test_the_end_of_a_chain_goes_to_the_place_that_was_named(chain: StoredChain) -> None:
    async with StoreClient.connect(chain.path) as store:
        for first in (1, chain.count // 2, chain.count - 1):
            run = WatchedRun(chain)
            result = await run.fetch(store, first_block=first)
            assert result.blocks == chain.count - first
        empty = WatchedRun(chain)
        result = await empty.fetch(store, first_block=chain.count)
        assert (result.blocks, result.ended, empty.told) == (0, FetchEnd.COMPLETE, [])


@pytest.mark.parametrize("missing", [0, 40, 64, 100])
async def test_a_missing_block_ends_the_run_and_is_no_error(
    cluster_path: str, request: pytest.FixtureRequest, missing: int
) -> None:
    chain = StoredChain(
        cluster_path, SMALL_FLASH, count=200, tenant=request.node.name, seed=60 + missing
    )
    async with StoreClient.connect(cluster_path) as store:
        blocks = chain.blocks
        await store.forget(blocks.namespace, blocks.keys[: missing + 1], first_block=missing)
        run = WatchedRun(chain)
        result = await run.fetch(store)
        assert (result.blocks, result.ended) == (missing, FetchEnd.TOO_FEW_SHARDS)
        await stays_as_it_is(run, for_s=0.05)


async def test_fetches_of_one_client_run_side_by_side(chain: StoredChain) -> None:
    async with StoreClient.connect(chain.path) as store:
        runs = [WatchedRun(chain) for _ in range(4)]
        results = await asyncio.gather(*(run.fetch(store) for run in runs))
        assert [result.blocks for result in results] == [chain.count] * 4
        assert store.counters.blocks_fetched == 4 * chain.count


async def test_nothing_is_written_after_a_fetch_was_cancelled(long_chain: StoredChain) -> None:
    async with StoreClient.connect(long_chain.path) as store:
        for delay_s in (0.0, 0.001, 0.003, 0.006, 0.012):
            run = WatchedRun(long_chain)
            fetch = asyncio.create_task(run.fetch(store))
            await asyncio.sleep(delay_s)
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
            told = len(run.told)
            await stays_as_it_is(run, for_s=0.03)
            run.check()
            assert len(run.told) == told
            assert len(asyncio.all_tasks()) == 1
        assert (await WatchedRun(long_chain).fetch(store)).blocks == long_chain.count


async def test_a_fetch_that_is_cancelled_when_its_first_section_is_ready_keeps_it(
    long_chain: StoredChain,
) -> None:
    async with StoreClient.connect(long_chain.path) as store:
        run = WatchedRun(long_chain, also=lambda section, blocks: void(fetch.cancel()))
        fetch = asyncio.create_task(run.fetch(store))
        await asyncio.wait([fetch])
        assert fetch.cancelled()
        assert run.ready[0] > 0
        await stays_as_it_is(run, for_s=0.03)
        run.check()


def void(_: object) -> None:
    """Drops a value."""


async def test_what_on_ready_raises_ends_the_fetch(long_chain: StoredChain) -> None:
    def refuse(section: int, blocks: int) -> None:
        if section == 1:
            raise ZeroDivisionError(f"{section} {blocks}")

    async with StoreClient.connect(long_chain.path) as store:
        run = WatchedRun(long_chain, also=refuse)
        with pytest.raises(ZeroDivisionError):
            await run.fetch(store)
        await stays_as_it_is(run, for_s=0.03)
        run.check()


async def test_heads_are_no_use_and_data_shards_are(chain: StoredChain) -> None:
    async with StoreClient.connect(chain.path) as store:

        async def shards_read() -> tuple[int, int]:
            reports = await store.node_reports()
            targets = [one for report in reports for one in report.statistics["targets"]]
            read = sum(target["shards_read"] for target in targets)
            return read, sum(target["heads_told"] for target in targets)

        read, told = await shards_read()
        await WatchedRun(chain).fetch(store)
        read, told = [b - a for a, b in zip((read, told), await shards_read(), strict=True)]
    first = len(find_section_shards(chain.layout, 10).first_shards)
    assert told == chain.count * (10 - first)
    assert chain.count * 9 <= read <= chain.count * 10
