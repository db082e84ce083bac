"""An agent obeys the newest policy that any storage node has told."""

import asyncio
import dataclasses
import socket
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.agent.policy_follower import NODES_ASKED_MAX, PolicyFollower
from kvstore.client import StoreClient
from kvstore.client.inquiry import ask_node
from kvstore.client.router import Lane, Router
from kvstore.cluster.entities import ClusterMap
from kvstore.errors import NodeError, NodeUnreachable
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from kvstore.wire import Op
from tests.kvstore.window.hosts import MovedClock, map_of

NEWER = DEFAULT_POLICY.with_setting("window_ttl_s", 60, who="test", why="shorter", at_s=1)
NEWEST = NEWER.with_setting("window_ttl_s", 30, who="test", why="still shorter", at_s=2)


class Nodes:
    """Nodes that answer with these policies or errors, in turn."""

    def __init__(self, *answers: RetentionPolicy | NodeError) -> None:
        self.answers = list(answers)
        self.turns: list[int] = []

    async def ask_policy(self, *, turn: int = 0, deadline_s: float = 1.0) -> RetentionPolicy:
        assert 0 < deadline_s <= 2.0
        self.turns.append(turn)
        answer = self.answers.pop(0)
        if isinstance(answer, NodeError):
            raise answer
        return answer


DOWN = NodeUnreachable("n01", "refused")


async def test_newest_policy_stays_whatever_other_nodes_say() -> None:
    nodes = Nodes(NEWER, DEFAULT_POLICY, NEWEST, NEWER)
    follower = PolicyFollower(nodes, sleep=asyncio.sleep, first_turn=7)
    assert follower.window_ttl_s() == 180.0
    ttls = []
    for _ in range(4):
        assert await follower.look()
        ttls.append(follower.window_ttl_s())
    assert ttls == [60.0, 60.0, 30.0, 30.0]
    assert nodes.turns == [8, 9, 10, 11]


async def test_next_node_is_asked_when_one_is_silent() -> None:
    follower = PolicyFollower(Nodes(DOWN, DOWN, NEWER), sleep=asyncio.sleep)
    assert await follower.look()
    assert follower.window_ttl_s() == 60.0


async def test_policy_stays_and_is_told_once_when_all_are_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = Nodes(NEWER, *[DOWN] * (2 * NODES_ASKED_MAX))
    follower = PolicyFollower(nodes, sleep=asyncio.sleep)
    assert await follower.look()
    assert not await follower.look()
    assert not await follower.look()
    assert follower.window_ttl_s() == 60.0
    assert len([r for r in caplog.records if "no storage node" in r.getMessage()]) == 1


async def test_it_asks_again_after_each_pause() -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    follower = PolicyFollower(Nodes(DEFAULT_POLICY, NEWER, NEWEST), sleep=pause)
    try:
        await follower.run()
    except asyncio.CancelledError:
        assert pauses == [5.0] * 3
    assert follower.policy == NEWEST


async def test_change_reaches_an_agent_from_real_nodes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with LocalCluster.start(folder, nodes=2, k=1, m=1, target_size_bytes=64 << 20) as cluster:
        async with StoreClient.connect(cluster.cluster_path) as store:
            follower = PolicyFollower(store, sleep=asyncio.sleep)
            assert await follower.look()
            assert follower.policy == DEFAULT_POLICY
            await tell_a_node(cluster.map, NEWER)
            # The other node knows nothing of it yet; two looks ask both.
            assert await follower.look()
            assert await follower.look()
            assert follower.window_ttl_s() == 60.0


async def tell_a_node(cluster_map: ClusterMap, policy: RetentionPolicy) -> None:
    loop = asyncio.get_running_loop()
    router = Router(cluster_map, loop, loop.time)
    document = policy.to_json()
    channel = router.channel(cluster_map.targets[0].name, Lane.WRITE)
    await ask_node(
        channel, Op.POLICY, body=document, count=len(document), deadline_s=5.0, loop=loop
    )
    router.close()


async def test_store_without_nodes_is_no_policy_and_no_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        refusing = f"127.0.0.1:{holder.getsockname()[1]}"
        cluster_map = map_of([])
        nodes = tuple(dataclasses.replace(node, address=refusing) for node in cluster_map.nodes)
        store = StoreClient(dataclasses.replace(cluster_map, nodes=nodes), clock=MovedClock())
        follower = PolicyFollower(store, sleep=asyncio.sleep)
        assert not await follower.look()
        assert follower.policy == DEFAULT_POLICY
        store.close()
