"""When written bytes are synced, how a node ends, and what STAT shows."""

import errno
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.node.node import SyncPolicy
from kvstore.node.server import ServerSettings
from kvstore.wire import Op
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import (
    Shard,
    keys_of,
    make_shards,
    pack_write,
    parse_read_answer,
)
from tests.kvstore.node.served_node import ServedNode, is_closed, served_node
from tests.patience import PATIENCE_S, wait_until

SHARD_BYTES = 11392


def test_written_segments_are_synced_once_a_while_when_the_policy_says_interval(
    tmp_path: Path, rng: random.Random
) -> None:
    disk, settings = FaultyDisk(), ServerSettings(sync_interval_s=0.05, check_s=0.02)
    node = served_node(tmp_path, disk=disk, settings=settings, sync=SyncPolicy.INTERVAL)
    with node as served, served.client() as client:
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
    disk = FaultyDisk(has_cache=False)
    with served_node(tmp_path, disk=disk, settings=ServerSettings(stop_s=PATIENCE_S)) as served:
        client, idle = served.client(), served.client()
        with client, idle:
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


def test_answer_that_is_not_read_yet_is_finished_when_the_node_stops(
    tmp_path: Path, rng: random.Random
) -> None:
    with served_node(tmp_path, settings=ServerSettings(stop_s=PATIENCE_S)) as served:
        client, idle = served.client(), served.client()
        with client, idle:
            # Together larger than the kernel's buffers: it is under way until we read it.
            shards = make_shards(rng, 900, SHARD_BYTES)
            client.write(shards)
            body = wire.pack_read(keys_of(shards), SHARD_BYTES)
            client.send(client.frame(Op.READ, body=body, count=900))
            assert client.socket.recv(1, socket.MSG_PEEK), "it has begun"
            served.server.request_stop()
            assert is_closed(idle)
            wait_until(lambda: served.node.connections == 1)
            found = parse_read_answer(client.receive_answer(), 900, SHARD_BYTES)
            assert [got.payload for got in found if got] == [s.payload for s in shards]
            assert is_closed(client)


def test_node_stops_when_a_peer_does_not_read(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path, settings=ServerSettings(stop_s=0.3)) as served:
        lazy = served.client()
        shards = make_shards(rng, 900, SHARD_BYTES)
        lazy.write(shards)
        body = wire.pack_read(keys_of(shards), SHARD_BYTES)
        for _ in range(2):
            lazy.send(lazy.frame(Op.READ, body=body, count=900))
        time.sleep(0.1)
        served.server.request_stop()
        wait_until(lambda: served.node.connections == 0)
        lazy.close()


def test_write_that_a_thread_has_begun_is_finished_when_time_to_stop_is_up(
    tmp_path: Path, rng: random.Random
) -> None:
    disk, settings = FaultyDisk(), ServerSettings(stop_s=0.5)
    with served_node(tmp_path, disk=disk, settings=settings, sync=SyncPolicy.BATCH) as served:
        target = served.node.targets[0]
        with served.client() as client:
            (old,) = make_shards(rng, 1, SHARD_BYTES, block_xxh3=1)
            client.write([old])
            segment, slot = target.index.resolve(target.index.get(old.key))
            new = Shard(old.key, rng.randbytes(SHARD_BYTES), block_xxh3=2)
            body, payload = pack_write([new])
            disk.gate, synced = threading.Event(), disk.calls.count("sync")
            client.send(client.frame(Op.WRITE, body=body, count=1, payload_bytes=len(payload)))
            client.send(payload)
            wait_until(lambda: disk.calls.count("sync") > synced)
            served.server.request_stop()
            assert is_closed(client)
            disk.gate.set()
            wait_until(lambda: served.node.connections == 0)
        assert target.index.resolve(target.index.get(old.key)) != (segment, slot)
        header_at = segment.header_offset(slot)
        assert segment.path.read_bytes()[header_at : header_at + 256] == bytes(256)


def test_node_may_be_told_to_stop_while_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop signal is not closed between the look at it and the write to it."""
    write = os.eventfd_write

    def write_late(descriptor: int, value: int) -> None:
        # Only the second signal is late: the node is ending because of the first one.
        if threading.current_thread() is late:
            has_looked.set()
            time.sleep(0.3)
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    failures: list[OSError] = []

    def stop_late(served: ServedNode) -> None:
        try:
            served.server.request_stop()
        except OSError as error:
            failures.append(error)

    has_looked = threading.Event()
    with served_node(tmp_path) as served:
        late = threading.Thread(target=stop_late, args=(served,))
        late.start()
        assert has_looked.wait(10)
        # The lock is held by the late one, so this one must not wait for it: end by the signal.
        write(served.server._stop_signal, 1)
        late.join()
        wait_until(lambda: served.server._has_ended)
        served.server.request_stop()
    assert failures == []


def test_stat_has_the_names_that_tools_rely_on(tmp_path: Path, rng: random.Random) -> None:
    with served_node(tmp_path) as served, served.client() as client:
        shards = make_shards(rng, 3, SHARD_BYTES)
        client.write(shards)
        client.read([*keys_of(shards), bytes(32)], SHARD_BYTES)
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


def test_broken_invariant_ends_the_loop_and_is_not_hidden(tmp_path: Path) -> None:
    def break_index(served: ServedNode) -> None:
        served.node.targets[0].index.__dict__.clear()
        with served.client() as client:
            client.send(client.frame(Op.MATCH, body=bytes(32), count=1))
            wait_until(lambda: served.failure is not None)

    with pytest.raises(AttributeError), served_node(tmp_path) as served:
        break_index(served)
