"""A node on real sockets: requests in any cut, order and company."""

import random
import socket
import struct
import threading
import time
from pathlib import Path

from kvstore import wire
from kvstore.node.node import SyncPolicy
from kvstore.wire import Op, WriteOutcome
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import (
    Shard,
    keys_of,
    make_shards,
    pack_write,
    parse_read_answer,
)
from tests.kvstore.node.served_node import served_node
from tests.patience import wait_until

SHARD_BYTES = 11392


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
    disk = FaultyDisk(has_cache=False)
    with served_node(tmp_path, disk=disk) as served:
        slow, other = served.client(), served.client()
        with slow, other:
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
    disk = FaultyDisk(has_cache=False)
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
        target = served.node.targets[0]
        with served.client() as client:
            old = make_shards(rng, 4, SHARD_BYTES, block_xxh3=1)
            client.write(old)
            old_locations = target.index.find(keys_of(old))
            leaver = served.client()
            shards = [Shard(shard.key, rng.randbytes(SHARD_BYTES), block_xxh3=2) for shard in old]
            body, payload = pack_write(shards)
            disk.gate, synced = threading.Event(), disk.calls.count("sync")
            leaver.send(leaver.frame(Op.WRITE, body=body, count=4, payload_bytes=len(payload)))
            leaver.send(payload)
            wait_until(lambda: disk.calls.count("sync") > synced)
            leaver.close()
            disk.gate.set()
            wait_until(lambda: served.node.connections == 1)
            found = client.read(keys_of(shards), SHARD_BYTES)
            assert [got.payload for got in found if got] == [shard.payload for shard in shards]
            # Also what comes after the write itself was done: the old slots are free again.
            more = make_shards(rng, 4, SHARD_BYTES)
            client.write(more)
            assert target.index.find(keys_of(more)) == old_locations
        assert not target.writing.is_taken


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
