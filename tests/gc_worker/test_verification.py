"""Verify and inspect on real nodes: what they say is what was done to the blocks before."""

import pytest

from gc_worker import rebuild
from gc_worker.inspection import inspect_block
from gc_worker.survey import Survey, Surveyor
from gc_worker.verification import verify_sample
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.shards import read_shards
from kvstore.errors import NodeUnreachable
from tests.gc_worker.repair_bench import RepairBench
from tests.kvstore.faults import lying_proxy
from tests.kvstore.faults.lying_proxy import lying_client


async def test_every_byte_is_good_when_nothing_was_done(bench: RepairBench) -> None:
    await bench.save(90, seed=600)
    context = bench.contexts[bench.cluster.node_names[0]]
    report = await verify_sample(context, 40, deadline_s=30.0)
    assert (report.asked, report.verified, report.good, report.whole) == (40, 40, 40, 40)
    assert report.shards == {"good": 240}
    assert report.bytes == 240 * 1024
    assert report.problems == []
    assert report.is_complete


async def test_fewer_are_verified_when_there_are_fewer(bench: RepairBench) -> None:
    await bench.save(5, seed=601)
    context = bench.contexts[bench.cluster.node_names[0]]
    assert (await verify_sample(context, 100, deadline_s=30.0)).verified == 5
    await bench.forget_all()
    assert (await verify_sample(context, 100, deadline_s=30.0)).verified == 0


async def test_verification_ends_when_time_is_up(bench: RepairBench) -> None:
    await bench.save(5, seed=602)
    context = bench.contexts[bench.cluster.node_names[0]]
    report = await verify_sample(context, 100, deadline_s=0.0)
    assert (report.verified, report.is_complete) == (0, False)


async def test_nobody_is_asked_any_more_when_time_is_up(
    bench: RepairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.save(600, seed=606)
    context = bench.contexts[bench.cluster.node_names[0]]
    asked = []
    ask = context.link.ask_records

    async def note_and_ask(target: str, *given: object, **named: object) -> object:
        asked.append(target)
        return await ask(target, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(context.link, "ask_records", note_and_ask)
    report = await verify_sample(context, 600, deadline_s=0.0)
    assert (report.verified, report.is_complete, asked) == (0, False, [])


async def test_blocks_are_told_apart_by_how_their_keys_begin(bench: RepairBench) -> None:
    blocks = await bench.save(30, seed=607)
    reports = [
        await verify_sample(bench.contexts[name], 20, deadline_s=30.0)
        for name in bench.cluster.node_names[:2]
    ]
    known = {key[:8].hex() for key in blocks.keys}
    for report in reports:
        assert len(set(report.keys)) == len(report.keys) == report.verified == 20
        assert set(report.keys) <= known


async def test_shard_that_goes_before_it_is_read_is_absent_and_not_silent(
    bench: RepairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = await bench.save(1, seed=608)
    target = bench.targets_by_shard(blocks)[3]
    ask_rest = Surveyor.ask_rest

    async def ask_and_lose(surveyor: Surveyor, survey: Survey) -> None:
        await ask_rest(surveyor, survey)
        await bench.forget(target, blocks.keys)

    monkeypatch.setattr(Surveyor, "ask_rest", ask_and_lose)
    context = bench.contexts[bench.cluster.node_names[0]]
    report = await verify_sample(context, 1, deadline_s=30.0)
    assert report.shards == {"good": 5, "absent": 1}


async def test_shard_whose_connection_ended_is_read_again(
    bench: RepairBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.save(1, seed=609)
    failed: list[object] = []

    async def fail_once(channel: object, *given: object, **named: object) -> object:
        if len(failed) < 2:
            failed.append(channel)
            raise NodeUnreachable("n02", "the answer was cut off")
        return await read_shards(channel, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(rebuild, "read_shards", fail_once)
    context = bench.contexts[bench.cluster.node_names[0]]
    report = await verify_sample(context, 1, deadline_s=30.0)
    assert len(failed) == 2
    assert report.shards == {"good": 6}


async def test_damaged_and_missing_shards_are_named(bench: RepairBench) -> None:
    blocks = await bench.save(3, seed=603)
    targets = bench.targets_by_shard(blocks)
    await bench.flip_payload(targets[2], blocks.keys[1])
    await bench.forget(targets[4], blocks.keys[:1])
    context = bench.contexts[bench.link.node_of(targets[0])]
    report = await verify_sample(context, 3, deadline_s=30.0)
    assert (report.verified, report.good, report.whole) == (3, 3, 1)
    found = {(p["key"], p["shard"], p["target"], p["what"]) for p in report.problems}
    assert found == {
        (blocks.keys[1].hex(), 2, targets[2], "damaged"),
        (blocks.keys[0].hex(), 4, targets[4], "absent"),
    }
    # The node that was told of the damaged one has looked for itself.
    assert await bench.count_shards(blocks.keys) == [5, 5, 6]


@pytest.mark.parametrize("holders", [6, 5])
async def test_shard_that_fits_only_its_own_checksum_is_named_when_the_others_are_enough(
    cluster: LocalCluster, bench: RepairBench, holders: int
) -> None:
    blocks = await bench.save(2, seed=604)
    targets = bench.targets_by_shard(blocks)
    for target in targets[holders:]:
        await bench.forget(target, blocks.keys)
    liar = cluster.map.node_of(targets[1]).name
    async with (
        lying_client(cluster.map, [liar]) as (store, (proxy,)),
        RepairBench.open(cluster, store.map) as lied_to,
    ):
        proxy.lie = lying_proxy.lies_consistently
        context = lied_to.contexts[bench.link.node_of(targets[0])]
        report = await verify_sample(context, 2, deadline_s=30.0)
    assert (report.good, report.whole) == (2, 0)
    assert report.shards["wrong"] == 2
    assert {p["shard"] for p in report.problems if p["what"] == "wrong"} == {1}


async def test_block_is_not_good_when_it_cannot_be_made(bench: RepairBench) -> None:
    blocks = await bench.save(1, seed=605)
    targets = bench.targets_by_shard(blocks)
    for target in targets[4:]:
        await bench.forget(target, blocks.keys)
    await bench.flip_payload(targets[3], blocks.keys[0])
    context = bench.contexts[bench.link.node_of(targets[0])]
    report = await verify_sample(context, 1, deadline_s=30.0)
    assert (report.verified, report.good) == (1, 0)
    assert report.shards == {"absent": 2, "damaged": 1, "wrong": 3}


# Inspect ------------------------------------------------------------------------------------------


async def test_inspect_tells_what_each_node_holds(bench: RepairBench) -> None:
    blocks = await bench.save(3, seed=610)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[4], blocks.keys[1:2])
    context = bench.contexts[bench.link.node_of(targets[0])]
    found = await inspect_block(context, blocks.keys[1], deadline_s=5.0)
    assert (found["key"], found["k"], found["width"]) == (blocks.keys[1].hex(), 4, 6)
    assert (found["shards"], found["is_readable"]) == (5, True)
    assert list(found["versions"].values()) == [5]
    by_target = {row["target"]: row for row in found["targets"]}
    assert set(by_target) == set(targets)
    for shard, target in enumerate(targets):
        row = by_target[target]
        assert row["is_reachable"]
        assert row["node"] == bench.link.node_of(target)
        assert row.get("shard") == (None if shard == 4 else shard)
    assert by_target[targets[0]]["block_index"] == 1
    assert by_target[targets[0]]["payload_bytes"] == 1024
    assert 0 <= by_target[targets[0]]["age_s"] < 60
    header = found["header"]
    assert header["namespace_id"] == blocks.namespace.namespace_id.hex()
    assert header["ttl_class"] == "chat"
    assert header["anchor"] == blocks.keys[0].hex()
    assert header["belongs_on"] == list(targets)
    assert (header["k"], header["m"], header["shard"], header["block_bytes"]) == (4, 2, 0, 4096)


async def test_inspect_has_no_header_when_the_own_node_holds_no_shard(bench: RepairBench) -> None:
    blocks = await bench.save(1, seed=611)
    targets = bench.targets_by_shard(blocks)
    await bench.forget(targets[0], blocks.keys)
    context = bench.contexts[bench.link.node_of(targets[0])]
    found = await inspect_block(context, blocks.keys[0], deadline_s=5.0)
    assert (found["shards"], found["header"]) == (5, None)


async def test_inspect_answers_when_nodes_are_down_and_nobody_knows_the_block(
    cluster: LocalCluster, bench: RepairBench
) -> None:
    down = cluster.node_names[3]
    cluster.kill(down)
    try:
        context = bench.contexts[cluster.node_names[0]]
        found = await inspect_block(context, bytes(32), deadline_s=5.0)
    finally:
        cluster.restart_node(down)
        await bench.wait_until_up(down)
    assert (found["shards"], found["is_readable"], found["header"]) == (0, False, None)
    silent = [row for row in found["targets"] if not row["is_reachable"]]
    assert [row["node"] for row in silent] == [down]
    assert silent[0]["problem"]
