"""A client and an agent that does what the real one never should, or dies while it is asked."""

import asyncio
import gc
import os
import resource
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from kvstore.agent_messages import (
    HEAD,
    MESSAGE_BYTES_MAX,
    Done,
    LeaseRun,
    Match,
    Matched,
    Refused,
    ReleaseRun,
    RunLeased,
    pack_message,
)
from kvstore.arena.wakeup import make_wakeup
from kvstore.client import AgentClient
from kvstore.client import agent_session as session_module
from kvstore.client.agent_link import connect_socket, explain_hang_up, read_listener_uid
from kvstore.errors import AgentRefused, AgentUnreachable, InvalidArgument
from tests.kvstore.client.agent_meeting import KEYS, NAMESPACE, begin, meet, until
from tests.kvstore.client.scripted_agent import ScriptedAgent
from tests.patience import OPERATION_S, WELL_BEFORE_S


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is believed after a tenth of a second beyond the deadline."""
    monkeypatch.setattr(session_module, "ANSWER_MARGIN_S", 0.1)


async def test_answers_may_come_in_any_order(client: AgentClient, agent: ScriptedAgent) -> None:
    end = await meet(client, agent)
    first = asyncio.create_task(client.match(NAMESPACE, KEYS[:1]))
    await end.open_namespace()
    (first_id, _) = await end.read(Match)
    second = asyncio.create_task(client.match(NAMESPACE, KEYS))
    (second_id, request) = await end.read(Match)
    assert request.keys == b"".join(KEYS)
    await end.answer(second_id, Matched(2))
    assert await second == 2
    await end.answer(first_id, Matched(1))
    assert await first == 1


@pytest.mark.usefixtures("is_impatient")
async def test_the_opening_of_a_namespace_is_within_the_deadline_of_the_call_that_needs_it(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    patient = asyncio.create_task(client.match(NAMESPACE, KEYS, deadline_s=OPERATION_S))
    async with asyncio.timeout(WELL_BEFORE_S):
        with pytest.raises(AgentUnreachable, match="no answer within"):
            await client.match(NAMESPACE, KEYS, deadline_s=0.05)
    await end.open_namespace()
    await end.answer((await end.read(Match))[0], Matched(2))
    assert await patient == 2


async def test_answers_may_come_byte_by_byte_and_many_at_once(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    asked = [asyncio.create_task(client.match(NAMESPACE, KEYS)) for _ in range(10)]
    await end.open_namespace()
    ids = [(await end.read(Match))[0] for _ in range(10)]
    stream = b"".join(pack_message(one, Matched(place % 4)) for place, one in enumerate(ids))
    for byte in stream[:30]:
        await end.send(bytes([byte]))
        await asyncio.sleep(0)
    await end.send(stream[30:])
    assert await asyncio.gather(*asked) == [place % 4 for place in range(10)]


async def test_everybody_who_waits_fails_at_once_when_the_agent_dies(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    run, _ = await begin(client, end)
    fetch = client.fetch_run(NAMESPACE, KEYS, run, deadline_s=30)
    waiting = [
        asyncio.create_task(client.match(NAMESPACE, KEYS, deadline_s=30)),
        asyncio.create_task(run.until_ready(0, 3, 30)),
        asyncio.create_task(asyncio.to_thread(run.wait_ready, 0, 3, 30)),
    ]
    await end.begin_fetch()
    await end.read(Match)
    agent.stop_listening()
    end.close()
    async with asyncio.timeout(WELL_BEFORE_S):
        outcomes = await asyncio.gather(*waiting, fetch, return_exceptions=True)
    # The thread may see the end of the wake-ups before the loop sees that of the session.
    in_thread = outcomes.pop(2)
    assert in_thread == 0 or type(in_thread) is AgentUnreachable
    assert [type(one) for one in outcomes] == [AgentUnreachable] * 3
    for use in (lambda: run.section(0), lambda: run.ready_blocks(0), lambda: run.part(0, 0)):
        with pytest.raises(AgentUnreachable, match="it has ended"):
            use()
    with pytest.raises(AgentUnreachable):
        await client.match(NAMESPACE, KEYS)
    run.release()


async def test_client_connects_again_and_opens_its_namespaces_again(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    await begin(client, end)
    end.close()
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    assert (await end.open_namespace()).model == NAMESPACE.model
    request_id, _ = await end.read(Match)
    await end.answer(request_id, Matched(3))
    assert await asked == 3


async def test_pinned_arena_of_an_agent_that_died_keeps_nobody_from_the_next(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    assert client.arena is not None
    pinned = np.frombuffer(client.arena, np.uint8)
    end.close()
    await until(lambda: not client.is_connected)
    assert client.arena is None
    await meet(client, agent)
    pinned[:] = 1
    assert client.arena is not None


async def test_client_that_finds_no_agent_is_there_and_connects_when_there_is_one() -> None:
    with ScriptedAgent() as agent:
        agent.stop_listening()
        agent.path.unlink()
        async with AgentClient.connect(agent.path) as client:
            with pytest.raises(AgentUnreachable, match="there is no such socket"):
                await client.match(NAMESPACE, KEYS)
            with pytest.raises(AgentUnreachable):
                _ = client.map
            agent.listen()
            await meet(client, agent)


async def test_path_at_which_no_agent_listens_says_what_is_there(tmp_path: Path) -> None:
    left_over, plain_file = tmp_path / "left-over", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(left_over))
    plain_file.touch()
    for path, message in (
        (left_over, "nobody listens there; is the agent running"),
        (plain_file, "this is no socket, but a file or folder of another kind"),
        (tmp_path, "this is no socket, but a file or folder of another kind"),
        (plain_file / "agent.sock", "Not a directory"),
    ):
        async with AgentClient.connect(path) as client:
            with pytest.raises(AgentUnreachable, match=message):
                await client.match(NAMESPACE, KEYS)


async def test_agent_that_hangs_up_before_it_greets_is_not_taken_for_a_network_fault(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await agent.accept()
    end.close()
    await client.wait_for_first_attempt()
    with pytest.raises(
        AgentUnreachable, match="closed the connection before it answered: it ends, or has as many"
    ):
        await client.match(NAMESPACE, KEYS)


@pytest.mark.parametrize("own_uid", [0, 1000, 1001])
def test_who_is_another_user_than_the_agent_is_told_so(own_uid: int) -> None:
    told = explain_hang_up(1000, own_uid)
    is_foreign = "runs as user 1000, and takes only processes of its own user, and of root" in told
    assert is_foreign == (own_uid == 1001)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_user_behind_a_socket_is_read_from_the_system(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(os.fspath(path))
        os.seteuid(1234)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        with connect_socket(path) as connected:
            assert read_listener_uid(connected) == 1234


async def test_silence_ends_the_connection_a_moment_after_the_deadline(
    is_impatient: None, client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    opening = asyncio.create_task(client.open_namespace(NAMESPACE))
    await end.open_namespace()
    await opening
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS, deadline_s=0.05))
    await end.read(Match)
    async with asyncio.timeout(WELL_BEFORE_S):
        with pytest.raises(AgentUnreachable, match=r"no answer within 0.05 s"):
            await asked
    assert not client.is_connected
    assert await end.read_to_the_end() == b""


async def test_answer_that_lies_in_the_socket_counts_when_the_client_itself_stood_still(
    client: AgentClient, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    request_id, _ = await end.read(Match)
    await end.answer(request_id, Matched(3))
    # The loop turns again long after the deadline, as if the process had been stopped.
    loop = asyncio.get_running_loop()
    late_s = loop.time() + 2 * OPERATION_S
    monkeypatch.setattr(loop, "time", lambda: late_s)
    assert await asked == 3


async def test_agent_that_never_greets_is_given_up(
    is_impatient: None, monkeypatch: pytest.MonkeyPatch, agent: ScriptedAgent
) -> None:
    monkeypatch.setattr("kvstore.client.agent_link.CONNECT_DEADLINE_S", 0.05)
    async with AgentClient.connect(agent.path) as client:
        with pytest.raises(AgentUnreachable, match="no answer within"):
            await client.match(NAMESPACE, KEYS)


async def test_agent_of_another_version_is_refused(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    def count_mappings() -> int:
        return Path("/proc/self/maps").read_text().count("cachalot-arena")

    before = count_mappings()
    end = await agent.accept()
    await end.greet(version=99)
    await client.wait_for_first_attempt()
    with pytest.raises(AgentRefused, match="speaks version 99, expected 1"):
        await client.match(NAMESPACE, KEYS)
    assert count_mappings() == before


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        (HEAD.pack(MESSAGE_BYTES_MAX + 1, 1), "sent a message of 1048577 bytes"),
        (HEAD.pack(3, 1) + b"\xc1\xc1\xc1", "of no known form"),
        (pack_message(77, Matched(1)), "answered request 77, not asked"),
        (struct.pack("<II", 0, 1), "of no known form"),
    ],
)
async def test_agent_that_talks_nonsense_is_given_up(
    client: AgentClient, agent: ScriptedAgent, nonsense: bytes, message: str
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    await end.read(Match)
    await end.send(nonsense)
    with pytest.raises(AgentUnreachable, match=message):
        await asked


async def test_answer_of_another_kind_ends_the_connection(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    request_id, _ = await end.read(Match)
    await end.answer(request_id, Done())
    with pytest.raises(AgentUnreachable, match="answered Done where Matched was expected"):
        await asked
    assert not client.is_connected


async def test_refusal_is_an_error_of_its_own_and_harms_nothing_else(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    request_id, _ = await end.read(Match)
    await end.answer(request_id, Refused(what="it has no role check", is_mistake=False))
    with pytest.raises(AgentRefused, match="it has no role check"):
        await asked
    assert client.is_connected


async def test_namespace_that_was_refused_is_asked_for_again(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    request_id, _ = await end.read_any()
    await end.answer(request_id, Refused(what="namespaces", given="too many", expected="256"))
    with pytest.raises(AgentRefused, match="namespaces: given too many, expected 256"):
        await asked
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    request_id, _ = await end.read(Match)
    await end.answer(request_id, Matched(0))
    assert await asked == 0


async def test_run_that_nobody_waits_for_any_more_is_given_back(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    request_id, _ = await end.read(LeaseRun)
    leasing.cancel()
    await asyncio.gather(leasing, return_exceptions=True)
    waker, reader = make_wakeup()
    before = len(os.listdir("/proc/self/fd"))
    await end.answer(request_id, RunLeased(9, 0, 3), [reader])
    _, released = await end.read(ReleaseRun)
    os.close(reader)
    assert released.run == 9
    assert len(os.listdir("/proc/self/fd")) == before - 1
    waker.close()


async def test_run_that_came_at_the_moment_of_the_cancellation_is_given_back(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    """The answer had been read, but whoever waited for it had not had its turn: run and descriptor
    were lost until the session's end."""
    end = await meet(client, agent)
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    request_id, _ = await end.read(LeaseRun)
    waker, reader = make_wakeup()
    before = len(os.listdir("/proc/self/fd"))
    await end.answer(request_id, RunLeased(9, 0, 3), [reader])
    session = client._link.connection.session
    while session.waiting:
        await asyncio.sleep(0)
    assert not leasing.done()
    leasing.cancel()
    assert isinstance((await asyncio.gather(leasing, return_exceptions=True))[0], BaseException)
    assert leasing.cancelled()
    _, released = await end.read(ReleaseRun)
    os.close(reader)
    assert released.run == 9
    assert len(os.listdir("/proc/self/fd")) == before - 1
    waker.close()


async def test_descriptors_that_nobody_asked_for_end_the_connection(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    request_id, _ = await end.read(Match)
    waker, reader = make_wakeup()
    before = len(os.listdir("/proc/self/fd"))
    await end.answer(request_id, Matched(3), [reader, reader])
    with pytest.raises(AgentUnreachable, match="more descriptors than were asked for"):
        await asked
    assert len(os.listdir("/proc/self/fd")) == before - 2, "socket and arena are gone"
    os.close(reader)
    waker.close()


async def test_client_connects_when_the_process_has_descriptors_again(
    agent: ScriptedAgent,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        client = AgentClient(agent.path)
        await client.wait_for_first_attempt()
        with pytest.raises(AgentUnreachable, match="Too many open files"):
            await client.match(NAMESPACE, KEYS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await meet(client, agent)
    client.close()
    await client.end_background()


@pytest.mark.parametrize("name", ["n" * 129, 7])
async def test_name_that_no_agent_takes_is_a_mistake_of_the_caller(
    agent: ScriptedAgent, name: str
) -> None:
    with pytest.raises(InvalidArgument, match="name: given"):
        AgentClient(agent.path, name=name)


async def test_run_without_its_descriptor_ends_the_connection(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    request_id, _ = await end.read(LeaseRun)
    await end.answer(request_id, RunLeased(9, 0, 3))
    with pytest.raises(AgentUnreachable, match="a descriptor is missing"):
        await leasing


@pytest.mark.parametrize(
    ("offset", "blocks", "message"),
    [(1 << 40, 3, "leased no run: run: given"), (0, 4, "leased no run: leased blocks: given 4")],
)
async def test_run_that_cannot_be_the_one_asked_for_ends_the_connection(
    client: AgentClient, agent: ScriptedAgent, offset: int, blocks: int, message: str
) -> None:
    end = await meet(client, agent)
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    request_id, _ = await end.read(LeaseRun)
    waker, reader = make_wakeup()
    before = len(os.listdir("/proc/self/fd"))
    await end.answer(request_id, RunLeased(9, offset, blocks), [reader])
    with pytest.raises(AgentUnreachable, match=message):
        await leasing
    assert len(os.listdir("/proc/self/fd")) == before - 2, "socket and arena are gone"
    os.close(reader)
    waker.close()


async def test_agent_without_an_arena_leases_nothing(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await agent.accept()
    await end.greet(has_arena=False)
    await until(lambda: client.is_connected)
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    with pytest.raises(AgentRefused, match="it has no arena; its roles: check, fetch, store"):
        await leasing
    assert client.arena is None


async def test_session_leaves_no_descriptor_when_it_ends(agent: ScriptedAgent) -> None:
    gc.collect()  # what other tests left is not to go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        client = AgentClient(agent.path)
        end = await meet(client, agent)
        # The arena stays mapped as long as anybody has a run of it.
        (await begin(client, end))[0].release()
        end.client_runs.clear()
        client.close()
        await client.end_background()
        end.close()
    assert len(os.listdir("/proc/self/fd")) == before
