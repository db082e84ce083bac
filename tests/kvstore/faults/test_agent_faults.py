"""An engine whose agent dies or stands still while it is asked, and an agent whose engines do.

The storage nodes stand still, so that what was asked of the agent is under way for as long as the
test wants; then the agent gets its signal.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import (
    AgentClient,
    ArenaRun,
    BlockLayout,
    FetchEnd,
    FetchResult,
    SaveResult,
    Section,
    StoreClient,
    agent_link,
    agent_runs,
    agent_session,
)
from kvstore.errors import AgentUnreachable
from tests.kvstore.agent.agent_process import ROOT, AgentProcess, short_folder
from tests.kvstore.blocks import RandomBlocks, save_in_full
from tests.kvstore.faults.lost_nodes import count_descriptors, stopped
from tests.patience import OPERATION_S, PATIENCE_S, WELL_BEFORE_S

LAYOUT = BlockLayout((Section("a", 4_000), Section("b", 8_000)))
WINDOW = BlockLayout((Section("w", 5_000),))
COUNT = 64
MARGIN_S = 0.2
"""What a client gives its agent beyond a deadline, where a test waits for that."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("agent-faults")
    with LocalCluster.start(folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20) as it:
        yield it


@pytest.fixture(scope="module")
def served(cluster: LocalCluster) -> Iterator[AgentProcess]:
    words = ("--arena", "8MiB", "--window-memory", "16MiB")
    with AgentProcess(cluster.cluster_path, words) as process:
        yield process


@pytest.fixture
def agent(served: AgentProcess) -> AgentProcess:
    """The agent, running, whatever a test before did to it."""
    served.revive()
    return served


@pytest.fixture
async def client(agent: AgentProcess) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(agent.socket_path) as opened:
        yield opened


@pytest.fixture
async def blocks(cluster: LocalCluster, request: pytest.FixtureRequest) -> RandomBlocks:
    """Blocks that are stored, under names that no other test has."""
    made = RandomBlocks(
        COUNT,
        block_bytes=LAYOUT.block_bytes,
        layout=LAYOUT,
        seed=3,
        tenant=f"{os.getpid()}-{request.node.name}",
    )
    async with StoreClient.connect(cluster.cluster_path) as store:
        assert (await store.save(made.namespace, made.keys, made.sources)).stored == COUNT
    return made


@contextmanager
def stalled(cluster: LocalCluster) -> Iterator[None]:
    """No node answers, so nothing ends before its deadline."""
    with stopped(cluster, cluster.node_names):
        yield


Operation = Callable[[AgentClient, RandomBlocks, float], Coroutine[Any, Any, object]]


async def match(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    return await client.match(blocks.namespace, blocks.keys, deadline_s=deadline_s)


async def match_prompt(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    tokens = np.arange(COUNT * 128, dtype=np.int32)
    return await client.match(blocks.namespace, tokens, deadline_s=deadline_s)


async def fetch(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    buffers = blocks.empty_target().blocks
    return await client.fetch(blocks.namespace, blocks.keys, buffers, deadline_s=deadline_s)


async def fetch_run(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    with await lease(client, blocks, deadline_s) as run:
        return await client.fetch_run(blocks.namespace, blocks.keys, run, deadline_s=deadline_s)


async def wait_for_a_section(
    client: AgentClient, blocks: RandomBlocks, deadline_s: float
) -> object:
    """By a thread, as an engine does."""
    with await lease(client, blocks, deadline_s) as run:
        fetch = client.fetch_run(blocks.namespace, blocks.keys, run, deadline_s=deadline_s)
        # The worker that dies with its agent may still say that nothing more comes.
        assert await asyncio.to_thread(run.wait_ready, 0, COUNT, deadline_s + 5) == 0
        return await fetch


async def save(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    return await client.save(
        blocks.namespace, new_keys(blocks), blocks.sources, deadline_s=deadline_s
    )


async def save_run(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    run = await lease(client, blocks, deadline_s)
    return await client.save_run(blocks.namespace, new_keys(blocks), run, deadline_s=deadline_s)


async def fetch_window(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    into = bytearray(WINDOW.block_bytes)
    return await client.fetch_window(blocks.namespace, blocks.keys[0], into, deadline_s=deadline_s)


async def lookup(client: AgentClient, blocks: RandomBlocks, deadline_s: float) -> object:
    return await client.lookup(blocks.namespace, blocks.keys, deadline_s=deadline_s)


async def lease(client: AgentClient, blocks: RandomBlocks, deadline_s: float = 1.0) -> ArenaRun:
    run = await client.lease_run(blocks.namespace, COUNT, deadline_s=deadline_s)
    assert run is not None
    assert run.blocks == COUNT
    return run


def new_keys(blocks: RandomBlocks) -> list[bytes]:
    return blocks.namespace.block_keys(np.full(COUNT * 128, os.getpid(), np.int32))


STALLING: list[Operation] = [
    match,
    match_prompt,
    fetch,
    fetch_run,
    wait_for_a_section,
    save,
    save_run,
]
"""What waits for storage nodes, in the agent or its workers."""
QUICK: list[Operation] = [fetch_window, lookup]
"""What an agent answers by itself: only one that stands still keeps its engine waiting."""


def stored_of(result: object) -> int:
    assert isinstance(result, SaveResult)
    return result.stored


async def fail(operation: Awaitable[object]) -> float:
    """Wait for AgentUnreachable, for less than OPERATION_S; how long it took."""
    begun_at_s = time.monotonic()
    async with asyncio.timeout(WELL_BEFORE_S):
        with pytest.raises(AgentUnreachable):
            await operation
    return time.monotonic() - begun_at_s


async def until_connected(client: AgentClient) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not client.is_connected:
            await asyncio.sleep(0.01)


async def check_all_is_well(client: AgentClient, blocks: RandomBlocks) -> None:
    """What was stored comes back, by the agent that there is now."""
    await until_connected(client)
    assert await client.match(blocks.namespace, blocks.keys) == COUNT
    target = blocks.empty_target()
    # The nodes that stood still may be shunned for a moment, which is a shorter run and no error.
    async with asyncio.timeout(PATIENCE_S):
        while True:
            result = await client.fetch(blocks.namespace, blocks.keys, target.blocks)
            if result.blocks == COUNT:
                break
    assert np.array_equal(target.area, blocks.area)


async def test_killed_agent_fails_what_is_under_way_at_once_and_another_one_is_used(
    cluster: LocalCluster, agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    await client.open_namespace(blocks.namespace)
    with stalled(cluster):
        waiting = [asyncio.create_task(one(client, blocks, OPERATION_S)) for one in STALLING]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        agent.process.kill()
        for task in waiting:
            await fail(task)
        for operation in STALLING:
            await fail(operation(client, blocks, OPERATION_S))
    agent.kill()
    agent.start()
    await check_all_is_well(client, blocks)


@pytest.mark.parametrize("operation", [*STALLING, *QUICK])
async def test_agent_that_stands_still_is_given_up_a_moment_after_the_deadline(
    cluster: LocalCluster,
    agent: AgentProcess,
    client: AgentClient,
    blocks: RandomBlocks,
    operation: Operation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await client.open_namespace(blocks.namespace, window_layout=WINDOW)
    agent.process.send_signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(agent_session, "ANSWER_MARGIN_S", MARGIN_S)
            patch.setattr(agent_link, "CONNECT_DEADLINE_S", PATIENCE_S)
            patch.setattr(agent_link, "OPEN_DEADLINE_S", PATIENCE_S)
            took_s = await fail(operation(client, blocks, 0.3))
            assert took_s > MARGIN_S, "it was silence that failed it"
            # Nobody waits for it again until it answers.
            await fail(operation(client, blocks, OPERATION_S))
    finally:
        agent.process.send_signal(signal.SIGCONT)
    await check_all_is_well(client, blocks)


async def test_engine_reads_nothing_of_a_run_after_its_agent_is_gone(
    agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    run = await lease(client, blocks)
    await client.fetch_run(blocks.namespace, blocks.keys, run)
    assert run.ready_blocks(1) == COUNT
    agent.kill()
    async with asyncio.timeout(PATIENCE_S):
        while client.is_connected:
            await asyncio.sleep(0.005)
    for use in (lambda: run.section(0), lambda: run.ready_blocks(0), lambda: run.address):
        with pytest.raises(AgentUnreachable):
            use()
    run.release()


async def test_descriptors_and_mappings_do_not_grow_with_agents_that_die(
    agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    async def live_and_die() -> None:
        await until_connected(client)
        run = await lease(client, blocks)
        await client.fetch_run(blocks.namespace, blocks.keys, run)
        agent.kill()
        async with asyncio.timeout(PATIENCE_S):
            while client.is_connected:
                await asyncio.sleep(0.005)
        run.release()
        agent.start()

    def count_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("cachalot-arena")

    await live_and_die()
    await until_connected(client)
    before = (count_descriptors(), count_mappings())
    for _ in range(2):
        await live_and_die()
    await until_connected(client)
    assert (count_descriptors(), count_mappings()) == before


@pytest.mark.slow
@pytest.mark.parametrize("operation", [fetch_run, fetch, save_run, save])
async def test_agent_that_stops_in_the_middle_is_given_up_as_well(
    cluster: LocalCluster,
    agent: AgentProcess,
    client: AgentClient,
    blocks: RandomBlocks,
    operation: Operation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await client.open_namespace(blocks.namespace)
    monkeypatch.setattr(agent_runs, "WORKER_END_S", 0.8)
    with stalled(cluster), monkeypatch.context() as patch:
        patch.setattr(agent_session, "ANSWER_MARGIN_S", MARGIN_S)
        waiting = asyncio.create_task(operation(client, blocks, 4.0))
        await asyncio.sleep(0.2)
        agent.process.send_signal(signal.SIGSTOP)
        try:
            if operation in (fetch, save):
                async with asyncio.timeout(PATIENCE_S):
                    result = await waiting
                found = result.blocks if isinstance(result, FetchResult) else stored_of(result)
                assert found == 0
            else:
                await fail(waiting)
        finally:
            agent.process.send_signal(signal.SIGCONT)
    await check_all_is_well(client, blocks)


async def worker_of(client: AgentClient, kind: str) -> int:
    """Process id of the agent's one worker of a kind, once it serves."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (worker,) = (await client.status())[kind]["workers"]
            if worker["state"] == "ready":
                return int(worker["pid"])
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("operation", [fetch_run, fetch, save_run, save])
async def test_worker_that_stands_still_costs_its_job_and_not_the_session(
    agent: AgentProcess, client: AgentClient, blocks: RandomBlocks, operation: Operation
) -> None:
    """The agent takes two seconds beyond the deadline to be rid of it: the client took that for an
    agent that stands still, and lost all its runs."""
    other_run = await lease(client, blocks)
    kind = "store" if operation in (save, save_run) else "fetch"
    os.kill(await worker_of(client, kind), signal.SIGSTOP)
    result = await operation(client, blocks, 0.3)
    if isinstance(result, FetchResult):
        assert (result.blocks, result.ended) == (0, FetchEnd.DEADLINE)
    else:
        assert stored_of(result) == 0
    assert client.is_connected
    other_run.section(0)
    other_run.release()
    await check_all_is_well(client, blocks)


# Window state of another host ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalCluster]:
    """Two hosts, of which the second one is harmed."""
    folder = short_folder()
    with LocalCluster.start(
        folder / "c", nodes=1, k=1, m=0, target_size_bytes=64 << 20, agents=2
    ) as it:
        yield it
    shutil.rmtree(folder)


# What is killed comes last: it is not started again.
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_window_state_is_lost_with_its_host_and_nobody_waits_for_it(
    pair: LocalCluster, number: signal.Signals
) -> None:
    made = RandomBlocks(1, block_bytes=LAYOUT.block_bytes, layout=LAYOUT, seed=int(number))
    namespace, (key,) = made.namespace, made.keys
    record = os.urandom(WINDOW.block_bytes)
    sockets = [pair.agents.socket(name) for name in ("a01", "a02")]
    async with AgentClient.connect(sockets[0]) as here, AgentClient.connect(sockets[1]) as far:
        for client in (here, far):
            await client.open_namespace(namespace, window_layout=WINDOW)
        assert await far.put_window(namespace, key, record)
        into = bytearray(WINDOW.block_bytes)
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await here.fetch_window(namespace, key, into)).is_found:
                await asyncio.sleep(0.02)
        assert into == record
        assert found.host == (await here.lookup(namespace, [key]))[0] != ""
        pair.agents.kill("a02", number)
        # Nobody ends it for the one that stands still.
        deadline_s = 0.5 if number == signal.SIGSTOP else OPERATION_S
        async with asyncio.timeout(WELL_BEFORE_S):
            lost = await here.fetch_window(namespace, key, into, deadline_s=deadline_s)
        assert not lost.is_found
        if number == signal.SIGSTOP:
            pair.agents.kill("a02", signal.SIGCONT)


# Arena that is too small --------------------------------------------------------------------------


async def test_block_larger_than_the_arena_is_a_miss_and_is_not_saved(
    cluster: LocalCluster,
) -> None:
    large = RandomBlocks(2, block_bytes=4 << 20, seed=9, tenant=f"large {os.getpid()}")
    words = ("--arena", "2MiB", "--window-memory", "16MiB")
    with AgentProcess(cluster.cluster_path, words) as small:
        async with AgentClient.connect(small.socket_path) as client:
            saved = await client.save(large.namespace, large.keys, large.sources, deadline_s=0.5)
            assert (saved.stored, saved.failed) == (0, 2)
            fetched = await client.fetch(
                large.namespace, large.keys, large.empty_target().blocks, deadline_s=0.5
            )
            assert (fetched.blocks, fetched.ended) == (0, FetchEnd.DEADLINE)
            assert await client.lease_run(large.namespace, 1, deadline_s=0.5) is None


# Engines that die or stand still ------------------------------------------------------------------

ENGINE = """
import sys, time
from kvstore.client import AgentClient, BlockLayout, Section
from tests.kvstore.blocks import RandomBlocks

layout = BlockLayout((Section("a", 4_000), Section("b", 8_000)))
blocks = RandomBlocks(64, block_bytes=12_000, layout=layout, seed=3, tenant=sys.argv[2])
with AgentClient.open(sys.argv[1]) as client:
    runs = [client.lease_run(blocks.namespace, 64) for _ in range(int(sys.argv[3]))]
    client.fetch_run(blocks.namespace, blocks.keys, runs[0], deadline_s=60)
    print(sum(run.blocks for run in runs), flush=True)
    time.sleep(600)
"""


@contextmanager
def engine(agent: AgentProcess, blocks: RandomBlocks, runs: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has leased runs and begun to fetch into the first of them."""
    words = [str(agent.socket_path), blocks.namespace.tenant, str(runs)]
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{64 * runs}\n"
            yield process
        finally:
            process.kill()


async def until_runs(client: AgentClient, runs: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await client.status())["arena"]["runs"] != runs:
            await asyncio.sleep(0.02)


async def test_runs_of_a_killed_engine_return_to_the_arena_also_those_being_fetched_into(
    cluster: LocalCluster, agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    with stalled(cluster), engine(agent, blocks, runs=3) as process:
        await until_runs(client, 3)
        assert (await client.status())["fetch"]["running"] == 1
        process.kill()
        await until_runs(client, 0)
        assert (await client.status())["fetch"]["running"] == 0
        whole = await client.lease_run(blocks.namespace, 10_000)
        assert whole is not None
        assert whole.blocks > 600
        whole.release()


async def test_engine_that_stands_still_holds_up_nobody_else(
    agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    with engine(agent, blocks, runs=6) as process:
        process.send_signal(signal.SIGSTOP)
        await check_all_is_well(client, blocks)
        keys = new_keys(blocks)
        stored, known = await save_in_full(
            lambda: client.save(blocks.namespace, keys, blocks.sources)
        )
        assert stored + known == COUNT
        # What it has leased is its own, until it dies.
        async with asyncio.timeout(WELL_BEFORE_S):
            some = await client.lease_run(blocks.namespace, 10_000, deadline_s=0.3)
        assert some is not None
        assert COUNT < some.blocks < 400
        some.release()
        process.kill()
        await until_runs(client, 0)
