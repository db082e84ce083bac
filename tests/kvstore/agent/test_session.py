"""Sessions: whatever a client sends, and however slowly, it costs its own session at most."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from pathlib import Path

import pytest

from kvstore import agent_messages as m
from kvstore.agent.replies import Reply, Running, work_to_reply

from .scripted_sessions import (
    MATCH,
    Client,
    ScriptedHandler,
    send_all,
    serving,
    until,
)

NOBODY = 65_534


# Malformed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        m.HEAD.pack(2**32 - 1, 1),
        m.HEAD.pack(0, 1),
        m.HEAD.pack(3, 1) + b"\xc1\xc1\xc1",
        random.Random(1).randbytes(5_000),
    ],
)
async def test_malformed_message_ends_its_session_alone_with_one_line(
    path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    handler = ScriptedHandler()
    async with serving(path, handler) as server:
        other, client = Client(path), Client(path)
        await other.ask(m.AskStatus())
        await client.send(data)
        await client.wait_until_ended()
        lines = [one for one in caplog.records if "malformed message" in one.getMessage()]
        assert len(lines) == 1
        assert "\n" not in lines[0].getMessage()
        assert isinstance(await other.ask(m.AskStatus()), m.StatusTold)
        assert server.describe()["open"] == 1
        client.close()
        other.close()


async def test_messages_before_a_malformed_one_are_answered(path: Path) -> None:
    async with serving(path, ScriptedHandler()):
        client = Client(path)
        await client.send(m.pack_message(1, m.AskStatus()) + m.HEAD.pack(0, 2))
        assert isinstance(await client.answer(), m.StatusTold)
        await client.wait_until_ended()
        client.close()


# Slow ---------------------------------------------------------------------------------------------


async def test_message_that_comes_byte_by_byte_ends_its_session_in_time(path: Path) -> None:
    async with serving(path, ScriptedHandler(), message_s=0.3) as server:
        client = Client(path)
        await client.ask(m.AskStatus())
        pieces = [bytes([byte]) for byte in m.pack_message(1, m.Hello(version=1, client="x" * 128))]
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await send_all(client, pieces, pause_s=0.02)
        assert server.describe()["open"] == 0
        client.close()


async def test_session_that_never_says_anything_is_ended_in_time(path: Path) -> None:
    async with serving(path, ScriptedHandler(), message_s=0.1):
        client = Client(path)
        await client.wait_until_ended()
        client.close()


async def test_session_may_rest_as_long_as_it_likes_between_messages(path: Path) -> None:
    async with serving(path, ScriptedHandler(), message_s=0.1):
        client = Client(path)
        await client.ask(m.AskStatus())
        await asyncio.sleep(0.3)
        assert isinstance(await client.ask(m.AskStatus()), m.StatusTold)
        client.close()


async def test_each_message_has_its_own_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    data = m.pack_message(1, m.AskStatus())
    async with serving(path, ScriptedHandler(), message_s=0.4):
        client = Client(path)
        await client.send(data[:-1])
        for _ in range(6):
            now_s += 0.3
            await client.send(data[-1:] + data[:-1])
            assert isinstance(await client.answer(), m.StatusTold)
        client.close()


# Work ---------------------------------------------------------------------------------------------


async def test_work_is_cancelled_when_its_session_ends(path: Path) -> None:
    handler = ScriptedHandler()
    async with serving(path, handler) as server:
        client = Client(path)
        for number in range(5):
            await client.send(m.pack_message(number, MATCH))
        await until(lambda: server.describe()["requests"] == 5)
        client.close()
        await until(lambda: handler.cancelled == 5)
        assert handler.ended == [1]
        assert server.describe()["request_bytes"] == 0


async def test_work_whose_own_timeout_has_just_fired_can_be_cancelled() -> None:
    loop = asyncio.get_running_loop()

    async def work() -> Reply:
        try:
            async with asyncio.timeout_at(loop.time()):
                # Behind the time-out, and before the work hears of it.
                loop.call_soon(running.cancel)
                await loop.create_future()
        except TimeoutError:
            await asyncio.sleep(1)
        return Reply(m.Matched(0))

    running = Running(work())
    running.task = asyncio.ensure_future(work_to_reply(running))
    with pytest.raises(asyncio.CancelledError):
        await running.task


async def test_work_is_cancelled_once_and_may_end_cleanly() -> None:
    async def work() -> Reply:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.sleep(0.01)
        return Reply(m.Matched(7))

    running = Running(work())
    running.task = asyncio.ensure_future(work_to_reply(running))
    await asyncio.sleep(0)
    running.cancel()
    running.cancel()
    assert (await running.task).message == m.Matched(7)


async def test_operating_fault_becomes_a_refusal(path: Path) -> None:
    async with serving(path, ScriptedHandler()):
        client = Client(path)
        forget = m.Forget(namespace=0, keys=b"", first_block=0, deadline_s=1.0)
        refused = await client.ask(forget)
        assert isinstance(refused, m.Refused)
        assert (refused.what, refused.is_mistake) == ("no", False)
        client.close()


async def test_fault_of_ours_ends_the_agent(path: Path) -> None:
    handler = ScriptedHandler()
    handler.fault = RuntimeError("an invariant is broken")

    async def provoke() -> None:
        async with serving(path, handler):
            client = Client(path)
            forget = m.Forget(namespace=0, keys=b"", first_block=0, deadline_s=1.0)
            await client.send(m.pack_message(1, forget))
            try:
                await client.wait_until_ended()
            finally:
                client.close()

    with pytest.raises(ExceptionGroup) as raised:
        await provoke()
    assert "an invariant is broken" in repr(raised.value.exceptions)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_process_of_another_user_is_refused(path: Path) -> None:
    async with serving(path, ScriptedHandler()) as server:
        os.chmod(path, 0o666)
        os.chmod(path.parent, 0o755)
        os.seteuid(NOBODY)
        try:
            client = Client(path)
        finally:
            os.seteuid(0)
        await client.wait_until_ended()
        client.close()
        assert server.describe()["refused"] == 1
