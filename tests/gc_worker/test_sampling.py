"""Samples of a real cluster for the history: what nodes count, and which of them answer."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gc_worker.cluster_link import ClusterLink
from gc_worker.context import WorkerContext
from gc_worker.sampling import HistorySampler
from kvstore.admin.local_cluster import LocalCluster
from kvstore.cluster.source import FileMapSource
from kvstore.node.clock import SystemClock


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[WorkerContext]:
    """Give the context of a worker beside one of two nodes."""
    with LocalCluster.start(
        tmp_path / "c", nodes=2, k=1, m=1, target_size_bytes=8 << 20
    ) as cluster:
        source = FileMapSource(cluster.cluster_path)
        link = ClusterLink(source, asyncio.get_running_loop(), time.monotonic)
        yield WorkerContext(
            node="n01",
            cluster_path=cluster.cluster_path,
            link=link,
            clock=SystemClock(),
            sleep=asyncio.sleep,
            rng=random.Random(1),
        )
        link.close()


def last_point(sampler: HistorySampler) -> dict[str, Any]:
    values = sampler.to_values()
    return dict(zip(values["columns"], values["tiers"][0]["rows"][-1], strict=True))


async def test_sample_counts_the_nodes_that_answer(context: WorkerContext) -> None:
    sampler = HistorySampler(context)
    assert sampler.to_values()["tiers"][0]["rows"] == []
    await sampler.sample()
    point = last_point(sampler)
    assert (point["nodes_alive"], point["nodes_total"]) == (2, 2)
    assert point["fill"] is None or point["fill"] == 0
    LocalCluster.attach(context.cluster_path.parent).kill("n02")
    await sampler.sample()
    assert last_point(sampler)["nodes_alive"] == 1


async def test_sampling_goes_on_until_it_is_cancelled(context: WorkerContext) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise asyncio.CancelledError

    context.sleep = sleep
    with pytest.raises(asyncio.CancelledError):
        await HistorySampler(context).run()
    assert waits == [10.0, 10.0, 10.0]
