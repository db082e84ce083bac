"""One connection to one node: what its sinks are told, and when."""

import asyncio
import errno
import logging
import socket

import pytest

from kvstore import wire
from kvstore.client import channel as channel_module
from kvstore.client.channel import REQUESTS_OUTSTANDING_MAX
from kvstore.client.health import BACKOFF_FIRST_S
from kvstore.errors import DeadlineExceeded, NodeRefused, NodeUnreachable, ProtocolError
from tests.kvstore.client.scripted_peer import (
    CLUSTER,
    TARGET,
    Dial,
    RecordingSink,
    ScriptedPeer,
    ask,
)


class TestFaults:
    """A sink hears of a fault from the event loop, never from within `submit`."""

    async def test_a_refused_connection_is_told_after_submit(
        self, dial: Dial, closed_port: int
    ) -> None:
        sink = ask(dial(closed_port))
        assert sink.calls == []
        await sink.end()
        assert sink.calls == ["failure"]
        assert isinstance(sink.error, NodeUnreachable)
        assert "Connection refused" in sink.error.detail

    async def test_a_process_without_descriptors_is_told_after_submit_and_recovers(
        self, dial: Dial, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        channel = dial(peer.port)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", refuse)
            sinks = [ask(channel), ask(channel)]
            assert [sink.calls for sink in sinks] == [[], []]
        for sink in sinks:
            await sink.end()
            assert isinstance(sink.error, NodeUnreachable)
            assert "Too many open files" in sink.error.detail
        sink = ask(channel)
        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request())
        await sink.end()
        assert sink.calls == ["frame", "payload", "end"]

    async def test_a_peer_that_went_away_is_told_after_submit(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        first = ask(channel)
        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request())
        await first.end()
        connection.reset()
        sink = ask(channel)  # the kernel refuses to send already; the loop has not looked yet
        assert sink.calls == []
        await sink.end()
        assert sink.calls == ["failure"]
        assert isinstance(sink.error, NodeUnreachable)

    async def test_a_closed_channel_refuses_after_submit(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        waiting = ask(channel)
        channel.close()
        assert waiting.calls == ["failure"]
        sink = ask(channel)
        assert sink.calls == []
        await sink.end()
        assert isinstance(sink.error, NodeUnreachable)
        assert "closed" in sink.error.detail

    async def test_the_next_request_connects_anew(self, dial: Dial, peer: ScriptedPeer) -> None:
        channel = dial(peer.port)
        for _ in range(3):
            sink = ask(channel)
            connection = await peer.accept_and_greet()
            await connection.read_request()
            connection.reset()
            await sink.end()
            assert isinstance(sink.error, NodeUnreachable)
        sink = ask(channel)
        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request())
        await sink.end()
        assert sink.error is None

    async def test_a_sink_may_submit_from_within_a_payload_while_the_peer_resets(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        """The request that meets the reset fails, and what is submitted then goes out over the
        next connection, which the old one's fault does not end."""
        channel = dial(peer.port)
        place = memoryview(bytearray(1000))
        reader, within, after = RecordingSink(place), RecordingSink(), RecordingSink()
        ask(channel, reader)
        connection = await peer.accept_and_greet()
        request = await connection.read_request()

        def reset_and_submit() -> None:
            connection.reset()
            ask(channel, within)
            assert within.calls == [], "told from within its own submit"

        reader.then_on_payload = reset_and_submit
        within.then_on_failure = lambda: ask(channel, after)
        await connection.answer(request, payload=b"x" * 1000, is_last=False)
        await within.end()
        assert (reader.calls, within.calls) == (["frame", "payload", "failure"], ["failure"])

        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request())
        await after.end()
        assert after.calls == ["frame", "payload", "end"]

    async def test_every_sink_that_asks_again_on_failure_is_served_by_the_next_connection(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        again = [RecordingSink() for _ in range(5)]
        for sink in again:
            first = RecordingSink()
            first.then_on_failure = lambda sink=sink: ask(channel, sink)
            ask(channel, first)
        connection = await peer.accept_and_greet()
        await connection.read_request()
        connection.reset()
        connection = await peer.accept_and_greet()
        for sink in again:
            await connection.answer(await connection.read_request())
            await sink.end()
            assert sink.error is None

    async def test_garbage_ends_the_connection_and_names_itself(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        sink = ask(dial(peer.port))
        connection = await peer.accept_and_greet()
        await connection.read_request()
        await connection.send(bytes(64))
        await sink.end()
        assert isinstance(sink.error, ProtocolError)
        assert "magic" in sink.error.detail


class TestBounds:
    """What waits for a node is bounded, in number, bytes and time."""

    async def test_more_requests_than_may_wait_are_refused_and_the_others_answered(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        first = ask(channel)
        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request())
        await first.end()
        taken = [ask(channel) for _ in range(REQUESTS_OUTSTANDING_MAX)]
        refused = [ask(channel) for _ in range(3)]
        assert [sink.calls for sink in refused] == [[], [], []]
        for sink in refused:
            await sink.end()
            assert isinstance(sink.error, NodeUnreachable)
            assert f"{REQUESTS_OUTSTANDING_MAX} requests wait" in sink.error.detail
        assert channel.health.is_available, "a full queue is no failure of the connection"
        for sink in taken:
            await connection.answer(await connection.read_request())
            await sink.end()
            assert sink.error is None

    async def test_a_node_that_does_not_read_gets_one_large_payload_and_no_second(
        self, dial: Dial, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "UNSENT_BYTES_MAX", 1 << 20)
        channel = dial(peer.port)
        payload = memoryview(bytes(24 << 20))
        sinks = [RecordingSink(), RecordingSink()]
        for sink in sinks:
            channel.submit(
                wire.Op.WRITE, sink, payload=[payload], payload_bytes=len(payload), deadline_s=1.0
            )
        await sinks[1].end()
        assert isinstance(sinks[1].error, NodeUnreachable)
        assert "bytes wait to be sent" in sinks[1].error.detail
        connection = await peer.accept_and_greet()
        request = await connection.read_request()
        assert request.payload == payload
        await connection.answer(request)
        await sinks[0].end()
        assert sinks[0].error is None

    async def test_a_silent_connection_is_ended(
        self, dial: Dial, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "ANSWER_DEADLINE_S", 0.1)
        channel = dial(peer.port)
        sinks = [ask(channel), ask(channel)]
        connection = await peer.accept_and_greet()
        for sink in sinks:
            await sink.end()
            assert isinstance(sink.error, DeadlineExceeded)
        await connection.read_to_the_end()
        assert not channel.health.is_available

    async def test_an_address_that_does_not_answer_is_given_up(
        self, dial: Dial, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "CONNECT_DEADLINE_S", 0.1)
        monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EINPROGRESS)
        channel = dial(peer.port)
        with monkeypatch.context() as patch:
            # A socket that never connects is never writable.
            patch.setattr(asyncio.get_running_loop(), "add_writer", lambda *_: None)
            sink = ask(channel)
            await sink.end()
        assert isinstance(sink.error, NodeUnreachable)
        assert "no connection within 0.1 s" in sink.error.detail


class TestGreeting:
    """Nobody talks to a stranger."""

    async def test_requests_carry_target_and_epoch_and_come_after_the_greeting(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        ask(dial(peer.port))
        connection = await peer.accept()
        hello, request = await connection.read_request(), await connection.read_request()
        assert hello.header.op == wire.Op.HELLO
        assert wire.parse_hello(hello.body) == (CLUSTER, TARGET)
        assert (request.header.op, request.header.target, request.header.epoch) == (
            wire.Op.STAT,
            3,
            7,
        )

    @pytest.mark.parametrize(
        "theirs", [wire.pack_hello(bytes(16), TARGET), wire.pack_hello(CLUSTER, "t02")]
    )
    async def test_a_node_that_is_another_one_fails_every_request(
        self, dial: Dial, peer: ScriptedPeer, theirs: bytes
    ) -> None:
        channel = dial(peer.port)
        sinks = [ask(channel), ask(channel)]
        connection = await peer.accept()
        await connection.answer(await connection.read_request(), body=theirs)
        for sink in sinks:
            await sink.end()
            assert isinstance(sink.error, ProtocolError)
            assert "the node says it is" in sink.error.detail
        await connection.read_to_the_end()

    async def test_a_node_that_refuses_the_greeting_fails_every_request(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        sinks = [ask(channel), ask(channel)]
        connection = await peer.accept()
        await connection.answer(await connection.read_request(), status=wire.Status.WRONG_TARGET)
        for sink in sinks:
            await sink.end()
            assert isinstance(sink.error, NodeRefused)
            assert sink.error.status == "WRONG_TARGET"
        assert not channel.health.is_available

    async def test_host_names_are_resolved(self, dial: Dial) -> None:
        found = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)
        with ScriptedPeer(str(found[0][4][0])) as peer:
            sink = ask(dial(peer.port, host="localhost"))
            connection = await peer.accept_and_greet()
            await connection.answer(await connection.read_request())
            await sink.end()
            assert sink.error is None

    async def test_a_name_that_nobody_knows_is_told_after_submit(
        self, dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(*_: object, **__: object) -> object:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
        sink = ask(dial(1, host="nobody.invalid"))
        assert sink.calls == []
        await sink.end()
        assert isinstance(sink.error, NodeUnreachable)
        assert "nobody.invalid: Name or service not known" in sink.error.detail

    async def test_a_channel_that_is_closed_while_a_name_is_looked_up_leaves_no_task(
        self, dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def wait(*_: object, **__: object) -> object:
            return await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", wait)
        before = len(asyncio.all_tasks())
        channel = dial(1, host="slow.invalid")
        sink = ask(channel)
        await asyncio.sleep(0)
        channel.close()
        await asyncio.sleep(0)
        assert sink.calls == ["failure"]
        assert len(asyncio.all_tasks()) == before


class TestHealth:
    """What a connection teaches about its node."""

    async def test_a_refusal_keeps_the_connection_and_opens_no_breaker(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        refused, served = ask(channel), ask(channel)
        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request(), status=wire.Status.BUSY)
        await refused.end()
        assert isinstance(refused.error, NodeRefused)
        assert refused.error.status == "BUSY"
        assert channel.health.is_available
        await connection.answer(await connection.read_request())
        await served.end()
        assert served.error is None

    async def test_a_refusal_proves_too_little_to_forget_failures(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        now_s = 100.0
        channel = dial(peer.port, breaker_clock=lambda: now_s)
        for status in (wire.Status.BUSY, wire.Status.DISK_ERROR):
            sink, lost = ask(channel), ask(channel)
            connection = await peer.accept_and_greet()
            await connection.answer(await connection.read_request(), status=status)
            await sink.end()
            connection.reset()
            await lost.end()
        now_s += BACKOFF_FIRST_S * 1.5
        assert not channel.health.is_available, "the second failure in a row waits twice as long"
        now_s += BACKOFF_FIRST_S
        assert channel.health.is_available

    async def test_a_failure_is_logged_with_its_node_and_reason(
        self, dial: Dial, closed_port: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, logger="kvstore.client.channel")
        await ask(dial(closed_port)).end()
        assert "node n01: connect" in caplog.text
        assert "Connection refused" in caplog.text
