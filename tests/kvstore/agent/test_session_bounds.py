"""Bounds of sessions: what is too much is refused, or ends the session that asked for it."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from kvstore import agent_messages as m
from tests.patience import PATIENCE_S

from .scripted_sessions import (
    MATCH,
    Client,
    CountingHandler,
    GivingHandler,
    ScriptedHandler,
    TurnHandler,
    open_descriptors,
    send_all,
    serving,
    until,
)

# Too much -----------------------------------------------------------------------------------------


async def test_session_that_does_not_read_its_answers_is_ended(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(10_000)
    async with serving(path, handler, unsent_bytes_max=100_000) as server:
        client, other = Client(path), Client(path)
        await other.ask(m.AskStatus())
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await send_all(client, [m.pack_message(1, m.AskStatus())] * 10_000)
        await until(lambda: server.describe()["open"] == 1)
        client.close()
        other.close()


async def test_answers_are_kept_for_a_session_that_reads_late(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(50_000)
    async with serving(path, handler):
        client = Client(path)
        for number in range(20):
            await client.send(m.pack_message(number, m.AskStatus()))
        await asyncio.sleep(0.05)
        for _ in range(20):
            assert isinstance(await client.answer(), m.StatusTold)
        client.close()


async def test_request_is_refused_when_too_many_wait_for_an_answer(path: Path) -> None:
    handler = ScriptedHandler()
    async with serving(path, handler, requests_max=3):
        client = Client(path)
        for number in range(3):
            await client.send(m.pack_message(number, MATCH))
        refused = await client.ask(MATCH, 3)
        assert isinstance(refused, m.Refused)
        assert not refused.is_mistake
        handler.gate.set()
        for _ in range(3):
            assert isinstance(await client.answer(), m.Matched)
        assert isinstance(await client.ask(MATCH), m.Matched)
        client.close()


async def test_request_is_refused_when_too_many_bytes_wait_for_an_answer(path: Path) -> None:
    handler = ScriptedHandler()
    large = m.Match(namespace=0, keys=bytes(32 * 1_000), deadline_s=1.0)
    async with serving(path, handler, request_bytes_max=70_000) as server:
        client, other = Client(path), Client(path)
        for number in range(2):
            await client.send(m.pack_message(number, large))
        assert isinstance(await client.ask(large, 2), m.Refused)
        assert isinstance(await other.ask(m.AskStatus()), m.StatusTold)
        handler.gate.set()
        for _ in range(2):
            assert isinstance(await client.answer(), m.Matched)
        assert server.describe()["request_bytes"] == 0
        client.close()
        other.close()


async def test_begun_messages_of_all_sessions_together_are_bounded(path: Path) -> None:
    bounds = {"total_request_bytes_max": 100_000}
    async with serving(path, ScriptedHandler(), **bounds) as server:
        clients = [Client(path) for _ in range(8)]
        for client in clients:
            await client.send(m.HEAD.pack(m.MESSAGE_BYTES_MAX, 1) + bytes(30_000))
        await until(lambda: server.describe()["open"] == 3)
        assert server.describe()["request_bytes"] <= 100_000
        for client in clients:
            client.close()
        await until(lambda: server.describe()["request_bytes"] == 0)


async def test_further_sessions_are_closed_at_once_when_there_are_too_many(path: Path) -> None:
    async with serving(path, ScriptedHandler(), sessions_max=2) as server:
        first, second, third = Client(path), Client(path), Client(path)
        await third.wait_until_ended()
        assert isinstance(await second.ask(m.AskStatus()), m.StatusTold)
        assert server.describe()["refused"] == 1
        first.close()
        await until(lambda: server.describe()["open"] == 1)
        fourth = Client(path)
        assert isinstance(await fourth.ask(m.AskStatus()), m.StatusTold)
        for client in (second, third, fourth):
            client.close()


async def test_session_that_leaves_most_unread_is_ended_when_all_together_leave_too_much(
    path: Path,
) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(50_000)
    async with serving(path, handler, total_unsent_bytes_max=1_000_000) as server:
        most, less, other = Client(path), Client(path), Client(path)
        await less.send(m.pack_message(1, m.AskStatus()) * 12)
        await until(lambda: server.describe()["unsent_bytes"] > 300_000)
        await most.send(m.pack_message(1, m.AskStatus()) * 24)
        await until(lambda: server.describe()["open"] == 2)
        await most.wait_until_ended()
        for _ in range(12):
            assert isinstance(await less.answer(), m.StatusTold)
        assert isinstance(await other.ask(m.AskStatus()), m.StatusTold)
        assert server.describe()["unsent_bytes"] == 0
        for client in (most, less, other):
            client.close()


async def test_answer_counts_whole_until_its_last_byte_is_read(path: Path) -> None:
    """Its memory is held until then: a client that reads all but the end of it is no better."""
    handler = ScriptedHandler()
    handler.status = bytes(900_000)
    async with serving(path, handler) as server:
        client = Client(path)
        await client.send(m.pack_message(1, m.AskStatus()))
        while len(client.received) < 500_000:
            await client.receive()
        assert server.describe()["unsent_bytes"] > 900_000
        assert isinstance(await client.answer(), m.StatusTold)
        await until(lambda: server.describe()["unsent_bytes"] == 0)
        client.close()


async def test_descriptor_that_was_given_is_closed_also_when_its_session_is_gone(
    path: Path,
) -> None:
    handler = GivingHandler()
    lease = m.LeaseRun(namespace=0, blocks=1, deadline_s=1.0)
    async with serving(path, handler) as server:
        client = Client(path)
        assert isinstance(await client.ask(m.AskStatus()), m.StatusTold)
        before = open_descriptors()
        assert isinstance(await client.ask(lease), m.RunLeased)
        assert open_descriptors() == before + 1, "the client's"
        await client.send(m.pack_message(2, lease))
        await until(lambda: server.describe()["open"] == 0)
        await asyncio.sleep(0.01)
        assert handler.gave == 2
        assert open_descriptors() == before + 1 - 1, "the session's socket is gone too"
        client.close()


async def test_session_that_leaves_descriptors_unread_is_ended(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(400_000)
    before = open_descriptors()
    async with serving(path, handler, unsent_descriptors_max=20) as server:
        client = Client(path)
        await client.send(m.pack_message(1, m.AskStatus()))
        # Nothing but descriptors is left of a run that was released at once.
        lease = m.pack_message(2, m.LeaseRun(namespace=0, blocks=1, deadline_s=1.0))
        for _ in range(20):
            await client.send(lease)
        await until(lambda: open_descriptors() - before >= 20)
        assert server.describe()["open"] == 1
        await client.send(lease)
        await until(lambda: server.describe()["open"] == 0)
        client.close()


async def test_flood_of_one_session_lets_others_have_their_turn(path: Path) -> None:
    handler = CountingHandler()
    async with serving(path, handler, requests_per_visit_max=8):
        flood, other = Client(path), Client(path)
        await other.ask(m.AskNodes(deadline_s=1.0))
        await flood.send(m.pack_message(1, m.AskStatus()) * 1_000)
        await other.send(m.pack_message(1, m.AskNodes(deadline_s=1.0)))
        await other.answer()
        # A few visits at most lie before the other's request, and not the whole flood.
        assert handler.asked_before_nodes[-1] < 200
        for _ in range(1_000):
            assert isinstance(await flood.answer(), m.StatusTold)
        assert handler.asked == 1_000
        flood.close()
        other.close()


def put_of(number: int) -> bytes:
    put = m.PutWindow(namespace=0, key=bytes(32), run=number)
    return m.pack_message(number, put)


async def test_copies_of_all_sessions_are_bounded_in_one_turn_of_the_loop(path: Path) -> None:
    """64 sessions that put window records kept everybody else waiting for more than a second."""
    handler = TurnHandler()
    handler.put_bytes = 1_000
    async with serving(path, handler, copied_per_turn_bytes_max=4_500) as server:
        floods = [Client(path) for _ in range(10)]
        other = Client(path)
        await other.ask(m.AskStatus())
        for client in floods:
            await client.send(b"".join(put_of(number) for number in range(30)))
        await until(lambda: handler.begun)
        puts_before = len(handler.begun)
        assert isinstance(await other.ask(m.AskStatus()), m.StatusTold)
        assert len(handler.begun) - puts_before < 100, "it had to wait for the whole flood"
        async with asyncio.timeout(PATIENCE_S):
            while len(handler.begun) < 300:
                await asyncio.sleep(0)
        assert handler.rounds >= 300 / 4 - 2
        # Each session has its turn, and its own requests in their order.
        for session in {session for session, _ in handler.begun}:
            assert [run for one, run in handler.begun if one == session] == list(range(30))
        halves = Counter(session for session, _ in handler.begun[:150])
        assert min(halves.values()) >= 10
        for client in floods:
            for _ in range(30):
                assert isinstance(await client.answer(), m.StatusTold)
        assert server.describe()["open"] == 11
        for client in (*floods, other):
            client.close()


async def test_copy_larger_than_a_turn_has_one_for_itself(path: Path) -> None:
    handler = TurnHandler()
    handler.put_bytes = 10_000
    async with serving(path, handler, copied_per_turn_bytes_max=4_500):
        client = Client(path)
        await client.send(b"".join(put_of(number) for number in range(5)))
        for _ in range(5):
            assert isinstance(await client.answer(), m.StatusTold)
        assert handler.rounds >= 4
        client.close()


async def test_session_may_end_while_its_copy_waits(path: Path) -> None:
    handler = TurnHandler()
    handler.put_bytes = 10_000
    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    async with serving(path, handler, copied_per_turn_bytes_max=4_500) as server:
        client, other = Client(path), Client(path)
        await client.send(b"".join(put_of(number) for number in range(500)))
        async with asyncio.timeout(PATIENCE_S):
            while not handler.begun:
                await asyncio.sleep(0)
        server.close_sessions("in the middle")
        begun = len(handler.begun)
        other.close()
        other = Client(path)
        await other.send(put_of(7))
        assert isinstance(await other.answer(), m.StatusTold)
        assert len(handler.begun) == begun + 1 < 500
        assert not escaped
        client.close()
        other.close()


async def test_session_may_end_in_the_middle_of_its_flood(path: Path) -> None:
    handler = CountingHandler()
    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    async with serving(path, handler, requests_per_visit_max=8) as server:
        client = Client(path)
        await client.send(m.pack_message(1, m.AskStatus()) * 1_000)
        async with asyncio.timeout(PATIENCE_S):
            while not handler.asked:
                await asyncio.sleep(0)
        server.close_sessions("in the middle")
        asked = handler.asked
        await asyncio.sleep(0.02)
        assert handler.asked == asked < 1_000
        assert not escaped
        client.close()


async def test_answer_that_is_too_long_becomes_a_refusal(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(m.MESSAGE_BYTES_MAX)
    async with serving(path, handler):
        client = Client(path)
        assert isinstance(await client.ask(m.AskStatus()), m.Refused)
        client.close()


# Descriptors --------------------------------------------------------------------------------------


async def test_descriptors_that_a_client_sends_are_not_kept(path: Path) -> None:
    async with serving(path, ScriptedHandler()):
        client = Client(path)
        await client.ask(m.AskStatus())
        before = open_descriptors()
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 50))]
        client.socket.sendmsg([m.pack_message(1, m.AskStatus())], beside)
        assert isinstance(await client.answer(), m.StatusTold)
        assert open_descriptors() == before
        client.close()


async def test_descriptors_come_in_the_order_of_their_messages_when_answers_had_to_wait(
    path: Path,
) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(60_000)
    async with serving(path, handler):
        client = Client(path)
        for number in range(1, 31):
            lease = m.LeaseRun(namespace=0, blocks=number, deadline_s=1.0)
            await client.send(m.pack_message(2 * number, m.AskStatus()))
            await client.send(m.pack_message(2 * number + 1, lease))
        await asyncio.sleep(0.05)
        runs = []
        for _ in range(60):
            answer = await client.answer()
            if isinstance(answer, m.RunLeased):
                runs.append(answer.run)
        assert runs == list(range(1, 31))
        assert [int(os.pread(one, 9, 0)) for one in client.descriptors] == runs
        client.close()


async def test_descriptors_of_unsent_answers_are_closed_with_the_session(path: Path) -> None:
    handler = ScriptedHandler()
    handler.status = bytes(200_000)
    before = open_descriptors()
    async with serving(path, handler) as server:
        client = Client(path)
        for number in range(1, 11):
            lease = m.LeaseRun(namespace=0, blocks=number, deadline_s=1.0)
            await client.send(m.pack_message(1, m.AskStatus()))
            await client.send(m.pack_message(2, lease))
        await asyncio.sleep(0.05)
        client.close()
        await until(lambda: server.describe()["open"] == 0)
    await asyncio.sleep(0)
    assert open_descriptors() == before
