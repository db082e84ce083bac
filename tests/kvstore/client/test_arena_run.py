"""A run as its engine has it: what is ready, who waits for it, who may use it."""

import asyncio
import gc
import os
import resource

import pytest

from kvstore.agent_messages import FetchEnded, Refused, ReleaseRun, StoreEnded, StoreRun
from kvstore.arena.progress import ProgressWriter, begin_table
from kvstore.client import AgentClient, ArenaRun, FetchEnd
from kvstore.errors import AgentRefused, AgentUnreachable, InvalidArgument, StoreError
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.client.agent_meeting import KEYS, NAMESPACE, begin, meet, until
from tests.kvstore.client.scripted_agent import AgentEnd, ScriptedAgent
from tests.patience import WELL_BEFORE_S


async def test_nothing_is_ready_before_the_agent_has_begun_whatever_the_memory_holds(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    begin_table(theirs.memory, [(0, 3)])
    ProgressWriter(theirs.memory, 0).set_ready(0, 3)
    assert (run.ready_blocks(0), run.is_ended) == (0, True)
    fetch = client.fetch_run(NAMESPACE, KEYS, run)
    assert (run.ready_blocks(0), run.is_ended) == (0, False)
    assert await run.until_ready(0, 1, 0.01) == 0
    assert not fetch.is_done


async def test_sections_are_ready_as_the_table_says(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    fetch = client.fetch_run(NAMESPACE, KEYS, run)
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
    fetch = client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    request_id, _ = await end.begin_fetch()
    waiting = asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 3, 30))
    await asyncio.sleep(0.02)
    await end.answer(request_id, FetchEnded(0, FetchEnd.DEADLINE.value))
    async with asyncio.timeout(WELL_BEFORE_S):
        assert await waiting == 0
        assert await asyncio.to_thread(fetch.join) == await fetch


async def test_end_of_a_fetch_stays_visible_to_all_who_come_late(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    """Who wakes first must not take the event of the end from the others."""
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    fetch = client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    request_id, _ = await end.begin_fetch()
    await end.answer(request_id, FetchEnded(0, FetchEnd.DEADLINE.value))
    await fetch
    async with asyncio.timeout(WELL_BEFORE_S):
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
    async with asyncio.timeout(WELL_BEFORE_S):
        await waiting
    with pytest.raises(AgentUnreachable, match="it has ended"):
        await run.until_changed(30)


@pytest.mark.parametrize("wakes", [1, 10_000])
async def test_any_number_of_wakeups_is_one(
    client: AgentClient, agent: ScriptedAgent, wakes: int
) -> None:
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    client.fetch_run(NAMESPACE, KEYS, run)
    await end.begin_fetch()
    for _ in range(wakes):
        theirs.ring()
    await run.until_changed(5)
    begun_at_s = asyncio.get_running_loop().time()
    await run.until_changed(0.1)
    assert asyncio.get_running_loop().time() - begun_at_s > 0.09, "nothing was left"
    for _ in range(wakes):
        theirs.ring()
    assert await asyncio.to_thread(run.wait_ready, 0, 1, 0.1) == 0


async def test_end_of_the_wakeups_means_that_nothing_more_comes(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    """The agent is gone, though its session has not ended yet: nobody waits, and nobody spins."""
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    fetch = client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    request_id, _ = await end.begin_fetch()
    in_thread = asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 3, 30))
    await asyncio.sleep(0.02)
    assert not run.is_ended
    theirs.waker.close()
    async with asyncio.timeout(WELL_BEFORE_S):
        assert await in_thread == 0
        assert await run.until_ready(0, 3, 30) == 0
    assert run.is_ended
    waiting = asyncio.create_task(run.until_changed(30))
    await asyncio.sleep(0.02)
    assert not waiting.done(), "it must not return again and again"
    await end.answer(request_id, FetchEnded(0, FetchEnd.DEADLINE.value))
    async with asyncio.timeout(WELL_BEFORE_S):
        await waiting
    assert (await fetch).blocks == 0


async def test_loop_that_waits_is_told_of_the_end_of_the_wakeups(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, theirs = await begin(client, end)
    client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    in_loop = asyncio.create_task(run.until_ready(0, 3, 30))
    await asyncio.sleep(0.02)
    theirs.waker.close()
    async with asyncio.timeout(WELL_BEFORE_S):
        assert await in_loop == 0


async def test_thread_is_told_when_the_system_has_no_descriptor_to_wait_with(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    client.fetch_run(NAMESPACE, KEYS, run)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(StoreError, match="no descriptor to wait with"):
            run.wait_ready(0, 1, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert run.wait_ready(0, 1, 0.01) == 0


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
    save = client.save_run(NAMESPACE, KEYS, other)
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
    save = client.save_run(NAMESPACE, KEYS, run)
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
    client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    waiting = asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 3, 30))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(run.release)
    async with asyncio.timeout(WELL_BEFORE_S):
        with pytest.raises(InvalidArgument, match="released"):
            await waiting


async def test_thread_that_releases_a_run_wakes_the_loop_and_leaves_no_descriptor(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    before = len(os.listdir("/proc/self/fd"))
    client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    waiting = asyncio.create_task(run.until_ready(0, 3, 30))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(run.release)
    async with asyncio.timeout(WELL_BEFORE_S):
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
            call(NAMESPACE, KEYS, foreign)
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
            client.fetch_run(namespace, keys, run)
        with pytest.raises(InvalidArgument, match=message):
            client.save_run(namespace, keys, run)
    client.fetch_run(NAMESPACE, KEYS, run)
    for call in (client.fetch_run, client.save_run):
        with pytest.raises(InvalidArgument, match="expected no fetch that runs"):
            call(NAMESPACE, KEYS, run)
    with pytest.raises(InvalidArgument, match="block: given 3, expected 0 to 2"):
        run.part(0, 3)


# Runs that are forgotten --------------------------------------------------------------------------


async def lease_without_a_hold(client: AgentClient, end: AgentEnd, run: int) -> ArenaRun:
    """Unlike that of `begin`, it is nobody's but the caller's."""
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    await end.lease(NAMESPACE.layout, run=run)
    leased = await leasing
    assert leased is not None
    await asyncio.sleep(0)  # until then the loop holds what it has just handed out
    return leased


async def let_go(held: list[ArenaRun], caught: pytest.WarningsRecorder) -> None:
    """Drop the runs, and wait: a thread that waited for one may hold it for a moment longer."""
    held.clear()
    await until(lambda: len(caught) > 0)


@pytest.mark.parametrize("is_waited_for", [False, True])
async def test_run_that_nobody_holds_is_released_with_a_warning(
    client: AgentClient, agent: ScriptedAgent, is_waited_for: bool
) -> None:
    end = await meet(client, agent)
    before = len(os.listdir("/proc/self/fd"))
    run = await lease_without_a_hold(client, end, run=8)
    if is_waited_for:  # which takes one more descriptor
        fetch = client.fetch_run(NAMESPACE, KEYS, run)
        request_id, _ = await end.begin_fetch()
        assert await asyncio.to_thread(run.wait_ready, 0, 1, 0.01) == 0
        await end.answer(request_id, FetchEnded(0, FetchEnd.DEADLINE.value))
        assert (await fetch).blocks == 0
    held = [run]
    del run
    warning = "nobody released <ArenaRun 8: 3 blocks of 2048 bytes"
    with pytest.warns(ResourceWarning, match=warning) as caught:
        await let_go(held, caught)
    assert (await end.read(ReleaseRun))[1].run == 8
    end.close()
    await until(lambda: not client.is_connected)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


async def test_run_that_a_thread_drops_last_is_released_by_the_loop(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    held = [await lease_without_a_hold(client, end, run=8)]
    with pytest.warns(ResourceWarning, match="nobody released"):
        await asyncio.to_thread(held.clear)
    assert (await end.read(ReleaseRun))[1].run == 8


async def test_run_that_is_forgotten_during_its_fetch_is_released_after_it(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    """Until then its fetch holds it: the result is asked for by whoever has the operation."""
    end = await meet(client, agent)
    fetch = client.fetch_run(NAMESPACE, KEYS, await lease_without_a_hold(client, end, run=8))
    request_id, _ = await end.begin_fetch()
    gc.collect()
    await end.answer(request_id, FetchEnded(3, FetchEnd.COMPLETE.value))
    with pytest.warns(ResourceWarning, match="nobody released"):
        assert (await end.read(ReleaseRun))[1].run == 8
    assert (await fetch).blocks == 3


async def test_runs_that_were_released_handed_over_or_lost_are_forgotten_without_a_word(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    before = len(os.listdir("/proc/self/fd"))
    released = await lease_without_a_hold(client, end, run=8)
    runs = [released]
    for number in (9, 10):
        leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
        await end.lease(NAMESPACE.layout, run=number)
        leased = await leasing
        assert leased is not None
        runs.append(leased)
    with released:
        pass
    save = client.save_run(NAMESPACE, KEYS, runs[1])
    agent.stop_listening()
    end.close()
    with pytest.raises(AgentUnreachable):
        await save
    assert [repr(run).rpartition(", ")[2] for run in runs] == [
        "released>",
        "handed over to be saved>",
        "lost with its agent>",
    ]
    runs.clear()
    del released, leased, leasing
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


# What people read ---------------------------------------------------------------------------------


async def test_runs_and_operations_say_what_they_are(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    assert repr(run) == "<ArenaRun 5: 3 blocks of 2048 bytes, leased>"
    fetch = client.fetch_run(NAMESPACE, KEYS, run)
    assert repr(run) == "<ArenaRun 5: 3 blocks of 2048 bytes, being fetched into>"
    assert repr(fetch) == "<RunOperation fetch of 3 blocks into run 5: running>"
    request_id, _ = await end.begin_fetch()
    await end.answer(request_id, FetchEnded(3, FetchEnd.COMPLETE.value))
    result = await fetch
    assert repr(fetch) == f"<RunOperation fetch of 3 blocks into run 5: {result!r}>"
    save = client.save_run(NAMESPACE, KEYS, run)
    assert repr(run) == "<ArenaRun 5: 3 blocks of 2048 bytes, handed over to be saved>"
    request_id, _ = await end.read(StoreRun)
    await end.answer(request_id, Refused(what="it has no role store", is_mistake=False))
    with pytest.raises(AgentRefused):
        await save
    assert repr(save).startswith("<RunOperation save of 3 blocks out of run 5: failed: ")
    assert "it has no role store" in repr(save)


async def test_a_run_that_was_not_leased_is_told_from_other_mistakes(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    await meet(client, agent)
    for call in (client.fetch_run, client.save_run):
        with pytest.raises(
            InvalidArgument,
            match="run: given NoneType, expected an ArenaRun; "
            "lease_run and lease_window give None when the arena is full",
        ):
            call(NAMESPACE, KEYS, None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"run: given bytes, expected an ArenaRun$"):
            call(NAMESPACE, KEYS, b"")  # type: ignore[arg-type]
