"""Agents and models that the tests of hand-over share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.load import load_runner
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockingAgentClient
from tests.engine.handover.bench import Handover, arena_runs
from tests.engine.handover.lone_engine import LoneEngine, OpenEngine, nano_runner
from tests.engine.handover.waiting import wait_for
from tests.kvstore.agent.agent_process import AgentProcess

AGENT_WORDS = ("--arena", "16MiB", "--window-memory", "4MiB")


@pytest.fixture(scope="session")
def handover_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nobody saves or fetches here, but no agent begins without a cluster."""
    folder = tmp_path_factory.mktemp("handover")
    with LocalCluster.start(folder / "c", nodes=1, k=1, m=0, target_size_bytes=64 << 20) as cluster:
        yield cluster.cluster_path


@pytest.fixture(scope="session")
def agent(handover_cluster: Path) -> Iterator[AgentProcess]:
    """One that no test harms."""
    with AgentProcess(handover_cluster, AGENT_WORDS) as process:
        yield process


@pytest.fixture(scope="session")
def other_process(handover_cluster: Path) -> Iterator[AgentProcess]:
    with AgentProcess(handover_cluster, AGENT_WORDS) as process:
        yield process


@pytest.fixture
def other_agent(other_process: AgentProcess) -> AgentProcess:
    """That of another host, which a test may end."""
    if other_process.process.poll() is not None:
        other_process.start()
    return other_process


@pytest.fixture
def client(agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(agent.socket_path, name="handover") as opened:
        yield opened


@pytest.fixture
def other_client(other_agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(other_agent.socket_path, name="handover") as opened:
        yield opened


@pytest.fixture(params=["llama", "v41"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_engine(family: str, tiny_path: Path) -> OpenEngine:
    """An engine with pools of its own, full of `fill` at first; equal ones make equal bits."""

    def open_one(*, pool_blocks: int = 8, slots: int = 2, fill: int = 0) -> LoneEngine:
        if family == "v41":
            return LoneEngine(nano_runner(pool_blocks=pool_blocks, slots=slots, fill=fill))
        loaded = load_runner(
            tiny_path, pool_blocks=pool_blocks, state_slots=slots, compute="float32"
        )
        loaded.runner.pool.memory.fill_(fill)
        return LoneEngine(loaded.runner)

    return open_one


@pytest.fixture
def handover(
    open_engine: OpenEngine, client: BlockingAgentClient, agent: AgentProcess
) -> Iterator[Handover]:
    """Whatever the test does, at its end pools, slots and the arena are as they were."""
    made = Handover.between(open_engine, client, client)
    free = made.source.free(), made.target.free()
    yield made
    made.close()
    assert (made.source.free(), made.target.free()) == free
    wait_for(lambda: arena_runs(agent) == 0)
