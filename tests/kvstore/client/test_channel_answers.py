"""What a channel still owes: answers nobody wants any more, and the time until it owes none."""

import asyncio

from kvstore import wire
from tests.kvstore.client.scripted_peer import Dial, RecordingSink, ScriptedPeer, ask
from tests.patience import PATIENCE_S


class TestIdleness:
    """`wait_until_idle` returns when nothing is waited for any more."""

    async def test_an_unused_channel_is_idle_at_once(self, dial: Dial, closed_port: int) -> None:
        channel = dial(closed_port)
        assert channel.is_idle
        await channel.wait_until_idle()

    async def test_it_waits_for_the_last_answer(self, dial: Dial, peer: ScriptedPeer) -> None:
        channel = dial(peer.port)
        ask(channel), ask(channel)
        waiting = asyncio.create_task(channel.wait_until_idle())
        connection = await peer.accept_and_greet()
        first = await connection.read_request()
        second = await connection.read_request()
        await connection.answer(first)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await connection.answer(second)
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        assert channel.is_idle

    async def test_a_failure_ends_the_wait(self, dial: Dial, peer: ScriptedPeer) -> None:
        channel = dial(peer.port)
        ask(channel)
        waiting = asyncio.create_task(channel.wait_until_idle())
        (await peer.accept_and_greet()).reset()
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        assert channel.is_idle

    async def test_it_waits_for_what_is_asked_again_after_a_failure(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        first, again = RecordingSink(), RecordingSink()
        first.then_on_failure = lambda: ask(channel, again)
        ask(channel, first)
        waiting = asyncio.create_task(channel.wait_until_idle())
        (await peer.accept_and_greet()).reset()
        connection = await peer.accept_and_greet()
        request = await connection.read_request()
        assert not waiting.done()
        await connection.answer(request)
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        assert again.error is None


class TestDetachedSinks:
    """A sink that was let go gets nothing more, and the connection lives on."""

    async def test_the_rest_of_a_payload_goes_to_waste(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        place = bytearray(300_000)
        sink, following = RecordingSink(memoryview(place)), RecordingSink()
        ask(channel, sink)
        ask(channel, following)
        connection = await peer.accept_and_greet()
        request = await connection.read_request()
        await connection.answer(request, payload=b"x" * 300_000, cut_bytes=100_000)
        async with asyncio.timeout(PATIENCE_S):
            while place.count(b"x") < 200_000:
                await asyncio.sleep(0.001)
        channel.detach(sink)
        place.append(0)  # raises BufferError if anything still points into it
        await connection.send(b"y" * 100_000)
        await connection.answer(await connection.read_request())
        await following.end()
        assert following.error is None
        assert place == b"x" * 200_000 + bytes(100_001)
        assert sink.calls == ["frame", "end"]

    async def test_an_answer_that_has_not_begun_goes_to_waste(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        place = bytearray(1000)
        sink, following = RecordingSink(memoryview(place)), RecordingSink()
        ask(channel, sink)
        ask(channel, following)
        channel.detach(sink)
        place.append(0)
        connection = await peer.accept_and_greet()
        await connection.answer(await connection.read_request(), payload=b"x" * 1000)
        await connection.answer(await connection.read_request())
        await following.end()
        assert following.error is None
        assert place == bytes(1001)

    async def test_an_unsent_payload_is_copied_when_its_owner_wants_it_back(
        self, dial: Dial, peer: ScriptedPeer
    ) -> None:
        channel = dial(peer.port)
        payload = bytearray(b"x" * (24 << 20))
        sink = RecordingSink()
        request_id = channel.submit(
            wire.Op.WRITE,
            sink,
            payload=[memoryview(payload)],
            payload_bytes=len(payload),
            deadline_s=1.0,
        )
        connection = await peer.accept_and_greet()
        await asyncio.sleep(0.02)
        kept_bytes = channel.keep_payload(request_id)
        assert 0 < kept_bytes < len(payload), "the kernel has taken a part of it"
        payload.clear()  # raises BufferError if anything still points into it
        request = await connection.read_request()
        assert request.payload == b"x" * (24 << 20)
        await connection.answer(request)
        await sink.end()
        assert channel.keep_payload(request_id) == 0
