"""One worker speaks for all: whom it asks, how long it waits, and how often."""

import asyncio
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvstore.admin.control.gather import WorkerGatherer
from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.quantities import make_code
from kvstore.admin.worker_status import WorkerState
from kvstore.cluster.entities import ClusterMap
from tests.kvstore.admin.test_control_client import peer
from tests.patience import PATIENCE_S, WELL_BEFORE_S


@dataclass
class OwnWorker:
    """What the gatherer needs of a worker's handle."""

    node: str
    map: ClusterMap


async def test_workers_that_hang_are_given_up_and_asked_once_for_many() -> None:
    is_over = threading.Event()
    asked: list[str] = []

    def hold(connection: socket.socket) -> None:
        is_over.wait(PATIENCE_S)

    async def own() -> dict[str, Any]:
        asked.append("own")
        return {"worker": {}, "at_s": 9, "redundancy": {"blocks_by_shards": [0, 0, 5]}}

    with ExitStack() as held:
        peers = [held.enter_context(peer(hold)) for _ in range(2)]
        held.callback(is_over.set)
        ports = [1, *(int(one.address.rpartition(":")[2]) for one in peers)]
        shape = LocalShape(nodes=3, code=make_code("code", 1, 1), target_size_bytes=1 << 30)
        cluster_map = plan_local_map(
            shape, cluster="ab" * 16, ports=range(1, 4), control_ports=ports
        )
        handle: Any = OwnWorker("n01", cluster_map)
        gatherer = WorkerGatherer(handle, "token", own)
        async with asyncio.timeout(WELL_BEFORE_S):
            found = await asyncio.gather(*(gatherer.gather() for _ in range(20)))
    assert asked == ["own"]
    assert [worker.state for worker in found[0].workers] == [
        *(WorkerState.RUNNING, WorkerState.NO_ANSWER, WorkerState.NO_ANSWER),
    ]
    assert (found[0].redundancy.blocks, found[0].redundancy.nodes_counted) == (5, 1)
    assert all(one is found[0] for one in found)
