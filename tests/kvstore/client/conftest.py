"""A peer and an agent that the test plays, with their clients; a smaller cluster of real nodes."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient
from kvstore.client.channel import NodeChannel
from kvstore.client.health import Breaker, NodeHealth
from tests.kvstore.client.scripted_agent import ScriptedAgent
from tests.kvstore.client.scripted_peer import CLUSTER, TARGET, Dial, ScriptedPeer


@pytest.fixture
def peer() -> Iterator[ScriptedPeer]:
    with ScriptedPeer() as it:
        yield it


@pytest.fixture
def agent() -> Iterator[ScriptedAgent]:
    """An agent that the test plays."""
    with ScriptedAgent() as it:
        yield it


@pytest.fixture
async def client(agent: ScriptedAgent) -> AsyncIterator[AgentClient]:
    """Its client."""
    made = AgentClient(agent.path, name="test")
    yield made
    made.close()
    await made.end_background()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, never listening."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """Makes channels, and checks at the end that no exception escaped into the event loop."""
    loop = asyncio.get_running_loop()
    escaped: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: escaped.append(context))
    channels: list[NodeChannel] = []

    def make(
        port: int, *, host: str = "127.0.0.1", breaker_clock: Callable[[], float] = time.monotonic
    ) -> NodeChannel:
        channels.append(
            NodeChannel(
                node="n01",
                address=(host, port),
                cluster=CLUSTER,
                target=TARGET,
                target_index=3,
                epoch=7,
                health=NodeHealth(time.monotonic, Breaker(breaker_clock)),
                loop=loop,
                clock=time.monotonic,
            )
        )
        return channels[-1]

    yield make
    for channel in channels:
        channel.close()
    await asyncio.sleep(0)
    assert not escaped


@pytest.fixture(scope="session")
def small_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Six healthy nodes, code 4+2."""
    folder = tmp_path_factory.mktemp("small-cluster")
    with LocalCluster.start(
        folder / "c", nodes=6, k=4, m=2, target_size_bytes=256 << 20
    ) as cluster:
        yield cluster
