"""Lies in layer order where the reader of a run rebuilds: none is used, most cost no block.

That lost nodes cost no byte, whoever rebuilds, is tested in test_layered_faults.py.
"""

import pytest

from kvstore.arena.losses import clear_losses, read_losses
from kvstore.arena.run_layout import RunCode
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lying_proxy import Lie, lying_client
from tests.kvstore.layered_runs import SMALL_FLASH, StoredChain, WatchedRun, stays_as_it_is
from tests.kvstore.run_rebuild import rebuild_in_run
from tests.kvstore.runs import PlainRun

BLOCKS = 140


@pytest.fixture(scope="module")
def flash(cluster_path: str) -> StoredChain:
    return StoredChain(cluster_path, SMALL_FLASH, count=BLOCKS, tenant="rebuild-by-reader", seed=74)


@pytest.mark.parametrize(
    "lie",
    [
        lying_proxy.flips_a_byte_of_each_payload,
        lying_proxy.lies_about_heads,
        lying_proxy.claims_another_shard,
        lying_proxy.closes_in_the_middle_of_a_payload,
    ],
    ids=lambda lie: lie.__name__,
)
async def test_lies_cost_no_block_where_the_reader_rebuilds(
    flash: StoredChain, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedRun, "rebuild", "reader")
    async with lying_client(flash.map, [flash.holder(0), flash.holder(7)]) as (store, proxies):
        for proxy in proxies:
            proxy.lie = lie
        run = WatchedRun(flash)
        assert (await run.fetch(store)).blocks == BLOCKS
        await stays_as_it_is(run, for_s=0.02)


async def test_a_reader_that_rebuilds_finds_out_a_lie_that_fits_its_checksum(
    flash: StoredChain,
) -> None:
    """The heads of the first shard are not to be had, so nobody knows what the others must be."""
    blocks, code = flash.blocks, RunCode(10, 2)
    run = PlainRun(flash.layout, 64, code)
    clear_losses(run.memory)
    async with lying_client(flash.map, [flash.holder(0), flash.holder(7)]) as (store, proxies):
        proxies[0].lie = lying_proxy.refuses_as_busy
        proxies[1].lie = lying_proxy.lies_consistently
        result = await store.fetch_run(
            blocks.namespace,
            blocks.keys[:64],
            run.memory,
            first_block=0,
            is_by_layer=True,
            is_left_to_reader=True,
            on_ready=lambda section, count: None,
            deadline_s=5.0,
        )
    assert (result.blocks, result.left_blocks, result.decoded_blocks) == (64, 64, 0)
    losses = read_losses(run.memory, 0, result.blocks)
    using_it = [loss.shards[7] == 7 for loss in losses]
    assert len(losses) == 64
    found = rebuild_in_run(run.memory, blocks.keys[:64], losses)
    assert found == [not is_used for is_used in using_it]
