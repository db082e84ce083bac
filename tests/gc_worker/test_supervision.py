"""Loops go on after a node's fault, and end together after one of ours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from gc_worker.cluster_link import ClusterLink
from gc_worker.context import WorkerContext
from gc_worker.supervision import BACKOFF_MAX_S, LoopFailed, run_loops
from kvstore.cluster.entities import ClusterMap, CodeShape, Group, Node, Target
from kvstore.cluster.map import write_cluster_map
from kvstore.cluster.source import FileMapSource
from kvstore.errors import NodeUnreachable
from tests.gc_worker.virtual_time import VirtualTime


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[WorkerContext]:
    """A worker of a node that nobody started."""
    path = tmp_path / "cluster.toml"
    write_cluster_map(map_of(epoch=1), path)
    time = VirtualTime()
    link = ClusterLink(FileMapSource(path), asyncio.get_running_loop(), time.monotonic_s)

    async def sleep(delay_s: float) -> None:
        await time.sleep(delay_s)
        await asyncio.sleep(0)

    yield WorkerContext(
        node="n01",
        cluster_path=path,
        link=link,
        clock=time,
        sleep=sleep,
        rng=random.Random(1),
    )
    link.close()


def map_of(*, epoch: int) -> ClusterMap:
    return ClusterMap(
        cluster="0" * 31 + "1",
        epoch=epoch,
        code=CodeShape(k=1, m=0, write_acks=1),
        nodes=(Node(name="n01", address="127.0.0.1:1"),),
        targets=(Target(name="t1", node="n01", path="t1", size_bytes=1 << 20),),
        groups=(Group(name="g1", targets=("t1",)),),
    )


async def test_loop_goes_on_with_growing_pauses_when_a_node_fails(context: WorkerContext) -> None:
    stop = asyncio.Event()
    begun_s: list[float] = []

    async def flaky() -> None:
        begun_s.append(context.clock.monotonic_s())
        if len(begun_s) == 7:
            stop.set()
            await asyncio.Event().wait()
        raise NodeUnreachable("n01", "gone")

    await run_loops(context, {"flaky": flaky}, stop)
    pauses_s = [after - before for before, after in pairwise(begun_s)]
    assert pauses_s == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert pauses_s[-1] == BACKOFF_MAX_S
    assert context.counters.node_errors == 6


@pytest.mark.parametrize("is_error", [True, False])
async def test_all_loops_end_when_one_fails_or_comes_to_an_end(
    context: WorkerContext, is_error: bool
) -> None:
    is_cancelled = asyncio.Event()

    async def steady() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def broken() -> None:
        await asyncio.sleep(0)
        if is_error:
            raise KeyError("a mistake of ours")

    with pytest.raises(LoopFailed, match=r"loop broken"):
        await run_loops(context, {"steady": steady, "broken": broken}, asyncio.Event())
    assert is_cancelled.is_set()


async def test_link_follows_a_newer_map_and_keeps_the_old_one_otherwise(
    context: WorkerContext,
) -> None:
    assert not context.link.follow_map()
    write_cluster_map(map_of(epoch=2), context.cluster_path)
    old = context.link.router
    assert context.link.follow_map()
    assert context.link.map.epoch == 2
    assert context.link.router is not old
    context.cluster_path.write_text("nonsense [")
    assert not context.link.follow_map()
    assert context.link.map.epoch == 2
