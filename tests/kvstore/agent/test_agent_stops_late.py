"""An agent that is to stop while its saves cannot end yet, and one that is told another TTL."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockLayout, Section, StoreClient
from kvstore.retention import DEFAULT_POLICY
from tests.kvstore.agent.test_policy_follower import tell_a_node
from tests.patience import PATIENCE_S

from .agent_process import AgentProcess, short_folder
from .arena_runs import SectionedBlocks

RUNS, BLOCKS = 4, 16
SHORT_TTL_S = 1
NODES_STAND_STILL_S = 1.5
"""Longer than an agent waits for anything else when it stops."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    folder = short_folder()
    with LocalCluster.start(folder / "c", nodes=2, k=1, m=1, target_size_bytes=64 << 20) as it:
        yield it
    shutil.rmtree(folder)


async def test_agent_that_stops_waits_for_nodes_that_are_slow_to_save(
    cluster: LocalCluster,
) -> None:
    """More runs than are saved at one time: some still wait in the queue when it is told to."""
    blocks = SectionedBlocks(RUNS * BLOCKS, seed=78)
    with AgentProcess(cluster.cluster_path) as agent:
        async with AgentClient.connect(agent.socket_path) as client:
            runs = [await client.lease_run(blocks.namespace, BLOCKS) for _ in range(RUNS)]
            for name in cluster.node_names:
                cluster.kill(name, signal.SIGSTOP)
            saves = []
            for number, run in enumerate(runs):
                assert run is not None
                first = number * BLOCKS
                for section in range(4):
                    np.frombuffer(run.section(section), np.uint8)[:] = blocks.section(
                        section, first, first + BLOCKS
                    )
                keys = blocks.keys[: first + BLOCKS]
                saves.append(client.save_run(blocks.namespace, keys, run, first_block=first))
            agent.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(NODES_STAND_STILL_S)
            for name in cluster.node_names:
                cluster.kill(name, signal.SIGCONT)
            stored = [(await save).stored for save in saves]
        assert stored == [BLOCKS] * RUNS
        assert agent.process.wait(PATIENCE_S) == 0
    async with StoreClient.connect(cluster.cluster_path) as store:
        assert await store.match(blocks.namespace, blocks.keys) == RUNS * BLOCKS


@pytest.mark.slow
async def test_agent_obeys_another_ttl_of_window_state(
    cluster: LocalCluster,
) -> None:
    layout = BlockLayout((Section("w", 5_000),))
    namespace, key = SectionedBlocks(1, seed=79).namespace, b"k" * 32
    with AgentProcess(cluster.cluster_path) as agent:
        async with AgentClient.connect(agent.socket_path) as client:
            await client.open_namespace(namespace, window_layout=layout)
            assert await client.put_window(namespace, key, bytes(5_000))
            assert await client.lookup(namespace, [key]) == [""]
            policy = DEFAULT_POLICY.with_setting(
                "window_ttl_s", SHORT_TTL_S, who="test", why="shorter", at_s=1
            )
            await tell_a_node(cluster.map, policy)
            async with asyncio.timeout(PATIENCE_S):
                while await client.lookup(namespace, [key]) == [""]:
                    await asyncio.sleep(0.1)
