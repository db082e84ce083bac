"""Questions to a code group: as few as can be, and none to whoever is known to be silent."""

from functools import partial

import numpy as np

from gc_worker.headers import HeaderReader
from gc_worker.hottest import rows_of_scan, walk_slots
from gc_worker.own_blocks import OwnBlocks, read_blocks
from gc_worker.survey import SILENT_RETRY_S, Surveyor
from kvstore.admin.local_cluster import LocalCluster
from tests.gc_worker.repair_bench import RepairBench


class Hands:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def blocks_of(bench: RepairBench, node: str) -> OwnBlocks:
    """All blocks of a node's target."""
    context = bench.contexts[node]
    (target,) = context.own_targets()
    reader = HeaderReader(context.folder(target))
    try:
        async for head, rows in walk_slots(partial(context.link.scan, target.name)):
            band = rows_of_scan(head, rows)
            if len(band):
                return await read_blocks(reader, target.name, band)
    finally:
        reader.close()
    raise AssertionError("the target is empty")


async def test_only_the_lowest_holder_asks_all_others(bench: RepairBench) -> None:
    blocks = await bench.save(20, seed=700)
    targets = bench.targets_by_shard(blocks)
    questions = []
    for shard, target in enumerate(targets):
        node = bench.link.node_of(target)
        context = bench.contexts[node]
        surveyor = Surveyor(context.link, clock=Hands())
        survey, misplaced = surveyor.begin(await blocks_of(bench, node))
        assert (len(survey), misplaced) == (20, 0)
        assert (survey.own_shard == shard).all()
        mine = await surveyor.ask_lower(survey)
        assert len(mine) == (20 if shard == 0 else 0)
        await surveyor.ask_rest(survey.take(mine))
        questions.append(int(survey.sightings.has_answered.sum()) - len(survey))
    assert questions == [0, 20, 20, 20, 20, 20], "one each; those of the lowest are on a copy"


async def test_block_that_the_map_does_not_lead_to_is_left_out(bench: RepairBench) -> None:
    saved = await bench.save(5, seed=701)
    node = bench.link.node_of(bench.targets_by_shard(saved)[0])
    blocks = await blocks_of(bench, node)
    blocks.headers["shard"][2] = 4
    blocks.headers["m"][3] = 1
    survey, misplaced = Surveyor(bench.link, clock=Hands()).begin(blocks)
    assert (len(survey), misplaced) == (3, 2)


async def test_target_is_asked_again_some_time_after_it_fell_silent(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    saved = await bench.save(5, seed=702)
    targets = bench.targets_by_shard(saved)
    down = bench.link.node_of(targets[3])
    clock = Hands()
    context = bench.contexts[bench.link.node_of(targets[0])]
    surveyor = Surveyor(context.link, clock=clock)
    survey, _ = surveyor.begin(await blocks_of(bench, context.node))
    cluster.kill(down)
    try:
        await surveyor.ask_rest(survey)
    finally:
        cluster.restart_node(down)
    await bench.wait_until_up(down)
    assert survey.sightings.has_answered.sum(axis=0).tolist() == [5, 5, 5, 0, 5, 5]
    await surveyor.ask_rest(survey)
    assert not survey.sightings.has_answered[:, 3].any()
    clock.now_s += SILENT_RETRY_S
    await surveyor.ask_rest(survey)
    assert survey.sightings.has_answered.all()
    assert surveyor.silent == {targets[3]}, "what was missed meanwhile stays missed"


async def test_target_that_is_known_to_be_silent_is_never_asked(bench: RepairBench) -> None:
    saved = await bench.save(5, seed=703)
    targets = bench.targets_by_shard(saved)
    context = bench.contexts[bench.link.node_of(targets[0])]
    clock = Hands()
    surveyor = Surveyor(context.link, frozenset({targets[5]}), clock=clock)
    survey, _ = surveyor.begin(await blocks_of(bench, context.node))
    clock.now_s += 1e9
    await surveyor.ask_rest(survey)
    assert survey.sightings.has_answered.sum(axis=0).tolist() == [5, 5, 5, 5, 5, 0]
    assert np.array_equal(survey.sightings.versions[:, 5], np.zeros(5, np.uint64))
