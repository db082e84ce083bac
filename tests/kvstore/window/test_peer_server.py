"""What an agent answers other agents, frame by frame, and what it does about bad ones."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.agent.offers import OfferedRun
from kvstore.agent.peer_server import PeerServerSettings
from kvstore.agent.run_messages import RunPiece, pack_piece, pack_take
from kvstore.layout import BlockLayout
from kvstore.window.messages import (
    AnnouncedItem,
    Announcement,
    WindowRequest,
    pack_announcement,
    pack_window_request,
    parse_answer,
    parse_hosts,
)
from kvstore.window.record import layout_prefix_of, parse_head
from kvstore.wire import Op, Status
from tests.kvstore.node.raw_client import Answer, RawClient
from tests.kvstore.node.test_hostile import BAD_STREAMS
from tests.kvstore.window.hosts import (
    BIG_LAYOUT,
    LAYOUT,
    NAMESPACE,
    Fleet,
    Host,
    bytes_of,
    key_of,
    open_fleet,
)
from tests.patience import until

CLUSTER = bytes.fromhex("ab" * 16)
OTHER_HOST = "10.9.8.7:1234"
ValueT = TypeVar("ValueT")


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(PeerServerSettings(connections_max=8, frame_s=0.3)) as it:
        yield it


@pytest.fixture
async def host(fleet: Fleet) -> Host:
    """An entrypoint that has record 1."""
    (host,) = fleet.open_entrypoints("e1")
    host.put(1)
    await until(lambda: host.directory is not None and host.directory.entries == 1)
    return host


async def blocking(call: Callable[[], ValueT]) -> ValueT:
    """A blocking client runs in a thread, for the server runs in this loop."""
    return await asyncio.to_thread(call)


def client_of(host: Host, *, is_greeted: bool = True, receive_buffer_bytes: int = 0) -> RawClient:
    client = RawClient(host.listener_address, CLUSTER, "agent", epoch=0)
    if receive_buffer_bytes:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    if is_greeted:
        assert client.hello().status is Status.OK
    return client


def wanted_of(number: int, layout: BlockLayout = LAYOUT) -> WindowRequest:
    return WindowRequest(key_of(number), NAMESPACE, layout_prefix_of(layout), layout.block_bytes)


def window_body(number: int, layout: BlockLayout = LAYOUT) -> bytes:
    return pack_window_request(wanted_of(number, layout))


def announce(client: RawClient, said: Announcement) -> Answer:
    return client.ask(Op.ANNOUNCE, body=pack_announcement(said), count=len(said.items))


def is_closed(client: RawClient) -> bool:
    try:
        return client.socket.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_window_is_one_frame_with_head_and_bytes(host: Host) -> None:
    def ask() -> Answer:
        with client_of(host) as client:
            return client.ask(Op.WINDOW, body=window_body(1))

    answer = await blocking(ask)
    assert answer.status is Status.OK
    assert (len(answer.headers), answer.headers[0].count) == (1, 1)
    assert answer.payloads == [bytes_of(1)]
    head = parse_head(answer.body)
    assert head[:3] == (key_of(1), NAMESPACE, layout_prefix_of(LAYOUT))
    assert (head.xxh3, head.size_bytes) == (xxh3_64_intdigest(bytes_of(1)), LAYOUT.block_bytes)
    assert 0 < head.ttl_ms <= 180_000


@pytest.mark.parametrize(
    "other",
    [
        wanted_of(1)._replace(key=bytes(32)),
        wanted_of(1)._replace(namespace_id=bytes(16)),
        wanted_of(1)._replace(layout=bytes(16)),
        wanted_of(1)._replace(size_bytes=LAYOUT.block_bytes - 1),
        wanted_of(1)._replace(size_bytes=0),
        wanted_of(1)._replace(size_bytes=2**32 - 1),
    ],
)
async def test_window_is_absent_when_anything_of_it_is_another(
    host: Host, other: WindowRequest
) -> None:
    def ask() -> Answer:
        with client_of(host) as client:
            return client.ask(Op.WINDOW, body=pack_window_request(other))

    answer = await blocking(ask)
    assert (answer.status, answer.headers[0].count) == (Status.OK, 0)
    assert (answer.body, answer.payloads) == (b"", [b""])


async def test_announcements_are_told_to_those_who_look_up(host: Host) -> None:
    items = [AnnouncedItem(key_of(n), 20_000, 60_000) for n in (5, 6)]

    def ask() -> None:
        with client_of(host) as client:
            said = Announcement(OTHER_HOST, 77, 2, items=items)
            first = parse_answer(announce(client, said).body)
            assert (first.entries, first.host_entries, first.is_new) == (3, 2, True)
            second = parse_answer(announce(client, Announcement(OTHER_HOST, 77, 2)).body)
            assert (second.host_entries, second.is_new) == (2, False)
            assert second.instance == first.instance
            keys = [key_of(n) for n in (5, 1, 7, 6)]
            answer = client.ask(Op.LOOKUP, body=wire.join_keys(keys), count=4)
            hosts = parse_hosts(answer.body, 4)
            assert hosts == [OTHER_HOST, host.address, None, OTHER_HOST]
            gone = Announcement(OTHER_HOST, 77, 1, items=[AnnouncedItem(key_of(5), 0, 0)])
            assert parse_answer(announce(client, gone).body).host_entries == 1
            # Somebody who found it absent may say so too.
            stale = Announcement(OTHER_HOST, 0, items=[AnnouncedItem(key_of(6), 0, 0)])
            assert parse_answer(announce(client, stale).body).host_entries == 0

    await blocking(ask)


async def test_host_that_begins_anew_or_leaves_is_forgotten(host: Host) -> None:
    items = [AnnouncedItem(key_of(n), 20_000, 60_000) for n in (5, 6)]

    def ask() -> None:
        with client_of(host) as client:
            announce(client, Announcement(OTHER_HOST, 77, 2, items=items))
            anew = Announcement(OTHER_HOST, 78, 1, items=items[:1])
            answer = parse_answer(announce(client, anew).body)
            assert (answer.host_entries, answer.is_new) == (1, True)
            late = Announcement(OTHER_HOST, 77, is_leaving=True)
            assert parse_answer(announce(client, late).body).host_entries == 1
            bye = Announcement(OTHER_HOST, 78, is_leaving=True)
            assert parse_answer(announce(client, bye).body).host_entries == 0
            asked = client.ask(Op.LOOKUP, body=key_of(5) + key_of(6), count=2)
            assert parse_hosts(asked.body, 2) == [None, None]

    await blocking(ask)


def announcement_bytes(
    host: bytes = b"10.9.8.7:1234",
    instance: int = 7,
    flags: int = 0,
    size_bytes: int = 20_000,
    ttl_ms: int = 1000,
) -> bytes:
    """An announcement of one item, also such as no agent makes."""
    head = np.array([(host, instance, 1, flags)], wire.ANNOUNCE_HEAD)
    items = np.array([(key_of(3), size_bytes, ttl_ms)], wire.ANNOUNCE_ITEM)
    return head.tobytes() + items.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        announcement_bytes(host=b"example:1234"),
        announcement_bytes(host=b"0.0.0.0:1234"),
        announcement_bytes(host=b"10.9.8.7"),
        announcement_bytes(host=b"10.9.8.7:0"),
        announcement_bytes(host=b"\xff\xfe:1234"),
        announcement_bytes(host=b"10.9.8.7:1\0:80"),
        announcement_bytes(host=b""),
        announcement_bytes(flags=2),
        announcement_bytes(flags=1, instance=0),
        announcement_bytes(instance=0),
        announcement_bytes(ttl_ms=86_400_001),
        announcement_bytes(ttl_ms=2**32 - 1),
        announcement_bytes(size_bytes=0),
        announcement_bytes(size_bytes=(16 << 20) + 1),
    ],
)
async def test_announcement_that_no_agent_makes_is_refused_and_the_connection_kept(
    host: Host, body: bytes
) -> None:
    def ask() -> None:
        with client_of(host) as client:
            answer = client.ask(Op.ANNOUNCE, body=body, count=1)
            assert answer.status is Status.BAD_REQUEST
            assert b"expected" in answer.body
            asked = client.ask(Op.LOOKUP, body=key_of(3), count=1)
            assert parse_hosts(asked.body, 1) == [None]

    await blocking(ask)


async def test_agent_without_a_part_refuses_to_hold_one(fleet: Fleet) -> None:
    plain = fleet.open("plain")

    def ask() -> None:
        with client_of(plain) as client:
            said = Announcement(OTHER_HOST, 77)
            assert announce(client, said).status is Status.BAD_REQUEST
            answer = client.ask(Op.LOOKUP, body=bytes(32), count=1)
            assert answer.status is Status.BAD_REQUEST
            assert b"without a part" in answer.body
            assert client.ask(Op.WINDOW, body=window_body(1)).status is Status.OK

    await blocking(ask)


async def test_agent_without_an_arena_has_no_run_to_give(host: Host) -> None:
    run = OfferedRun(bytes(16), NAMESPACE, layout_prefix_of(LAYOUT), 1)

    def ask() -> list[int]:
        with client_of(host) as client:
            read = client.ask(Op.RUN, body=pack_piece(RunPiece(run, 0, 100)))
            taken = client.ask(Op.TAKE, body=pack_take(run))
            assert (read.status, taken.status) == (Status.OK, Status.OK)
            return [read.headers[0].count, taken.headers[0].count]

    assert await blocking(ask) == [0, 0]


async def test_stranger_is_refused_and_the_connection_kept(host: Host) -> None:
    def ask() -> None:
        with client_of(host, is_greeted=False) as client:
            for op, size in ((Op.STAT, 0), (Op.WINDOW, 72), (Op.RUN, 64), (Op.TAKE, 56)):
                assert client.ask(op, body=bytes(size)).status is Status.NOT_GREETED
            client.cluster = bytes(16)
            answer = client.hello()
            assert answer.status is Status.WRONG_CLUSTER
            assert wire.parse_hello(answer.body) == (CLUSTER, "agent")
            client.cluster, client.target = CLUSTER, "t01"
            assert client.hello().status is Status.WRONG_TARGET
            assert client.ask(Op.STAT).status is Status.NOT_GREETED
            client.target, client.epoch = "agent", 99  # whatever the map's epoch
            assert client.hello().status is Status.OK
            assert json.loads(client.ask(Op.STAT).body)["agent"] == "e1"

    await blocking(ask)


@pytest.mark.parametrize("op", [Op.MATCH, Op.LOCATE, Op.FORGET])
async def test_operations_of_storage_nodes_are_refused(host: Host, op: Op) -> None:
    def ask() -> None:
        with client_of(host) as client:
            answer = client.ask(op, body=bytes(32), count=1)
            assert answer.status is Status.BAD_REQUEST
            assert b"is for a storage node" in answer.body

    await blocking(ask)


@pytest.mark.parametrize("name", BAD_STREAMS)
async def test_connection_is_closed_when_its_peer_sends(host: Host, name: str) -> None:
    def attack() -> None:
        with client_of(host, is_greeted=False) as attacker:
            attacker.send(BAD_STREAMS[name])
            with pytest.raises(ConnectionResetError):
                attacker.receive_frame()

    await blocking(attack)
    await prove_unharmed(host)


async def test_connection_is_closed_when_a_request_brings_a_payload(host: Host) -> None:
    def attack() -> None:
        with client_of(host) as attacker:
            attacker.send(
                attacker.frame(Op.WINDOW, body=window_body(1), payload_bytes=5) + b"12345"
            )
            with pytest.raises(ConnectionResetError):
                attacker.receive_frame()

    await blocking(attack)
    await prove_unharmed(host)


async def test_bad_frames_are_logged_one_line_each(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    def attack() -> None:
        with client_of(host, is_greeted=False) as attacker:
            attacker.send(b"b\r\nd" + bytes(100))
            assert is_closed(attacker)

    await blocking(attack)
    lines = [r.getMessage() for r in caplog.records if "bad frame" in r.getMessage()]
    assert len(lines) == 1
    assert r"magic b'b\r\nd', expected" in lines[0]


async def test_random_bytes_harm_nobody(host: Host, rng: random.Random) -> None:
    def attack() -> None:
        for _ in range(60):
            with client_of(host, is_greeted=rng.random() < 0.5) as attacker:
                op = rng.choice(list(Op))
                frame = attacker.frame(op, body=rng.randbytes(rng.choice([0, 40, 72, 80, 120])))
                cut = bytearray(frame[: rng.randrange(len(frame) + 1)])
                if cut and rng.random() < 0.5:
                    cut[rng.randrange(len(cut))] ^= 1 << rng.randrange(8)
                attacker.send(bytes(cut))

    await blocking(attack)
    await prove_unharmed(host)


@pytest.mark.parametrize("sent", [0, 1, 63, 64, 100])
async def test_peer_that_does_not_end_its_greeting_is_closed(host: Host, sent: int) -> None:
    def attack() -> None:
        with client_of(host, is_greeted=False) as attacker:
            body = wire.pack_hello(CLUSTER, "agent")
            attacker.send(attacker.frame(Op.HELLO, body=body)[:sent])
            assert is_closed(attacker)

    await blocking(attack)
    assert host.server.counters.slow_peers == 1
    await prove_unharmed(host)


async def test_greeted_peer_may_be_silent_but_not_stop_within_a_frame(host: Host) -> None:
    def attack() -> None:
        with client_of(host) as client:
            client.socket.settimeout(0.8)
            with pytest.raises(TimeoutError):
                client.socket.recv(1)
            assert client.ask(Op.STAT).status is Status.OK
            client.send(client.frame(Op.WINDOW, body=window_body(1))[:70])
            assert is_closed(client)

    await blocking(attack)


async def test_peer_that_does_not_take_its_answer_is_closed(fleet: Fleet) -> None:
    host = fleet.open("big", memory_bytes=16 << 20)
    assert host.service.put(key_of(1), NAMESPACE, BIG_LAYOUT, bytes(16 << 20))

    def attack() -> RawClient:
        client = client_of(host)
        client.send(client.frame(Op.WINDOW, body=window_body(1, BIG_LAYOUT)))
        return client

    client = await blocking(attack)
    await until(lambda: host.server.counters.slow_peers == 1)
    client.close()
    assert host.server.describe()["connections"] <= 1


async def test_connections_beyond_the_bound_are_closed_at_once(host: Host) -> None:
    await until(lambda: host.server.describe()["connections"] == 0)

    def attack() -> None:
        clients = [client_of(host) for _ in range(8)]
        ninth = client_of(host, is_greeted=False)
        assert is_closed(ninth)
        assert clients[0].ask(Op.STAT).status is Status.OK
        for client in (*clients, ninth):
            client.close()

    await blocking(attack)
    assert host.server.counters.connections_refused == 1
    await until(lambda: host.server.describe()["connections"] == 0)
    await prove_unharmed(host)


async def test_peer_that_floods_does_not_hold_up_others(host: Host) -> None:
    def flood(client: RawClient) -> None:
        frames = b"".join(client.frame(Op.LOOKUP, body=bytes(32), count=1) for _ in range(2000))
        client.send(frames)
        for _ in range(2000):
            client.receive_answer()

    with await blocking(lambda: client_of(host)) as attacker:
        flooding = asyncio.create_task(blocking(lambda: flood(attacker)))
        for _ in range(5):
            await asyncio.wait_for(prove_unharmed(host), 1.0)
        await flooding


async def test_others_have_their_turn_between_the_announcements_of_one_peer(host: Host) -> None:
    items = [AnnouncedItem(key_of(n), 20_000, 60_000) for n in range(1024)]
    said = Announcement(OTHER_HOST, 77, 1024, items=items)

    def flood() -> None:
        with client_of(host) as client:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            body = pack_announcement(said)
            frames = [client.frame(Op.ANNOUNCE, body=body, count=1024) for _ in range(40)]
            client.send(b"".join(frames))
            for _ in frames:
                client.receive_answer()

    counters = host.server.counters
    flooding = asyncio.create_task(blocking(flood))
    most, before = 0, counters.requests
    while not flooding.done():
        await asyncio.sleep(0)
        most, before = max(most, counters.requests - before), counters.requests
    await flooding
    assert counters.requests > 40
    # One at a time; the end of one turn and the begin of the next may be seen together.
    assert most <= 2, "announcements that were answered in one turn"


async def prove_unharmed(host: Host) -> None:
    def ask() -> None:
        with client_of(host) as client:
            assert client.ask(Op.WINDOW, body=window_body(1)).payloads == [bytes_of(1)]

    await blocking(ask)


async def test_record_overwritten_while_it_is_sent_does_not_fit_its_checksum() -> None:
    old, new = b"\x11" * (16 << 20), b"\x22" * (16 << 20)
    async with open_fleet() as fleet:
        host = fleet.open("big", memory_bytes=16 << 20)
        assert host.service.put(key_of(1), NAMESPACE, BIG_LAYOUT, old)
        with await blocking(lambda: client_of(host, receive_buffer_bytes=64 << 10)) as client:

            def read_head() -> tuple[wire.Header, bytes]:
                client.send(client.frame(Op.WINDOW, body=window_body(1, BIG_LAYOUT)))
                header = wire.parse_header(client.receive(wire.HEADER_BYTES))
                return header, client.receive(header.body_bytes)

            header, body = await blocking(read_head)
            # It takes the memory of record 1, of which the socket has taken a part.
            assert host.service.put(key_of(2), NAMESPACE, BIG_LAYOUT, new)
            payload = await blocking(lambda: client.receive(header.payload_bytes))
    assert set(payload) == {0x11, 0x22}, "the test did not overwrite in the middle"
    assert xxh3_64_intdigest(payload) != parse_head(body).xxh3
