"""Layer order when nodes are lost, slow or lie: parity replaces what is missing, and a section that
was called ready is right and stays so, whatever happens to the rest of its block."""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore.client import FetchEnd, StoreClient, layered_fetch
from kvstore.cluster.placement import SPAN_BLOCKS
from kvstore.layout import BlockLayout
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lost_nodes import (
    client_of,
    count_descriptors,
    nodes_by_shard,
    without_nodes,
)
from tests.kvstore.faults.lying_proxy import Lie, LyingProxy, lying_client
from tests.kvstore.layered_runs import (
    SMALL_FLASH,
    StoredChain,
    WatchedRun,
    stays_as_it_is,
)
from tests.kvstore.runs import ODD, layout_of
from tests.patience import OPERATION_S, PATIENCE_S, until

RAGGED = layout_of(513, 1, 511, 3000, 8320)
BLOCKS = 140
"""Three spans."""
SHARD_OF_SECTION = (1, 2, 5, 8)
"""A shard of each section of SMALL_FLASH."""
HEADS_LIES = [
    lying_proxy.lies_about_heads,
    lying_proxy.tells_another_version_in_heads,
    lying_proxy.denies_heads,
    lying_proxy.tells_fewer_heads,
    lying_proxy.never_tells_heads,
]
LIES = [
    *HEADS_LIES,
    lying_proxy.flips_a_byte_of_each_payload,
    lying_proxy.claims_another_shard,
    lying_proxy.flips_a_byte_of_each_body,
    lying_proxy.announces_a_shorter_payload,
    lying_proxy.announces_a_longer_payload,
    lying_proxy.never_stops_sending,
    lying_proxy.stops_in_the_middle_of_a_payload,
    lying_proxy.closes_in_the_middle_of_a_payload,
    lying_proxy.never_answers,
    lying_proxy.takes_a_tenth_of_a_second,
    lying_proxy.refuses_as_busy,
    lying_proxy.says_that_everything_is_missing,
]


@pytest.fixture(scope="module", params=[SMALL_FLASH, RAGGED], ids=["small_flash", "ragged"])
def chain(cluster_path: str, request: pytest.FixtureRequest) -> StoredChain:
    layout: BlockLayout = request.param
    return StoredChain(cluster_path, layout, count=BLOCKS, tenant="layered-faults", seed=71)


@pytest.fixture(scope="module")
def flash(cluster_path: str) -> StoredChain:
    return StoredChain(
        cluster_path, SMALL_FLASH, count=BLOCKS, tenant="layered-faults-flash", seed=72
    )


@pytest.fixture(params=["agent", "reader"])
def rebuild(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who rebuilds what is lost: what is delivered is the same."""
    monkeypatch.setattr(WatchedRun, "rebuild", request.param)


def give_up_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is given up as late after so long."""
    monkeypatch.setattr(layered_fetch, "HEDGE_MIN_S", seconds)
    monkeypatch.setattr(layered_fetch, "HEDGE_MAX_S", seconds)


def wait_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is given up as late: on a busy machine it may be before it has shown what it does."""
    give_up_after(PATIENCE_S, monkeypatch)


def holder_places(chain: StoredChain, shards: tuple[int, ...]) -> set[int]:
    """The places in the map of the nodes that hold these shards of the first span."""
    names = [node.name for node in chain.map.nodes]
    return {names.index(chain.holder(shard)) for shard in shards}


PAIRS = list(itertools.combinations(range(12), 2))


@pytest.mark.usefixtures("rebuild")
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(PAIRS[::4], id="a quarter of them"),
        pytest.param(PAIRS, id="all", marks=pytest.mark.torture),
    ],
)
async def test_every_pair_of_lost_nodes_costs_no_byte(
    flash: StoredChain, closed_port: int, pairs: list[tuple[int, int]]
) -> None:
    for lost in pairs:
        await fetch_without(flash, lost, closed_port)


@pytest.mark.usefixtures("rebuild")
@pytest.mark.parametrize("layout", [ODD, RAGGED], ids=["odd", "ragged"])
async def test_lost_nodes_cost_no_byte_where_shards_lie_in_pieces(
    cluster_path: str, layout: BlockLayout, closed_port: int, rng: random.Random
) -> None:
    chain = StoredChain(cluster_path, layout, count=70, tenant="layered-pieces", seed=73)
    for lost in rng.sample(PAIRS, 8):
        await fetch_without(chain, lost, closed_port)


async def fetch_without(chain: StoredChain, lost: tuple[int, ...], closed_port: int) -> None:
    """Twice: at first the client does not know that the nodes are down, then it does."""
    lossy = without_nodes(chain.map, set(lost), closed_port)
    async with client_of(lossy) as store:
        for _ in range(2):
            result = await WatchedRun(chain).fetch(store)
            assert (result.blocks, result.ended) == (chain.count, FetchEnd.COMPLETE), lost
        counters, is_reader = store.counters, WatchedRun.rebuild == "reader"
        rebuilt, other = counters.blocks_decoded, counters.blocks_left
        if is_reader:
            rebuilt, other = other, rebuilt
        assert (rebuilt > 0, other) == (holds_data(chain, lost), 0), lost


def holds_data(chain: StoredChain, places: tuple[int, ...]) -> bool:
    """Whether one of these nodes of the map holds a data shard of any block."""
    names = {chain.map.nodes[place].name for place in places}
    spans = range(0, chain.count, SPAN_BLOCKS)
    holders = [nodes_by_shard(chain.map, chain.blocks.keys[start:])[:10] for start in spans]
    return any(names.intersection(of_span) for of_span in holders)


async def test_a_node_lost_for_parity_only_needs_no_decoding(
    flash: StoredChain, closed_port: int
) -> None:
    lossy = without_nodes(flash.map, holder_places(flash, (10, 11)), closed_port)
    blocks = flash.blocks
    async with client_of(lossy) as store:
        run = WatchedRun(flash)
        await store.fetch_run(
            blocks.namespace,
            blocks.keys[:64],
            run.memory,
            first_block=0,
            is_by_layer=True,
            on_ready=lambda section, count: None,
            deadline_s=OPERATION_S,
        )
        assert (store.counters.blocks_fetched, store.counters.blocks_decoded) == (64, 0)


async def test_three_lost_nodes_cost_blocks_and_are_not_waited_for(
    flash: StoredChain, closed_port: int
) -> None:
    lossy = without_nodes(flash.map, {1, 4, 7}, closed_port)
    async with client_of(lossy) as store:
        result = await WatchedRun(flash).fetch(store)
        assert (result.blocks, result.ended) == (0, FetchEnd.TOO_FEW_SHARDS)


@pytest.mark.parametrize("place", range(12))
async def test_a_node_that_never_answers_costs_no_block_and_is_not_waited_for(
    chain: StoredChain, place: int
) -> None:
    async with lying_client(chain.map, [chain.map.nodes[place].name]) as (store, proxies):
        proxies[0].lie = lying_proxy.never_answers
        assert (await WatchedRun(chain).fetch(store)).blocks == BLOCKS


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("liar_count", [1, 2])
async def test_every_block_arrives_before_the_deadline_when_up_to_two_nodes(
    chain: StoredChain, lie: Lie, liar_count: int
) -> None:
    descriptors = count_descriptors()
    liars = [chain.map.nodes[i].name for i in (3, 8)[:liar_count]]
    async with lying_client(chain.map, liars) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lie
        run = WatchedRun(chain)
        assert (await run.fetch(store)).blocks == BLOCKS
        await stays_as_it_is(run, for_s=0.02)
    await until(lambda: count_descriptors() <= descriptors)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    "lie", [*LIES, lying_proxy.lies_consistently], ids=lambda lie: lie.__name__
)
async def test_what_is_called_ready_is_right_when_three_nodes(chain: StoredChain, lie: Lie) -> None:
    async with lying_client(chain.map, [chain.map.nodes[i].name for i in (0, 5, 9)]) as (
        store,
        proxies,
    ):
        for proxy in proxies:
            proxy.lie = lie
        run = WatchedRun(chain)
        async with asyncio.timeout(PATIENCE_S):
            await run.fetch(store, deadline_s=0.5)
        await stays_as_it_is(run, for_s=0.02)
        run.check()


@pytest.mark.parametrize("shard", SHARD_OF_SECTION)
@pytest.mark.parametrize(
    "lie",
    [
        lying_proxy.flips_a_byte_of_each_payload,
        lying_proxy.lies_consistently,
        lying_proxy.lies_consistently_of_block(7),
    ],
    ids=["flips_a_byte", "lies_consistently", "lies_of_block_7"],
)
async def test_a_bad_shard_of_any_section_is_replaced_before_it_is_called_ready(
    flash: StoredChain, shard: int, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong bytes, also with the checksum that fits them: the heads came before and say another."""
    wait_patiently(monkeypatch)
    async with lying_client(flash.map, [flash.holder(shard)]) as (store, proxies):
        proxies[0].lie = lie
        result = await WatchedRun(flash).fetch(store)
        assert result.blocks == BLOCKS
        assert result.decoded_blocks > 0
        assert result.rejected_shards > 0


@pytest.mark.parametrize("shard", [0, 1, 3, 9])
async def test_a_lie_that_fits_its_head_is_never_called_ready(
    flash: StoredChain, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that lies of a shard from the first question on: its heads do not combine."""
    wait_patiently(monkeypatch)
    size = SMALL_FLASH.block_bytes // 10
    true = flash.blocks.area.reshape(-1, size)
    checksums = {
        xxh3_64_intdigest(row.data): xxh3_64_intdigest((row ^ np.uint8(0xFF)).data) for row in true
    }
    async with lying_client(flash.map, [flash.holder(shard)]) as (store, proxies):
        proxies[0].lie = lying_proxy.lies_consistently_also_in_heads(checksums)
        result = await WatchedRun(flash).fetch(store)
        assert result.blocks == BLOCKS
        assert result.rejected_shards >= 64


@pytest.mark.parametrize("shard", range(10))
async def test_a_late_shard_holds_up_only_the_sections_that_it_holds(
    flash: StoredChain, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one span: its node tells heads, and passes on no read."""
    wait_patiently(monkeypatch)
    held = (0, 0, 1, 1, 2, 2, 3, 3, 3, 3)[shard]
    async with lying_client(flash.map, [flash.holder(shard)]) as (store, proxies):
        proxies[0].passes_reads.clear()

        def give_up_if_no_other_is_missing(_section: int, _blocks: int) -> None:
            if all(blocks >= 64 for blocks in run.ready[:held]):
                give_up_after(0.1, monkeypatch)

        run = WatchedRun(flash, also=give_up_if_no_other_is_missing)
        if not held:
            give_up_after(0.1, monkeypatch)
        result = await run.fetch(store)
        assert result.blocks == BLOCKS
        assert result.decoded_blocks >= 64
        if held:
            # The first span's earlier sections needed no parity.
            order = [section for section, blocks in run.told if blocks >= 64]
            assert set(order[: order.index(held)]) >= set(range(held)), run.told


@pytest.mark.parametrize("lie", HEADS_LIES, ids=lambda lie: lie.__name__)
async def test_units_whose_heads_cannot_be_had_are_verified_whole(
    flash: StoredChain, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of the first span: none of their sections is ready before all of them are."""
    # Heads that never come must be given up, and long before that all else has come.
    give_up_after(5.0 if lie is lying_proxy.never_tells_heads else PATIENCE_S, monkeypatch)
    async with lying_client(flash.map, [flash.holder(6)]) as (store, proxies):
        proxies[0].lie = lie
        run = WatchedRun(flash)
        assert (await run.fetch(store)).blocks == BLOCKS
        # What is told first is told of all sections; of the last ones, perhaps, a larger number.
        first = run.told[:4]
        assert {section for section, _ in first} == {0, 1, 2, 3}, run.told
        assert min(blocks for _, blocks in first) == first[0][1], run.told


async def test_flipped_bytes_are_reported_and_repaired_by_parity(
    cluster_path: str,
    request: pytest.FixtureRequest,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the disks, in a shard of each section of some block."""
    wait_patiently(monkeypatch)
    chain = StoredChain(
        cluster_path, SMALL_FLASH, count=70, tenant=request.node.name, seed=rng.randrange(2**31)
    )
    size = SMALL_FLASH.block_bytes // 10
    for block, shard in enumerate(SHARD_OF_SECTION):
        flip_on_disk(cluster_path, bytes(chain.blocks.sources[block][shard * size :][:16]))
    async with StoreClient.connect(cluster_path) as store:
        result = await WatchedRun(chain).fetch(store)
        assert (result.blocks, result.rejected_shards) == (70, 4)
        assert result.decoded_blocks == 4
        await store.finish_writes()
        again = await WatchedRun(chain).fetch(store)
        # The nodes have quarantined those shards: they are missing, not wrong.
        assert (again.blocks, again.rejected_shards, again.decoded_blocks) == (70, 0, 4)


def flip_on_disk(cluster_path: str, start: bytes) -> None:
    """Changes a byte of the one stored shard that begins so."""
    found = 0
    for file in sorted(os.scandir(os.path.dirname(cluster_path)), key=lambda one: one.name):
        for folder, _, names in os.walk(file.path):
            for name in names:
                if name.endswith(".seg"):
                    found += flip_in_file(os.path.join(folder, name), start)
    assert found == 1


def flip_in_file(path: str, start: bytes) -> int:
    content = np.memmap(path, np.uint8, mode="r+")
    words = content[: len(content) // 64 * 64].view(np.uint64)[::8]
    places = np.flatnonzero(words == int.from_bytes(start[:8], "little")) * 64
    for at in places.tolist():
        content[at + 100] ^= 4
    return len(places)


# Versions -------------------------------------------------------------------------------------


@asynccontextmanager
async def held_back(
    chain: StoredChain, shards: range
) -> AsyncIterator[tuple[StoreClient, list[LyingProxy]]]:
    """A client whose nodes tell heads of these shards of the first span, but pass on no read."""
    async with lying_client(chain.map, [chain.holder(shard) for shard in shards]) as both:
        for proxy in both[1]:
            proxy.passes_reads.clear()
        yield both


class Rewriter:
    """Puts other bytes in the place of a chain's blocks, as a writer does that computed them anew
    after they had been forgotten."""

    def __init__(self, chain: StoredChain) -> None:
        self.blocks = RandomBlocks(
            chain.count,
            block_bytes=chain.layout.block_bytes,
            seed=99,
            layout=chain.layout,
        )
        self._chain = chain

    async def rewrite(self) -> None:
        old = self._chain.blocks
        async with StoreClient.connect(self._chain.path) as store:
            assert await store.forget(old.namespace, old.keys) == self._chain.count
            saved = await store.save(old.namespace, old.keys, self.blocks.sources)
            assert saved.stored == self._chain.count


@pytest.fixture
def one_span(cluster_path: str, request: pytest.FixtureRequest) -> StoredChain:
    seed = abs(hash(request.node.name)) % 2**31
    return StoredChain(cluster_path, SMALL_FLASH, count=64, tenant=request.node.name, seed=seed)


async def test_a_section_that_is_ready_stays_when_its_blocks_are_replaced_meanwhile(
    one_span: StoredChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections of two versions are never joined: the block is lost for this fetch."""
    wait_patiently(monkeypatch)
    is_ready = asyncio.Event()
    rewriter = Rewriter(one_span)
    async with held_back(one_span, range(2, 10)) as (store, proxies):
        run = WatchedRun(one_span, also=lambda section, blocks: is_ready.set())
        fetch = asyncio.create_task(run.fetch(store))
        await is_ready.wait()
        await rewriter.rewrite()
        for proxy in proxies:
            proxy.passes_reads.set()
        result = await fetch
        assert run.ready == [64, 0, 0, 0]
        assert (result.blocks, result.ended) == (0, FetchEnd.TOO_FEW_SHARDS)
        run.check()


async def test_blocks_of_which_nothing_was_ready_are_delivered_in_the_version_that_is_there(
    one_span: StoredChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_patiently(monkeypatch)
    rewriter, blocks = Rewriter(one_span), one_span.blocks
    async with held_back(one_span, range(10)) as (store, proxies):
        run = WatchedRun(one_span)
        fetch = asyncio.create_task(
            store.fetch_run(
                blocks.namespace,
                blocks.keys,
                run.memory,
                first_block=0,
                is_by_layer=True,
                on_ready=lambda section, count: None,
                deadline_s=OPERATION_S,
            )
        )
        await asyncio.sleep(0.1)
        await rewriter.rewrite()
        for proxy in proxies:
            proxy.passes_reads.set()
        assert (await fetch).blocks == 64
        got = b"".join(run.block(block) for block in range(64))
        assert got == rewriter.blocks.area.tobytes()


# Ends -----------------------------------------------------------------------------------------


async def test_a_deadline_ends_the_fetch_and_nothing_is_written_after_it(
    flash: StoredChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_patiently(monkeypatch)
    async with held_back(flash, range(7, 10)) as (store, proxies):
        run = WatchedRun(flash)
        async with asyncio.timeout(PATIENCE_S):
            result = await run.fetch(store, deadline_s=0.5)
        assert (result.blocks, result.ended) == (0, FetchEnd.DEADLINE)
        assert run.ready[3] == 0, "only these nodes have it"
        for proxy in proxies:
            proxy.passes_reads.set()
        await stays_as_it_is(run, for_s=0.3)
        run.check()


async def test_nothing_is_written_after_a_cancellation_in_the_middle_of_decoding(
    flash: StoredChain,
) -> None:
    async with lying_client(flash.map, [flash.holder(shard) for shard in (0, 4)]) as (
        store,
        proxies,
    ):
        for proxy in proxies:
            proxy.lie = lying_proxy.takes_a_tenth_of_a_second
        for delay_s in (0.002, 0.01, 0.03, 0.08, 0.12):
            run = WatchedRun(flash)
            fetch = asyncio.create_task(run.fetch(store))
            await asyncio.sleep(delay_s)
            fetch.cancel()
            await asyncio.wait([fetch])
            await stays_as_it_is(run, for_s=0.15)
            run.check()
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_is_closed_ends_its_fetches(
    flash: StoredChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_patiently(monkeypatch)
    async with held_back(flash, range(7, 10)) as (store, _):

        def close_soon(section: int, blocks: int) -> None:
            asyncio.get_running_loop().call_soon(store.close)

        run = WatchedRun(flash, also=close_soon)
        result = await run.fetch(store)
        assert (result.blocks, result.ended) == (0, FetchEnd.TOO_FEW_SHARDS)
        await stays_as_it_is(run, for_s=0.05)
        run.check()
