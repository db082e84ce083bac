"""Engines that die or stand still in the middle of a match, a save or a window fetch.

Each is a process. What it asked for is under way for as long as the test wants, because the storage
nodes, or the other host that has the window state, stand still. (Fetches: test_agent_faults.)
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockLayout, Section
from kvstore.window.partition import choose_entrypoint
from tests.kvstore.agent.agent_process import ROOT
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.faults.lost_nodes import stopped
from tests.patience import PATIENCE_S

LAYOUT = BlockLayout((Section("a", 4_000), Section("b", 8_000)))
WINDOW = BlockLayout((Section("w", 50_000),))
COUNT = 32
HOME, OTHER = "a01", "a02"

ENGINE = """
import sys
from kvstore.client import AgentClient, BlockLayout, Section
from tests.kvstore.blocks import RandomBlocks

socket, operation, tenant, key = sys.argv[1:]
layout = BlockLayout((Section("a", 4_000), Section("b", 8_000)))
blocks = RandomBlocks(32, block_bytes=12_000, layout=layout, seed=3, tenant=tenant)
with AgentClient.open(socket) as agent:
    window = BlockLayout((Section("w", 50_000),))
    agent.open_namespace(blocks.namespace, window_layout=window)
    print("begins", flush=True)
    if operation == "match":
        agent.match(blocks.namespace, blocks.keys, deadline_s=60)
    elif operation == "save":
        agent.save(blocks.namespace, blocks.keys, blocks.sources, deadline_s=60)
    else:
        into = bytearray(window.block_bytes)
        agent.fetch_window(blocks.namespace, bytes.fromhex(key), into, deadline_s=60)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    try:
        with LocalCluster.start(
            folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20, agents=2
        ) as it:
            yield it
    finally:
        shutil.rmtree(folder)


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(cluster.agents.socket(HOME)) as opened:
        yield opened


@pytest.fixture
def blocks(request: pytest.FixtureRequest) -> RandomBlocks:
    tenant = f"{os.getpid()}-{request.node.name}"
    return RandomBlocks(COUNT, block_bytes=LAYOUT.block_bytes, layout=LAYOUT, seed=3, tenant=tenant)


@contextmanager
def engine(
    cluster: LocalCluster, operation: str, blocks: RandomBlocks, key: bytes = b""
) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun with an operation, or is just about to."""
    words = [str(cluster.agents.socket(HOME)), operation, blocks.namespace.tenant, key.hex()]
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            yield process
        finally:
            process.kill()


async def until(client: AgentClient, **wanted: int) -> None:
    """Until the status says so; names are "part__field"."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await client.status()
            found = {name: status[name.split("__")[0]][name.split("__")[1]] for name in wanted}
            if found == wanted:
                return
            await asyncio.sleep(0.02)


NOTHING_LEFT = {"sessions__open": 1, "sessions__requests": 0, "arena__runs": 0}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_match_of_an_engine_is_given_up_when_it_is_killed_and_holds_up_nobody_when_it_is(
    cluster: LocalCluster, client: AgentClient, blocks: RandomBlocks, number: signal.Signals
) -> None:
    with stopped(cluster, cluster.node_names), engine(cluster, "match", blocks) as process:
        await until(client, sessions__open=2, sessions__requests=1)
        process.send_signal(number)
        if number == signal.SIGSTOP:
            assert await client.lookup(blocks.namespace, blocks.keys) == [None] * COUNT
            process.kill()
        await until(client, **NOTHING_LEFT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_blocks_that_an_engine_has_handed_over_are_saved_whatever_becomes_of_it(
    cluster: LocalCluster, client: AgentClient, blocks: RandomBlocks, number: signal.Signals
) -> None:
    with ExitStack() as stack:
        with stopped(cluster, cluster.node_names):
            process = stack.enter_context(engine(cluster, "save", blocks))
            async with asyncio.timeout(PATIENCE_S):
                while (await client.status())["arena"]["runs_by_state"]["storing"] == 0:
                    await asyncio.sleep(0.01)
            process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            while await client.match(blocks.namespace, blocks.keys) < COUNT:
                await asyncio.sleep(0.05)
        process.kill()
        await until(client, **NOTHING_LEFT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_run_of_a_window_fetch_comes_back_when_its_engine_is_killed(
    cluster: LocalCluster, client: AgentClient, blocks: RandomBlocks, number: signal.Signals
) -> None:
    names = [one.name for one in cluster.map.entrypoints]
    candidates = (bytes([one]) * 32 for one in range(1, 250))
    # The entry is with the host that goes on.
    key = next(key for key in candidates if choose_entrypoint(key, names) == HOME)
    async with AgentClient.connect(cluster.agents.socket(OTHER)) as other:
        for one in (other, client):
            await one.open_namespace(blocks.namespace, window_layout=WINDOW)
        assert await other.put_window(blocks.namespace, key, bytes(WINDOW.block_bytes))
        into = bytearray(WINDOW.block_bytes)
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.fetch_window(blocks.namespace, key, into)).is_found:
                await asyncio.sleep(0.05)
        cluster.agents.kill(OTHER, signal.SIGSTOP)
        try:
            with engine(cluster, "fetch_window", blocks, key) as process:
                await until(client, arena__runs=1, sessions__requests=1)
                process.send_signal(number)
                if number == signal.SIGSTOP:
                    assert not (await client.fetch_window(blocks.namespace, key, into)).is_found
                    process.kill()
                await until(client, **NOTHING_LEFT)
        finally:
            cluster.agents.kill(OTHER, signal.SIGCONT)
