"""A run that comes from another host: whole and verified, or not at all, whatever the host says."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.agent import run_receiver
from kvstore.agent.offers import OfferedRun
from kvstore.agent.run_messages import (
    PIECE_BYTES_MAX,
    RunPiece,
    pack_checksum,
    pack_piece,
    pack_take,
    parse_piece,
    parse_take,
)
from kvstore.agent.run_receiver import PIECES_AHEAD, RunReceiver
from kvstore.errors import InvalidArgument
from kvstore.window.peers import Peers
from kvstore.wire import Op, Status
from tests.kvstore.client.scripted_peer import CLUSTER, PeerConnection, ScriptedPeer
from tests.kvstore.faults.lying_proxy import Frame

WANTED = OfferedRun(bytes(range(16)), b"n" * 16, b"l" * 16, 7)
PIECE_BYTES = 64 << 10
"""Far less than a run has, so that one of several pieces is quickly made."""
LENGTH = (PIECES_AHEAD + 1) * PIECE_BYTES + 4_321
CONTENT = random.Random(5).randbytes(LENGTH)
LONG_S = 20.0


@dataclass
class Taker:
    """The host that wants the run, and the place where it is to lie."""

    receiver: RunReceiver
    place: bytearray = field(default_factory=lambda: bytearray(LENGTH))

    def take(self, peer: ScriptedPeer, deadline_s: float = LONG_S) -> asyncio.Task[bool]:
        host = f"127.0.0.1:{peer.port}"
        work = self.receiver.take(host, WANTED, memoryview(self.place), deadline_s)
        return asyncio.create_task(work)

    def ended(self) -> dict[str, int]:
        """How the takes ended, those counts that are not 0."""
        counts = self.receiver.describe()
        return {name: count for name, count in counts.items() if count and name != "asked"}


def stand_still() -> float:
    """A clock: a host that has failed is left alone for ever."""
    return 1_000.0


@pytest.fixture
async def taker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Taker]:
    monkeypatch.setattr(run_receiver, "PIECE_BYTES", PIECE_BYTES)
    loop = asyncio.get_running_loop()
    escaped: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: escaped.append(context))
    peers = Peers(cluster=CLUSTER, loop=loop, clock=stand_still)
    made = Taker(RunReceiver(peers, loop=loop, clock=stand_still))
    yield made
    made.receiver.close()
    await asyncio.sleep(0)
    assert not escaped


@pytest.fixture
def peer() -> Iterator[ScriptedPeer]:
    with ScriptedPeer() as it:
        yield it


async def answer_piece(
    connection: PeerConnection,
    request: Frame,
    lie: Mapping[str, Any] | None = None,
    *,
    cut_bytes: int = 0,
) -> None:
    """As a good host does, but for what a lie changes."""
    _, start, length = parse_piece(request.body)
    payload = CONTENT[start : start + length]
    good = {"body": pack_checksum(xxh3_64_intdigest(payload)), "payload": payload, "count": 1}
    await connection.answer(request, **{**good, **(lie or {})}, cut_bytes=cut_bytes)


async def answer_pieces(connection: PeerConnection) -> Frame:
    """All of them; returns the request behind them."""
    while True:
        request = await connection.read_request()
        if request.header.op != Op.RUN:
            return request
        await answer_piece(connection, request)


def test_requests_come_back_as_they_were_packed() -> None:
    piece = RunPiece(WANTED, 2**40 + 1, PIECE_BYTES_MAX)
    assert parse_piece(pack_piece(piece)) == piece
    assert parse_take(pack_take(WANTED)) == WANTED


@pytest.mark.parametrize("length", [0, PIECE_BYTES_MAX + 1, 2**32 - 1])
def test_piece_of_a_length_that_none_has_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgument, match="bytes of a run"):
        parse_piece(pack_piece(RunPiece(WANTED, 0, length)))


async def test_run_comes_in_pieces_and_is_taken_at_the_end(
    taker: Taker, peer: ScriptedPeer
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    last = await answer_pieces(connection)
    assert (last.header.op, parse_take(last.body)) == (Op.TAKE, WANTED)
    assert not taking.done()
    await connection.answer(last, count=1)
    assert await taking
    assert taker.place == CONTENT
    assert taker.ended() == {"remote_found": 1, "received_bytes": LENGTH}


async def test_only_a_few_pieces_are_on_their_way_at_a_time(
    taker: Taker, peer: ScriptedPeer
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    asked = [await connection.read_request() for _ in range(PIECES_AHEAD)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await connection.read_request()
    await answer_piece(connection, asked[0])
    starts = [parse_piece(request.body).start for request in asked]
    assert starts == [number * PIECE_BYTES for number in range(PIECES_AHEAD)]
    following = await connection.read_request()
    assert parse_piece(following.body).start == PIECES_AHEAD * PIECE_BYTES
    taking.cancel()
    await asyncio.wait({taking})


async def test_run_is_not_here_when_another_was_faster(taker: Taker, peer: ScriptedPeer) -> None:
    """All bytes have come, and are somebody else's."""
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    await connection.answer(await answer_pieces(connection), count=0)
    assert not await taking
    assert taker.ended() == {"remote_absent": 1}


async def test_run_is_not_here_when_it_is_gone_in_the_middle(
    taker: Taker, peer: ScriptedPeer
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    await answer_piece(connection, await connection.read_request())
    await connection.answer(await connection.read_request(), count=0)
    assert not await taking
    assert taker.ended() == {"remote_absent": 1}


async def test_run_is_not_here_when_bytes_do_not_fit_their_checksum(
    taker: Taker, peer: ScriptedPeer
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    await answer_piece(connection, await connection.read_request(), {"body": bytes(8)})
    assert not await taking
    assert taker.ended() == {"remote_rejected": 1}


@pytest.mark.parametrize(
    "lie",
    [
        {"payload": b"too short"},
        {"payload": bytes(PIECE_BYTES + 1)},
        {"payload": b""},
        {"body": b""},
        {"body": bytes(9)},
        {"count": 0},
        {"count": 2},
        {"is_last": False},
        {"status": Status.BUSY},
        {"status": Status.BAD_REQUEST, "payload": b"", "count": 0, "body": b"why"},
    ],
    ids=lambda lie: "-".join(f"{name}-{str(value)[:12]}" for name, value in lie.items()),
)
async def test_run_is_not_here_when_the_answer_is_none(
    taker: Taker, peer: ScriptedPeer, lie: dict[str, Any]
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    request = await connection.read_request()
    with suppress(ConnectionError):  # it may hang up in the middle of the lie
        await answer_piece(connection, request, lie)
    assert not await taking
    assert taker.ended() == {"remote_unreachable": 1}


@pytest.mark.parametrize("lie", [{"count": 2}, {"count": 1, "body": b"x"}, {"payload": b"x"}])
async def test_run_is_not_taken_when_the_answer_to_that_is_none(
    taker: Taker, peer: ScriptedPeer, lie: dict[str, Any]
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    await connection.answer(await answer_pieces(connection), **lie)
    assert not await taking
    assert taker.ended() == {"remote_unreachable": 1}


async def test_run_is_not_here_when_the_answer_is_cut_off_within_a_piece(
    taker: Taker, peer: ScriptedPeer
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    await answer_piece(connection, await connection.read_request(), cut_bytes=1)
    connection.reset()
    assert not await taking
    assert taker.ended() == {"remote_unreachable": 1}


@pytest.mark.parametrize("has_all", [False, True])
async def test_run_is_not_here_when_the_host_falls_silent(
    taker: Taker, peer: ScriptedPeer, has_all: bool
) -> None:
    """Also where every byte is here: without the answer to TAKE it may be another's."""
    taker.place = bytearray(1_000)
    taking = taker.take(peer, 2.0 if has_all else 0.2)
    connection = await peer.accept_and_greet()
    if has_all:
        assert (await answer_pieces(connection)).header.op == Op.TAKE
    assert not await taking
    assert taker.ended() == {"remote_late": 1}


async def test_nothing_is_written_any_more_when_a_take_was_given_up(
    taker: Taker, peer: ScriptedPeer
) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    asked = [await connection.read_request() for _ in range(PIECES_AHEAD)]
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    for request in asked:
        await answer_piece(connection, request)
    # The connection lives on: a second take is served behind what nobody wanted.
    again = Taker(taker.receiver)
    taking = again.take(peer)
    await connection.answer(await answer_pieces(connection), count=1)
    assert await taking
    assert again.place == CONTENT
    assert taker.place == bytes(LENGTH)


async def test_host_that_was_late_is_left_alone_for_a_moment(
    taker: Taker, peer: ScriptedPeer
) -> None:
    assert not await taker.take(peer, 0.2)
    assert not await taker.take(peer)
    assert taker.ended() == {"remote_late": 1, "skipped": 1}


async def test_bytes_at_random_are_no_run(taker: Taker, peer: ScriptedPeer) -> None:
    taking = taker.take(peer)
    connection = await peer.accept_and_greet()
    await connection.read_request()
    await connection.send(os.urandom(1 << 16))
    assert not await taking
    assert taker.ended() == {"remote_unreachable": 1}
