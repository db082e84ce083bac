"""Real nodes and agents for tests of sources and sinks, whose conftest imports the fixtures."""

from collections.abc import Iterator

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockingAgentClient
from tests.engine.waiting import wait_until
from tests.kvstore.agent.agent_process import AgentProcess

ARENA_WORDS = ("--arena", "4MiB", "--window-memory", "16MiB")


def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> LocalCluster:
    folder = tmp_path_factory.mktemp("cluster")
    return LocalCluster.start(folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """For tests that do it no harm."""
    with start_cluster(tmp_path_factory) as started:
        yield started


@pytest.fixture(scope="module")
def frail_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One whose nodes a test may stop; they go on after it."""
    with start_cluster(tmp_path_factory) as started:
        yield started


@pytest.fixture(scope="session")
def shared_agent(cluster: LocalCluster) -> Iterator[AgentProcess]:
    """For tests that do it no harm."""
    with AgentProcess(cluster.cluster_path, ARENA_WORDS) as process:
        yield process


@pytest.fixture(scope="session")
def client(shared_agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(shared_agent.socket_path, name="engine") as opened:
        yield opened


@pytest.fixture(scope="module")
def frail_agent(frail_cluster: LocalCluster) -> Iterator[AgentProcess]:
    with AgentProcess(frail_cluster.cluster_path, ARENA_WORDS) as process:
        yield process


@pytest.fixture
def agent(frail_agent: AgentProcess) -> AgentProcess:
    """One that the test may stop or kill: it runs when the next one begins, and no engine has
    anything of it."""
    frail_agent.revive()
    wait_until(lambda: frail_agent.status()["arena"]["runs"] == 0)
    return frail_agent


@pytest.fixture
def own_client(agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(agent.socket_path, name="engine") as opened:
        yield opened
