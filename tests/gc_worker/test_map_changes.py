"""The cluster map is replaced while the worker waits: a fault of a node, and none of ours."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from gc_worker.cluster_link import ClusterLink
from gc_worker.context import WorkerContext
from gc_worker.peers import Withdrawals
from gc_worker.survey import Surveyor
from gc_worker.verification import verify_sample
from gc_worker.victims import VICTIM, VictimGroup
from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.cluster.entities import ClusterMap
from kvstore.errors import NodeError
from kvstore.node.clock import SystemClock
from tests.gc_worker.repair_bench import RepairBench
from tests.gc_worker.test_survey import Hands, blocks_of

GONE, NEW = "n06-t0", "n06-t9"


class ReplaceableMap:
    """A map that a test replaces."""

    def __init__(self, cluster_map: ClusterMap) -> None:
        self.map = cluster_map
        self._loaded = cluster_map

    def load(self) -> ClusterMap:
        self._loaded = self.map
        return self.map

    def has_changed(self) -> bool:
        return self._loaded is not self.map


def without_gone(cluster_map: ClusterMap) -> ClusterMap:
    """The next map: another target stands where GONE was."""

    def name(old: str) -> str:
        return NEW if old == GONE else old

    targets = tuple(replace(one, name=name(one.name)) for one in cluster_map.targets)
    groups = tuple(
        replace(group, targets=tuple(name(one) for one in group.targets))
        for group in cluster_map.groups
    )
    return replace(cluster_map, epoch=cluster_map.epoch + 1, targets=targets, groups=groups)


def with_silent_n06(cluster_map: ClusterMap) -> ClusterMap:
    """The same map, but nobody listens where n06 should."""
    nodes = tuple(
        replace(node, address="127.0.0.1:1") if node.name == "n06" else node
        for node in cluster_map.nodes
    )
    return replace(cluster_map, nodes=nodes)


@pytest.fixture
async def source(cluster: LocalCluster) -> ReplaceableMap:
    return ReplaceableMap(with_silent_n06(cluster.map))


@pytest.fixture
async def context(cluster: LocalCluster, source: ReplaceableMap) -> AsyncIterator[WorkerContext]:
    link = ClusterLink(source, asyncio.get_running_loop(), time.monotonic)
    yield WorkerContext(
        node="n01",
        cluster_path=cluster.cluster_path,
        link=link,
        clock=SystemClock(),
        sleep=asyncio.sleep,
        rng=random.Random(7),
    )
    link.close()


def change_map(context: WorkerContext, source: ReplaceableMap) -> None:
    source.map = without_gone(source.map)
    assert context.link.follow_map()


async def test_target_that_left_the_map_is_a_node_that_cannot_be_asked(
    context: WorkerContext, source: ReplaceableMap
) -> None:
    change_map(context, source)
    link = context.link
    assert not link.is_available(GONE)
    with pytest.raises(NodeError, match=GONE):
        link.channel(GONE)
    with pytest.raises(NodeError, match=GONE):
        await link.ask(GONE, wire.Op.STAT)
    with pytest.raises(NodeError, match=GONE):
        await link.ask_records(GONE, wire.Op.LOCATE, wire.LOCATION, body=bytes(32), count=1)
    with pytest.raises(NodeError, match=GONE):
        await link.scan(GONE, 0, 0, 16)


async def test_withdrawals_owed_to_a_target_that_left_the_map_are_dropped(
    context: WorkerContext, source: ReplaceableMap
) -> None:
    withdrawals = Withdrawals(context)
    group = VictimGroup(np.arange(3), (GONE,))
    await withdrawals.send(np.zeros(3, VICTIM), [group])
    assert withdrawals.owed_items == 3
    change_map(context, source)
    await withdrawals.send_owed()
    assert withdrawals.owed_items == 0


async def test_silent_target_that_left_the_map_is_not_missed_by_a_survey(
    context: WorkerContext, source: ReplaceableMap
) -> None:
    change_map(context, source)
    surveyor = Surveyor(context.link, frozenset({GONE, "n02-t0"}), clock=Hands())
    assert surveyor.silent == {"n02-t0"}


async def test_survey_of_the_old_map_takes_no_blocks_when_there_is_a_new_one(
    bench: RepairBench, context: WorkerContext, source: ReplaceableMap
) -> None:
    await bench.save(5, seed=710)
    blocks = await blocks_of(bench, "n01")
    surveyor = Surveyor(context.link, clock=Hands())
    assert len(surveyor.begin(blocks)[0]) == 5
    change_map(context, source)
    with pytest.raises(NodeError, match="map has changed"):
        surveyor.begin(blocks)


async def test_verification_ends_by_a_node_error_when_the_map_changes(
    bench: RepairBench,
    context: WorkerContext,
    source: ReplaceableMap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await bench.save(5, seed=711)
    ask = context.link.ask_records

    async def change_and_ask(*given: object, **named: object) -> object:
        if source.map.target_by_name.get(GONE):
            change_map(context, source)
        return await ask(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(context.link, "ask_records", change_and_ask)
    with pytest.raises(NodeError, match="map has changed"):
        await verify_sample(context, 5, deadline_s=30.0)
