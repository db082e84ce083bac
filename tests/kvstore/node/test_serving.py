"""A node on real sockets: greeting, refusals, deadlines, lines, slow peers, and its end."""

import errno
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import wire
from kvstore.node.node import SyncPolicy
from kvstore.node.server import ServerSettings
from kvstore.wire import Op, Status, WriteOutcome
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import (
    RawClient,
    Shard,
    make_shards,
    pack_write,
    parse_read_answer,
)
from tests.kvstore.node.served_node import CLUSTER, ServedNode, served_node

SHARD_BYTES = 11392
WAIT_S = 10.0


def keys_of(shards: list[Shard]) -> list[bytes]:
    return [shard.key for shard in shards]


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


def is_closed(client: RawClient) -> bool:
    """Whether the node closes the connection, soon, without sending anything more."""
    try:
        return client.socket.recv(1) == b""
    except ConnectionResetError:
        return True


# Greeting -------------------------------------------------------------------------------------


def test_hello_is_answered_with_the_nodes_own(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client(is_greeted=False) as client:
        answer = client.hello()
        assert answer.status is Status.OK
        assert wire.parse_hello(answer.body) == (CLUSTER, "t01")


def test_first_request_must_be_hello(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client(is_greeted=False) as client:
        for op in (Op.MATCH, Op.STAT, Op.LOCATE):
            assert client.ask(op).status is Status.NOT_GREETED
        assert client.ask_write(make_shards(rng, 2, 100)).status is Status.NOT_GREETED
        assert client.hello().status is Status.OK
        assert client.match([bytes(32)]) == [False]


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("cluster", bytes(16), Status.WRONG_CLUSTER),
        ("target", "t99", Status.WRONG_TARGET),
        ("target_number", 1, Status.WRONG_TARGET),
        ("epoch", 2, Status.STALE_EPOCH),
    ],
)
def test_hello_of_a_stranger_is_refused_and_the_connection_kept(
    tmp_path: Path, field: str, value: object, status: Status
) -> None:
    with served_node(tmp_path) as served, served.client(is_greeted=False) as client:
        right = getattr(client, field)
        setattr(client, field, value)
        answer = client.hello()
        assert answer.status is status
        assert answer.headers[0].epoch == 1
        if status is Status.WRONG_CLUSTER:
            assert wire.parse_hello(answer.body)[0] == CLUSTER
        setattr(client, field, right)
        assert client.ask(Op.STAT).status is Status.NOT_GREETED
        assert client.hello().status is Status.OK


def test_requests_are_refused_when_their_epoch_or_target_is_another(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        answer = client.ask(Op.MATCH, epoch=2)
        assert answer.status is Status.STALE_EPOCH
        assert answer.headers[0].epoch == 1
        assert client.ask(Op.MATCH, target=1).status is Status.NOT_GREETED
        assert client.match([]) == []


def test_payload_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        assert client.ask(Op.MATCH, payload=b"x" * 300_000).status is Status.BAD_REQUEST
        assert client.match([]) == []


# Serving --------------------------------------------------------------------------------------


def test_shards_are_stored_and_read_over_a_socket(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        shards = make_shards(rng, 200, SHARD_BYTES)
        assert client.write(shards) == [WriteOutcome.STORED] * 200
        order = rng.sample(range(200), 200)
        found = client.read([shards[i].key for i in order], SHARD_BYTES)
        assert [got.payload for got in found if got] == [shards[i].payload for i in order]


def test_pipelined_requests_are_answered_in_order(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        shards = make_shards(rng, 90, SHARD_BYTES)
        body, payload = pack_write(shards)
        stream = client.frame(Op.WRITE, body=body, count=90, payload_bytes=len(payload)) + payload
        for shard in shards:
            read = wire.pack_read([shard.key], SHARD_BYTES)
            stream += client.frame(Op.READ, body=read, count=1)
        sender = threading.Thread(target=client.send, args=(stream,))
        sender.start()
        assert client.receive_answer().body == bytes([WriteOutcome.STORED]) * 90
        for i, shard in enumerate(shards):
            answer = client.receive_answer()
            assert answer.headers[0].request_id == client.last_id - 89 + i
            (found,) = parse_read_answer(answer, 1, SHARD_BYTES)
            assert found is not None
            assert found.payload == shard.payload
        sender.join()


def test_request_is_understood_however_it_is_cut(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        shards = make_shards(rng, 5, 300)
        body, payload = pack_write(shards)
        stream = client.frame(Op.WRITE, body=body, count=5, payload_bytes=len(payload)) + payload
        stream += client.frame(Op.MATCH, body=wire.join_keys(keys_of(shards)), count=5)
        at = 0
        while at < len(stream):
            step = rng.choice([1, 7, 64, 65, 500])
            client.send(stream[at : at + step])
            at += step
            if rng.random() < 0.1:
                time.sleep(0.001)
        assert client.receive_answer().body == bytes([WriteOutcome.STORED]) * 5
        assert client.receive_answer().body == b"\x1f"


def test_other_peers_are_served_while_the_disk_is_slow(tmp_path: Path, rng: random.Random) -> None:
    disk = FaultyDisk(is_cached=False)
    with served_node(tmp_path, disk=disk) as served:
        with served.client() as slow, served.client() as other:
            shards = make_shards(rng, 10, SHARD_BYTES)
            slow.write(shards)
            disk.gate = threading.Event()
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            slow.send(slow.frame(Op.READ, body=body, count=10))
            wait_until(lambda: "read" in disk.calls)
            assert other.match(keys_of(shards)) == [True] * 10
            disk.gate.set()
            found = parse_read_answer(slow.receive_answer(), 10, SHARD_BYTES)
            assert [got.payload for got in found if got] == [s.payload for s in shards]


def test_node_is_unharmed_when_a_peer_leaves_during_its_read(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(is_cached=False)
    with served_node(tmp_path, disk=disk) as served:
        with served.client() as client:
            shards = make_shards(rng, 10, SHARD_BYTES)
            client.write(shards)
            leaver = served.client()
            disk.gate = threading.Event()
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            leaver.send(leaver.frame(Op.READ, body=body, count=10))
            wait_until(lambda: "read" in disk.calls)
            # A reset, so that the node learns of it at once.
            leaver.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaver.close()
            time.sleep(0.05)
            disk.gate.set()
            wait_until(lambda: served.node.connections == 1)
            assert None not in client.read(keys_of(shards), SHARD_BYTES)
        wait_until(lambda: served.node.pool.used_bytes == 0)


def test_write_is_finished_when_its_peer_has_left(tmp_path: Path, rng: random.Random) -> None:
    disk = FaultyDisk()
    with served_node(tmp_path, disk=disk, sync=SyncPolicy.BATCH) as served:
        with served.client() as client:
            client.write(make_shards(rng, 1, SHARD_BYTES))
            leaver, shards = served.client(), make_shards(rng, 4, SHARD_BYTES)
            body, payload = pack_write(shards)
            disk.gate, synced = threading.Event(), disk.calls.count("sync")
            leaver.send(leaver.frame(Op.WRITE, body=body, count=4, payload_bytes=len(payload)))
            leaver.send(payload)
            wait_until(lambda: disk.calls.count("sync") > synced)
            leaver.close()
            disk.gate.set()
            wait_until(lambda: client.match(keys_of(shards)) == [True] * 4)
        assert not served.node.targets[0].writing.is_taken


def test_writers_of_one_key_end_with_one_version(tmp_path: Path, rng: random.Random) -> None:
    keys = [rng.randbytes(32) for _ in range(40)]
    offers = {
        version: [Shard(key, rng.randbytes(SHARD_BYTES), version) for key in keys]
        for version in (1, 2, 3)
    }
    with served_node(tmp_path) as served:

        def write_all(version: int) -> None:
            with served.client() as client:
                for at in range(0, 40, 8):
                    client.write(offers[version][at : at + 8])

        threads = [threading.Thread(target=write_all, args=(version,)) for version in offers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with served.client() as client:
            found = client.read(keys, SHARD_BYTES)
        assert {got.block_xxh3 for got in found if got} == {3}
        assert [got.payload for got in found if got] == [shard.payload for shard in offers[3]]
        assert len(found) == 40


# Deadlines and bounds -------------------------------------------------------------------------


def test_request_is_refused_when_its_deadline_has_passed(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(is_cached=False)
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
    disk = FaultyDisk(is_cached=False)
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
    disk = FaultyDisk(is_cached=False)
    shard_bytes = 600 << 10
    with served_node(tmp_path, disk=disk) as served, served.client() as client:
        shards = make_shards(rng, 3, shard_bytes)
        client.write(shards)
        disk.gate = threading.Event()
        body = wire.pack_read(keys_of(shards), shard_bytes)
        client.send(client.frame(Op.READ, body=body, count=3, deadline_ms=50))
        time.sleep(0.2)
        disk.gate.set()
        answer = client.receive_answer()
        assert answer.status is Status.EXPIRED
        # What was begun is complete; what was not is left out.
        assert [len(payload) for payload in answer.payloads] == [shard_bytes, 0]
        assert client.match([]) == []


def test_request_waits_for_memory_until_its_deadline(tmp_path: Path, rng: random.Random) -> None:
    disk = FaultyDisk(is_cached=False)
    with served_node(tmp_path, disk=disk, memory_bytes=1 << 20) as served:
        with served.client() as holder, served.client() as other:
            shards = make_shards(rng, 60, SHARD_BYTES)
            holder.write(shards)
            disk.gate = threading.Event()
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            holder.send(holder.frame(Op.READ, body=body, count=60))
            wait_until(lambda: "read" in disk.calls)
            # All memory is in use: a read and a write are refused when their time is up.
            refused = other.ask(Op.READ, body=body, count=60, deadline_ms=60)
            assert refused.status is Status.BUSY
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
            begun_s = time.monotonic()
            with pytest.raises(OSError, match="Broken pipe|reset"):
                for byte in stream[sent : sent + 1000]:
                    slow.send(bytes([byte]))
                    time.sleep(0.02)
            assert time.monotonic() - begun_s < 5.0
            assert other.match([]) == []
        wait_until(lambda: served.node.connections == 0)
        assert served.node.pool.used_bytes == 0
        assert served.node.counters.slow_peers == 1


def test_peer_that_does_not_read_its_answer_is_dropped(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path, settings=FAST) as served:
        with served.client() as lazy, served.client() as other:
            shards = make_shards(rng, 900, SHARD_BYTES)
            lazy.write(shards)
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
        took: list[float] = []
        for _ in range(20):
            begun_s = time.monotonic()
            other.match([])
            took.append(time.monotonic() - begun_s)
        sender.join()
        drainer.join()
        # Behind the flood as a whole each of these would wait for about a second.
        assert np.median(took) < 0.25


# Syncing and stopping -------------------------------------------------------------------------


def test_written_segments_are_synced_once_a_while_when_the_policy_says_interval(
    tmp_path: Path, rng: random.Random
) -> None:
    disk, settings = FaultyDisk(), ServerSettings(sync_interval_s=0.05, check_s=0.02)
    with served_node(tmp_path, disk=disk, settings=settings, sync=SyncPolicy.INTERVAL) as served:
        with served.client() as client:
            client.write(make_shards(rng, 1, SHARD_BYTES))
            made = disk.calls.count("sync")
            wait_until(lambda: disk.calls.count("sync") == made + 1)
            time.sleep(0.2)
            # Nothing was written since, so there is nothing to sync.
            assert disk.calls.count("sync") == made + 1
            # A sync that failed is tried again.
            disk.refuse["sync"] = errno.EIO
            client.write(make_shards(rng, 1, SHARD_BYTES))
            wait_until(lambda: disk.calls.count("sync") >= made + 4)
            disk.refuse.clear()


def test_answers_under_way_are_finished_when_the_node_stops(
    tmp_path: Path, rng: random.Random
) -> None:
    disk = FaultyDisk(is_cached=False)
    with served_node(tmp_path, disk=disk) as served:
        with served.client() as client, served.client() as idle:
            shards = make_shards(rng, 300, SHARD_BYTES)
            client.write(shards)
            disk.gate = threading.Event()
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            client.send(client.frame(Op.READ, body=body, count=300))
            wait_until(lambda: "read" in disk.calls)
            served.server.request_stop()
            assert is_closed(idle)
            disk.gate.set()
            found = parse_read_answer(client.receive_answer(), 300, SHARD_BYTES)
            assert [got.payload for got in found if got] == [s.payload for s in shards]
            assert is_closed(client)


def test_node_stops_in_time_when_a_peer_does_not_read(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path, settings=ServerSettings(stop_s=0.3)) as served:
        lazy = served.client()
        shards = make_shards(rng, 900, SHARD_BYTES)
        lazy.write(shards)
        body = wire.pack_read(keys_of(shards), SHARD_BYTES)
        for _ in range(2):
            lazy.send(lazy.frame(Op.READ, body=body, count=900))
        time.sleep(0.1)
        begun_s = time.monotonic()
        served.server.request_stop()
        wait_until(lambda: served.node.connections == 0)
        assert time.monotonic() - begun_s < 5.0
        lazy.close()


def test_stat_has_the_names_that_tools_rely_on(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        shards = make_shards(rng, 3, SHARD_BYTES)
        client.write(shards)
        client.read(keys_of(shards) + [bytes(32)], SHARD_BYTES)
        stat = client.stat()
        expected = json.loads("""{"node": "n01", "epoch": 1, "pid": 1, "connections": 1}""")
        assert {name: stat[name] for name in expected} == expected
        assert stat["uptime_s"] > 0
        (target,) = stat["targets"]
        counted = {
            "name": "t01",
            "blocks": 3,
            "used_bytes": 3 * (SHARD_BYTES + 256),
            "capacity_bytes": 64 << 20,
            "reads": 1,
            "shards_read": 3,
            "shards_written": 3,
            "read_bytes": 3 * SHARD_BYTES,
            "written_bytes": 3 * SHARD_BYTES,
            "rejected_shards": 0,
            "quarantined": 0,
            "misses": 1,
            "full_refusals": 0,
            "io_errors": 0,
        }
        assert {name: target[name] for name in counted} == counted


def test_fixture_reports_a_failure_of_the_loop(tmp_path: Path) -> None:
    def fail(served: ServedNode) -> None:
        with served.client() as client:
            served.node.targets[0].index.contains_each = None  # type: ignore[method-assign, assignment]
            client.send(client.frame(Op.MATCH))
            client.socket.recv(1)

    with pytest.raises(TypeError), served_node(tmp_path) as served:
        fail(served)
