"""A run as its engine has it: what is ready, who waits for it, who may use it."""

import asyncio
import os

import pytest

from kvstore.agent_messages import FetchEnded, Refused, ReleaseRun, StoreEnded, StoreRun
from kvstore.arena.progress import ProgressWriter, begin_table
from kvstore.client import AgentClient, FetchEnd
from kvstore.errors import AgentRefused, AgentUnreachable, InvalidArgument
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.client.agent_meeting import KEYS, NAMESPACE, begin, meet
from tests.kvstore.client.scripted_agent import ScriptedAgent


async def test_nothing_is_ready_before_the_agent_has_begun_whatever_the_memory_holds(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    begin_table(theirs.memory, [(0, 3)])
    ProgressWriter(theirs.memory, 0).set_ready(0, 3)
    assert (run.ready_blocks(0), run.is_ended) == (0, True)
    fetch = await client.fetch_run(NAMESPACE, KEYS, run)
    assert (run.ready_blocks(0), run.is_ended) == (0, False)
    assert await run.until_ready(0, 1, 0.01) == 0
    assert not fetch.is_done


async def test_sections_are_ready_as_the_table_says(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    fetch = await client.fetch_run(NAMESPACE, KEYS, run)
    request_id, request = await end.begin_fetch()
    assert (request.run, request.first_block, request.is_by_layer) == (5, 0, True)
    begin_table(theirs.memory, [(0, 3)])
    writer = ProgressWriter(theirs.memory, 0)
    in_loop = asyncio.create_task(run.until_ready(0, 2, 5))
    in_thread = asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 2, 5))
    await asyncio.sleep(0.02)
    writer.set_ready(0, 1)
    theirs.ring()
    await asyncio.sleep(0.02)
    assert not in_loop.done()
    writer.set_ready(0, 2)
    theirs.ring()
    # Two who wait at once may take each other's event; each looks again at the next.
    await asyncio.sleep(0.02)
    theirs.ring()
    theirs.ring()
    assert await in_loop == 2
    theirs.ring()
    assert await in_thread == 2
    await end.answer(request_id, FetchEnded(2, FetchEnd.TOO_FEW_SHARDS.value))
    result = await fetch
    assert (result.blocks, result.ended) == (2, FetchEnd.TOO_FEW_SHARDS)
    assert run.is_ended
    assert await run.until_ready(0, 3, 5) == 2
    assert run.wait_ready(0, 3, 5) == 2


async def test_end_of_a_fetch_wakes_who_waits_although_no_worker_wrote_it(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    fetch = await client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    request_id, _ = await end.begin_fetch()
    waiting = asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 3, 30))
    await asyncio.sleep(0.02)
    await end.answer(request_id, FetchEnded(0, FetchEnd.DEADLINE.value))
    async with asyncio.timeout(1):
        assert await waiting == 0
        assert await asyncio.to_thread(fetch.join) == await fetch


async def test_end_of_a_fetch_stays_visible_to_all_who_come_late(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    """Who wakes first must not take the event of the end from the others."""
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    fetch = await client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    request_id, _ = await end.begin_fetch()
    await end.answer(request_id, FetchEnded(0, FetchEnd.DEADLINE.value))
    await fetch
    async with asyncio.timeout(1):
        for _ in range(3):
            await run.until_changed(30)


async def test_who_waits_for_a_run_without_a_fetch_is_woken_when_the_agent_dies(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    waiting = asyncio.create_task(run.until_changed(30))
    await asyncio.sleep(0.02)
    agent.stop_listening()
    end.close()
    async with asyncio.timeout(1):
        await waiting
    with pytest.raises(AgentUnreachable, match="it has ended"):
        await run.until_changed(30)


async def test_released_and_handed_over_runs_are_not_to_be_used(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    run.release()
    run.release()
    assert (await end.read(ReleaseRun))[1].run == 5
    with pytest.raises(InvalidArgument, match="run: given released, expected a leased run"):
        run.section(0)
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.lease(NAMESPACE.layout, run=6)
    other = await leasing
    assert other is not None
    save = await client.save_run(NAMESPACE, KEYS, other)
    with pytest.raises(InvalidArgument, match="handed over"):
        other.part(0, 0)
    other.release()
    request_id, request = await end.read(StoreRun)
    assert request.run == 6
    await end.answer(request_id, StoreEnded(stored=1, failed=1, dropped=1))
    result = await save
    assert (result.stored, result.failed) == (1, 2)


async def test_run_that_the_agent_does_not_want_to_save_is_given_back(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    save = await client.save_run(NAMESPACE, KEYS, run)
    request_id, _ = await end.read(StoreRun)
    await end.answer(request_id, Refused(what="it has no role store", is_mistake=False))
    with pytest.raises(AgentRefused):
        await save
    assert (await end.read(ReleaseRun))[1].run == 5


async def test_release_wakes_the_thread_that_waits(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    await client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    waiting = asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 3, 30))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(run.release)
    async with asyncio.timeout(1):
        with pytest.raises(InvalidArgument, match="released"):
            await waiting


async def test_thread_that_releases_a_run_wakes_the_loop_and_leaves_no_descriptor(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    before = len(os.listdir("/proc/self/fd"))
    await client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    waiting = asyncio.create_task(run.until_ready(0, 3, 30))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(run.release)
    async with asyncio.timeout(1):
        with pytest.raises(InvalidArgument, match="released"):
            await waiting
    with pytest.raises(InvalidArgument, match="released"):
        await run.until_changed(1)
    assert len(os.listdir("/proc/self/fd")) == before - 1


async def test_run_of_another_client_is_refused(agent: ScriptedAgent, client: AgentClient) -> None:
    """Its number is another run's in this session: bytes would land there."""
    end = await meet(client, agent)
    await begin(client, end)
    other_client = AgentClient(agent.path, name="other")
    end_of_other = await meet(other_client, agent)
    foreign, _ = await begin(other_client, end_of_other)
    await client.open_namespace(NAMESPACE)
    for call in (client.fetch_run, client.save_run):
        with pytest.raises(InvalidArgument, match="a run of another client"):
            await call(NAMESPACE, KEYS, foreign)
    other_client.close()
    await other_client.end_background()


async def test_runs_of_other_layouts_and_sizes_are_refused(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    longer = RandomBlocks(4, block_bytes=2048, seed=12)
    other = RandomBlocks(1, block_bytes=4096, seed=13)
    for namespace, keys, message in (
        (longer.namespace, longer.keys, "given 3 blocks, expected at least the 4"),
        (other.namespace, other.keys, "another layout"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            await client.fetch_run(namespace, keys, run)
        with pytest.raises(InvalidArgument, match=message):
            await client.save_run(namespace, keys, run)
    await client.fetch_run(NAMESPACE, KEYS, run)
    for call in (client.fetch_run, client.save_run):
        with pytest.raises(InvalidArgument, match="expected no fetch that runs"):
            await call(NAMESPACE, KEYS, run)
    with pytest.raises(InvalidArgument, match="block: given 3, expected 0 to 2"):
        run.part(0, 3)
