"""Window state across real agents: put on one host, found and fetched on another, with faults.

Three agents of one cluster, each an entrypoint, started as `cachalot up --agents 3` does.
"""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient
from kvstore.key import Namespace
from kvstore.layout import BlockLayout, Section
from tests.kvstore.window.hosts import V41_LAYOUT, bytes_of, key_of
from tests.patience import OPERATION_S, PATIENCE_S, WELL_BEFORE_S

NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", layout=BlockLayout((Section("kv", 8192),))
)
RECORDS = range(12)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    try:
        with LocalCluster.start(
            folder / "c", nodes=2, k=1, m=1, target_size_bytes=64 << 20, agents=3
        ) as it:
            yield it
    finally:
        shutil.rmtree(folder)


def record_of(number: int) -> bytes:
    return bytes_of(number, V41_LAYOUT.block_bytes)


async def put_all(agent: AgentClient) -> None:
    for number in RECORDS:
        assert await agent.put_window(NAMESPACE, key_of(number), record_of(number))


async def fetch(agent: AgentClient, number: int, *, deadline_s: float = OPERATION_S) -> bool:
    into = bytearray(V41_LAYOUT.block_bytes)
    found = await agent.fetch_window(NAMESPACE, key_of(number), into, deadline_s=deadline_s)
    assert not found.is_found or into == record_of(number)
    return found.is_found


async def wait_until_found(agent: AgentClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while None in await agent.lookup(NAMESPACE, [key_of(number) for number in RECORDS]):
            await asyncio.sleep(0.1)


async def wait_until_fetched(agent: AgentClient, number: int) -> None:
    """A lookup may come too late, and a host that was late is left alone for a moment."""
    async with asyncio.timeout(PATIENCE_S):
        while not await fetch(agent, number):
            await asyncio.sleep(0.1)


async def test_state_is_found_on_another_host_through_the_faults_of_all(
    cluster: LocalCluster,
) -> None:
    agents = cluster.agents
    async with (
        AgentClient.connect(agents.socket("a01")) as maker,
        AgentClient.connect(agents.socket("a02")) as reader,
    ):
        for agent in (maker, reader):
            await agent.open_namespace(NAMESPACE, window_layout=V41_LAYOUT)
        await put_all(maker)
        await wait_until_found(reader)
        for number in RECORDS:
            await wait_until_fetched(reader, number)
        # An entrypoint dies: its share moves to the others.
        agents.kill("a03", signal.SIGKILL)
        await wait_until_found(reader)
        # The maker stands still: a fetch keeps its deadline, and is a miss.
        agents.kill("a01", signal.SIGSTOP)
        async with asyncio.timeout(WELL_BEFORE_S):
            assert not await fetch(reader, 1, deadline_s=0.4)
        agents.kill("a01", signal.SIGCONT)
        await wait_until_found(reader)
        await wait_until_fetched(reader, 2)
        # The maker dies: its records are gone with it.
        agents.kill("a01", signal.SIGKILL)
        async with asyncio.timeout(WELL_BEFORE_S):
            assert not await fetch(reader, 3)
