"""What an engine sees of a fetch in layer order through a real agent, while it is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from kvstore.client import AgentClient, ArenaRun, FetchEnd, StoreClient

from .agent_process import AgentProcess
from .arena_runs import SectionedBlocks

COUNT = 512
LEAST_LEAD_BLOCKS = 128
"""Block order tells of a span at a time, so its first section is never that far ahead."""
ATTEMPTS_MAX = 10
"""This process may be late to look, on a busy machine."""


@pytest.fixture(scope="module")
def agent(cluster_path: str) -> Iterator[AgentProcess]:
    with AgentProcess(cluster_path, ("--arena", "80MiB", "--roles", "check,fetch,store")) as it:
        yield it


@pytest.fixture
async def client(agent: AgentProcess) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(agent.socket_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def stored(cluster_path: str) -> SectionedBlocks:
    blocks = SectionedBlocks(COUNT, seed=77)

    async def save() -> None:
        async with StoreClient.connect(cluster_path) as store:
            for end in range(128, COUNT + 1, 128):
                keys, sources = blocks.keys[:end], list(blocks.blocks[end - 128 : end])
                first = end - 128
                result = await store.save(blocks.namespace, keys, sources, first_block=first)
                assert result.failed == 0, result

    asyncio.run(save())
    return blocks


async def fetch_watched(
    client: AgentClient, blocks: SectionedBlocks, run: ArenaRun, *, is_by_layer: bool
) -> int:
    """Compares every byte that is called ready as soon as it is; the longest lead that the first
    section had on the last one, in blocks."""
    for section in range(4):
        run.section(section)[:] = bytes(len(run.section(section)))
    fetch = client.fetch_run(blocks.namespace, blocks.keys, run, is_by_layer=is_by_layer)
    seen, lead = [0] * 4, 0
    is_last = False
    while not is_last:
        is_last = fetch.is_done
        ready = [run.ready_blocks(section) for section in range(4)]
        lead = max(lead, ready[0] - ready[3])
        for section, (before, now) in enumerate(zip(seen, ready, strict=True)):
            if now > before:
                size = blocks.namespace.layout.sections[section].bytes
                found = np.frombuffer(run.section(section), np.uint8)[before * size : now * size]
                assert np.array_equal(found, blocks.section(section, before, now)), section
        seen = ready
        await asyncio.sleep(0)
    result = await fetch
    assert (result.blocks, result.ended) == (COUNT, FetchEnd.COMPLETE)
    assert seen == [COUNT] * 4
    return lead


async def test_first_section_of_all_blocks_is_ready_long_before_the_last_one_in_layer_order(
    client: AgentClient, stored: SectionedBlocks
) -> None:
    run = await client.lease_run(stored.namespace, COUNT)
    assert run is not None
    with run:
        for _ in range(ATTEMPTS_MAX):
            lead = await fetch_watched(client, stored, run, is_by_layer=True)
            if lead >= LEAST_LEAD_BLOCKS:
                return
    pytest.fail(f"it was {lead} blocks ahead")


async def test_sections_go_together_in_block_order(
    client: AgentClient, stored: SectionedBlocks
) -> None:
    run = await client.lease_run(stored.namespace, COUNT)
    assert run is not None
    with run:
        assert await fetch_watched(client, stored, run, is_by_layer=False) < LEAST_LEAD_BLOCKS
