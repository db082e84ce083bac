"""One question, one frame, in time: or an error that names the node."""

import asyncio
import time

import pytest

from kvstore import wire
from kvstore.client.channel import NodeChannel
from kvstore.client.health import Breaker, NodeHealth
from kvstore.client.inquiry import ask_node
from kvstore.errors import DeadlineExceeded, NodeRefused, NodeUnreachable, ProtocolError
from tests.kvstore.client.scripted_peer import CLUSTER, TARGET, ScriptedPeer


@pytest.fixture
async def channel(peer: ScriptedPeer) -> NodeChannel:
    return NodeChannel(
        node="n01",
        address=("127.0.0.1", peer.port),
        cluster=CLUSTER,
        target=TARGET,
        target_index=0,
        epoch=1,
        health=NodeHealth(time.monotonic, Breaker(time.monotonic)),
        loop=asyncio.get_running_loop(),
        clock=time.monotonic,
    )


def ask(channel: NodeChannel, deadline_s: float = 2.0) -> asyncio.Task[bytes]:
    return asyncio.create_task(
        ask_node(
            channel,
            wire.Op.LOCATE,
            body=bytes(32),
            count=1,
            deadline_s=deadline_s,
            loop=asyncio.get_running_loop(),
        )
    )


async def test_the_body_of_the_answer_is_returned(channel: NodeChannel, peer: ScriptedPeer) -> None:
    asking = ask(channel)
    connection = await peer.accept_and_greet()
    request = await connection.read_request()
    assert (request.header.op, request.header.count, request.body) == (
        wire.Op.LOCATE,
        1,
        bytes(32),
    )
    assert 0 < request.header.deadline_ms <= 2000
    await connection.answer(request, body=b"found")
    assert await asking == b"found"
    channel.close()


async def test_a_refusal_names_its_status(channel: NodeChannel, peer: ScriptedPeer) -> None:
    asking = ask(channel)
    connection = await peer.accept_and_greet()
    await connection.answer(await connection.read_request(), status=wire.Status.DISK_ERROR)
    with pytest.raises(NodeRefused, match="n01: refused: DISK_ERROR"):
        await asking
    channel.close()


@pytest.mark.parametrize(("payload", "is_last"), [(b"x" * 64, True), (b"", False)])
async def test_a_payload_and_a_second_frame_were_not_asked_for(
    channel: NodeChannel, peer: ScriptedPeer, payload: bytes, is_last: bool
) -> None:
    asking = ask(channel)
    connection = await peer.accept_and_greet()
    await connection.answer(await connection.read_request(), payload=payload, is_last=is_last)
    with pytest.raises(ProtocolError, match="more than the one frame"):
        await asking
    channel.close()


async def test_silence_ends_at_the_deadline_and_a_late_answer_harms_nobody(
    channel: NodeChannel, peer: ScriptedPeer
) -> None:
    asking = ask(channel, deadline_s=0.05)
    connection = await peer.accept_and_greet()
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.05 s"):
        await asking
    await connection.answer(await connection.read_request(), body=b"late")
    asking = ask(channel)
    await connection.answer(await connection.read_request(), body=b"in time")
    assert await asking == b"in time"
    channel.close()


async def test_a_question_that_is_cancelled_leaves_the_connection_in_order(
    channel: NodeChannel, peer: ScriptedPeer
) -> None:
    asking = ask(channel)
    connection = await peer.accept_and_greet()
    request = await connection.read_request()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await connection.answer(request, body=b"nobody listens")
    following = ask(channel)
    await connection.answer(await connection.read_request(), body=b"somebody does")
    assert await following == b"somebody does"
    channel.close()


async def test_a_lost_connection_is_unreachable(channel: NodeChannel, peer: ScriptedPeer) -> None:
    asking = ask(channel)
    connection = await peer.accept_and_greet()
    await connection.read_request()
    connection.reset()
    with pytest.raises(NodeUnreachable):
        await asking
    channel.close()
