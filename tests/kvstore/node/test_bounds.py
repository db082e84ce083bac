"""Deadlines, memory, connections and slow peers: nobody takes a node from the others."""

import random
import threading
import time
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.node.node import SyncPolicy
from kvstore.node.server import ServerSettings
from kvstore.wire import Op, Status, WriteOutcome
from tests.kvstore.node.driven_node import SetClock
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import (
    RawClient,
    Shard,
    keys_of,
    make_shards,
    pack_write,
    parse_read_answer,
)
from tests.kvstore.node.served_node import is_closed, served_node
from tests.patience import wait_until

SHARD_BYTES = 11392


def test_request_is_refused_when_its_deadline_has_passed(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(has_cache=False)
    with served_node(tmp_path, disk=disk) as served, served.client() as client:
        shards = make_shards(rng, 1, SHARD_BYTES)
        client.write(shards)
        disk.gate = threading.Event()
        read = wire.pack_read(keys_of(shards), SHARD_BYTES)
        client.send(client.frame(Op.READ, body=read, count=1))
        # These wait behind the first one, in the same segment of TCP.
        body, payload = pack_write(make_shards(rng, 1, SHARD_BYTES))
        write = client.frame(
            Op.WRITE, body=body, count=1, payload_bytes=len(payload), deadline_ms=20
        )
        client.send(client.frame(Op.MATCH, deadline_ms=20) + write + payload)
        wait_until(lambda: "read" in disk.calls)
        time.sleep(0.1)
        disk.gate.set()
        assert client.receive_answer().status is Status.OK
        # Whether it had arrived before the wait is for the kernel to say; it must be answered.
        assert client.receive_answer().status in (Status.EXPIRED, Status.OK)
        client.receive_answer()
        assert client.match([]) == []


def test_requests_that_lie_in_one_receive_expire_together(tmp_path: Path) -> None:
    disk = FaultyDisk(has_cache=False)
    shard = Shard(b"k" * 32, b"x" * SHARD_BYTES)
    with served_node(tmp_path, disk=disk) as served, served.client() as client:
        client.write([shard])
        disk.gate = threading.Event()
        read = client.frame(Op.READ, body=wire.pack_read([shard.key], SHARD_BYTES), count=1)
        client.send(read + client.frame(Op.MATCH, deadline_ms=20))
        wait_until(lambda: "read" in disk.calls)
        time.sleep(0.1)
        disk.gate.set()
        assert client.receive_answer().status is Status.OK
        assert client.receive_answer().status is Status.EXPIRED
        assert served.node.counters.expired_requests == 1


def test_read_is_cut_short_when_its_deadline_passes(tmp_path: Path, rng: random.Random) -> None:
    disk, clock = FaultyDisk(has_cache=False), SetClock()
    shard_bytes = 600 << 10
    with served_node(tmp_path, disk=disk, clock=clock) as served, served.client() as client:
        shards = make_shards(rng, 3, shard_bytes)
        client.write(shards)
        disk.gate = threading.Event()
        body = wire.pack_read(keys_of(shards), shard_bytes)
        client.send(client.frame(Op.READ, body=body, count=3, deadline_ms=50))
        wait_until(lambda: "read" in disk.calls)
        clock.advance(0.1)
        disk.gate.set()
        answer = client.receive_answer()
        assert answer.status is Status.EXPIRED
        # What was begun is complete; what was not is left out.
        assert [len(payload) for payload in answer.payloads] == [shard_bytes, 0]
        assert client.match([]) == []


def test_request_waits_for_memory_until_its_deadline(tmp_path: Path, rng: random.Random) -> None:
    disk = FaultyDisk(has_cache=False)
    with served_node(tmp_path, disk=disk, memory_bytes=1 << 20) as served:
        holder, other = served.client(), served.client()
        with holder, other:
            shards = make_shards(rng, 60, SHARD_BYTES)
            holder.write(shards)
            disk.gate = threading.Event()
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            holder.send(holder.frame(Op.READ, body=body, count=60))
            wait_until(lambda: "read" in disk.calls)
            # All memory is in use: a read and a write are refused when their time is up.
            begun_s = time.monotonic()
            refused = other.ask(Op.READ, body=body, count=60, deadline_ms=60)
            assert refused.status is Status.BUSY
            assert time.monotonic() - begun_s >= 0.05
            more = make_shards(rng, 60, SHARD_BYTES)
            write_body, payload = pack_write(more)
            refused = other.ask(
                Op.WRITE, body=write_body, count=60, payload=payload, deadline_ms=60
            )
            assert refused.status is Status.BUSY
            # The connection is still good, and one that has time gets its turn.
            assert other.match(keys_of(shards)) == [True] * 60
            other.send(other.frame(Op.READ, body=body, count=60))
            time.sleep(0.05)
            disk.gate.set()
            assert None not in parse_read_answer(holder.receive_answer(), 60, SHARD_BYTES)
            assert None not in parse_read_answer(other.receive_answer(), 60, SHARD_BYTES)
            assert other.write(more) == [WriteOutcome.STORED] * 60


def test_connections_are_refused_beyond_their_number(tmp_path: Path) -> None:
    with served_node(tmp_path, settings=ServerSettings(connections_max=3)) as served:
        clients = [served.client() for _ in range(3)]
        refused = served.client(is_greeted=False)
        assert is_closed(refused)
        assert served.node.counters.connections_refused == 1
        clients.pop().close()
        wait_until(lambda: served.node.connections == 2)
        clients.append(served.client())
        assert clients[-1].match([]) == []
        for client in [*clients, refused]:
            client.close()


FAST = ServerSettings(frame_s=0.3, check_s=0.02)


def test_peer_that_never_speaks_is_dropped(tmp_path: Path) -> None:
    with served_node(tmp_path, settings=FAST) as served:
        with served.client(is_greeted=False) as silent:
            assert is_closed(silent)
        assert served.node.counters.slow_peers == 1


def send_slowly(client: RawClient, data: bytes) -> None:
    for byte in data:
        client.send(bytes([byte]))
        time.sleep(0.02)


@pytest.mark.parametrize("part", ["header", "body", "payload"])
def test_peer_that_sends_byte_by_byte_is_dropped(
    tmp_path: Path, rng: random.Random, part: str
) -> None:
    with served_node(tmp_path, settings=FAST) as served:
        with served.client() as slow, served.client() as other:
            body, payload = pack_write(make_shards(rng, 2, SHARD_BYTES))
            frame = slow.frame(Op.WRITE, body=body, count=2, payload_bytes=len(payload))
            sent = {"header": 10, "body": 100, "payload": len(frame) + 100}[part]
            stream = frame + payload
            slow.send(stream[:sent])
            with pytest.raises(ConnectionError):
                send_slowly(slow, stream[sent : sent + 1000])
            assert other.match([]) == []
        wait_until(lambda: served.node.connections == 0)
        assert served.node.pool.used_bytes == 0
        assert served.node.counters.slow_peers == 1


def test_peer_that_does_not_read_its_answer_is_dropped(tmp_path: Path, rng: random.Random) -> None:
    shards = make_shards(rng, 900, SHARD_BYTES)
    with served_node(tmp_path) as served, served.client() as writer:
        writer.write(shards)
    with served_node(tmp_path, settings=FAST) as served:
        with served.client() as lazy, served.client() as other:
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            lazy.send(lazy.frame(Op.READ, body=body, count=900))
            lazy.send(lazy.frame(Op.READ, body=body, count=900))
            wait_until(lambda: served.node.counters.slow_peers == 1)
            assert other.match(keys_of(shards[:5])) == [True] * 5
        assert served.node.pool.used_bytes == 0


def test_idle_peer_is_kept(tmp_path: Path) -> None:
    with served_node(tmp_path, settings=FAST) as served, served.client() as idle:
        time.sleep(0.7)
        assert idle.match([]) == []


def test_flood_of_small_requests_leaves_room_for_others(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client() as flood, served.client() as other:
        one = flood.frame(Op.STAT)
        sender = threading.Thread(target=flood.send, args=(one * 20_000,))
        drainer = threading.Thread(target=flood.receive, args=(20_000 * 500,))
        sender.start()
        drainer.start()
        for _ in range(5):
            other.match([])
        # Behind the flood as a whole they would have been answered when all its answers were.
        assert drainer.is_alive()
        sender.join()
        drainer.join()


def test_write_is_refused_when_its_payload_comes_too_late(
    tmp_path: Path, rng: random.Random
) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        (shard,) = make_shards(rng, 1, SHARD_BYTES)
        body, payload = pack_write([shard])
        frame = client.frame(
            Op.WRITE, body=body, count=1, payload_bytes=len(payload), deadline_ms=50
        )
        client.send(frame)
        time.sleep(0.1)
        client.send(payload)
        assert client.receive_answer().status is Status.EXPIRED
        assert client.match([shard.key]) == [False]
        assert client.write([shard]) == [WriteOutcome.STORED]


def test_write_is_refused_when_its_turn_does_not_come_in_time(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk()
    with served_node(tmp_path, disk=disk, sync=SyncPolicy.BATCH) as served:
        first, second = served.client(), served.client()
        with first, second:
            first.write(make_shards(rng, 1, SHARD_BYTES))
            disk.gate, synced = threading.Event(), disk.calls.count("sync")
            body, payload = pack_write(make_shards(rng, 1, SHARD_BYTES))
            first.send(first.frame(Op.WRITE, body=body, count=1, payload_bytes=len(payload)))
            first.send(payload)
            wait_until(lambda: disk.calls.count("sync") > synced)
            late = make_shards(rng, 1, SHARD_BYTES)
            body, payload = pack_write(late)
            answer = second.ask(Op.WRITE, body=body, count=1, payload=payload, deadline_ms=60)
            assert answer.status is Status.EXPIRED
            disk.gate.set()
            assert first.receive_answer().body == bytes([WriteOutcome.STORED])
            assert second.match(keys_of(late)) == [False]
            assert second.write(late) == [WriteOutcome.STORED]


HOARD = ServerSettings(stall_s=0.6, check_s=0.02)


def begin_write(client: RawClient, rng: random.Random, size_bytes: int) -> bytes:
    """Announce a WRITE of one shard and send none of it. Returns the payload."""
    body, payload = pack_write(make_shards(rng, 1, size_bytes))
    client.send(client.frame(Op.WRITE, body=body, count=1, payload_bytes=len(payload)))
    return payload


def test_peer_that_keeps_memory_for_a_payload_is_dropped_when_another_needs_it(
    tmp_path: Path, rng: random.Random
) -> None:
    with served_node(tmp_path, settings=HOARD, memory_bytes=4 << 20) as served:
        hoarders = [served.client() for _ in range(3)]
        for hoarder in hoarders:
            begin_write(hoarder, rng, 1 << 20)
        wait_until(lambda: served.node.pool.used_bytes == 3 << 20)
        # Single bytes are no progress.
        for _ in range(20):
            hoarders[0].send(b"x")
            time.sleep(HOARD.stall_s / 10)
        # Nobody waited, so nobody was harmed.
        assert served.node.connections == 3
        with served.client() as honest:
            shards = make_shards(rng, 1, 1 << 20)
            assert honest.write(shards) == [WriteOutcome.STORED]
        # As many as it took to make room, the one that was there first before the others.
        assert served.node.counters.slow_peers == 1
        assert is_closed(hoarders[0])
        assert served.node.connections in (2, 3)
        for hoarder in hoarders:
            hoarder.close()


def test_peer_whose_payload_goes_on_is_kept_while_others_wait_for_memory(
    tmp_path: Path, rng: random.Random
) -> None:
    clock = SetClock()
    node = served_node(tmp_path, settings=HOARD, memory_bytes=2 << 20, clock=clock)
    with node as served, served.client() as witness:
        with served.client() as steady, served.client() as other:
            payload = begin_write(steady, rng, 1 << 20)
            wait_until(lambda: served.node.pool.used_bytes == 1 << 20)
            more = begin_write(other, rng, 1 << 20)
            for at in range(0, len(payload), 128 << 10):
                steady.send(payload[at : at + (128 << 10)])
                # What was sent before a question is looked at before its answer, or with it.
                for _ in range(2):
                    witness.match([])
                clock.advance(HOARD.stall_s / 2)
            assert steady.receive_answer().body == bytes([WriteOutcome.STORED])
            other.send(more)
            assert other.receive_answer().body == bytes([WriteOutcome.STORED])
        assert served.node.counters.slow_peers == 0


def test_read_finds_memory_while_writes_hold_all_that_they_may(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(has_cache=False)
    with (
        served_node(tmp_path, disk=disk, memory_bytes=4 << 20) as served,
        served.client() as reader,
    ):
        shards = make_shards(rng, 50, SHARD_BYTES)
        reader.write(shards)
        writers = [served.client() for _ in range(5)]
        for writer in writers:
            begin_write(writer, rng, 1 << 20)
        wait_until(lambda: served.node.pool.has_line)
        assert served.node.pool.used_bytes == 3 << 20
        body = wire.pack_read(keys_of(shards), SHARD_BYTES)
        answer = reader.ask(Op.READ, body=body, count=50)
        assert None not in parse_read_answer(answer, 50, SHARD_BYTES)
        for writer in writers:
            writer.close()
