"""What a node's start costs: seconds from the start of the process to the first shard it sends,
after a clean stop and after kill -9, and the memory of the index.

Fills a target with whole slots, then starts a real `kvstored` on it again and again: with its files
in the page cache ("in memory") and with them dropped from it ("on disk"). Prints JSON lines:
benchmark, parameters, values with their units, machine, commit. "bytes_per_key" is what the
process takes in memory more than a node without shards, by the number of shards.

    python -m benchmarks.node_start [--shards 100000] [--shard-bytes 64] [--folder DIR]
        [--segment-bytes N]

With --segment-bytes the segments of a target of usual shards (11,392 B, 256 MiB) can be had with
small ones: 8 MiB has as many slots of 64 B.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore import wire
from kvstore.cluster.entities import ClusterMap, CodeShape, Group, Node, Target
from kvstore.cluster.map import write_cluster_map
from kvstore.node.clock import SystemClock
from kvstore.node.disk import OsDisk
from kvstore.node.segment import TargetIdentity, create_segment
from kvstore.node.slot import CHECKED_BYTES, HEADER_BYTES, SLOT_HEADER, SlotGeometry, seal_headers
from kvstore.node.target import TargetSettings
from kvstore.node.target_life import open_target

from .page_cache import drop_pages

CLUSTER = "0123456789abcdef0123456789abcdef"
IDENTITY = TargetIdentity(bytes.fromhex(CLUSTER), "t01")
BATCH = 4096
START_S = 600.0
ROOT = Path(__file__).resolve().parents[1]


def write_map(folder: Path, size_bytes: int) -> Path:
    path = folder / "cluster.toml"
    cluster_map = ClusterMap(
        cluster=CLUSTER,
        epoch=1,
        code=CodeShape(k=1, m=0, write_acks=1),
        nodes=(Node(name="n01", address="127.0.0.1:1"),),
        targets=(Target(name="t01", node="n01", path="t01", size_bytes=size_bytes),),
        groups=(Group(name="g01", targets=("t01",)),),
    )
    write_cluster_map(cluster_map, path)
    return path


# Filling --------------------------------------------------------------------------------------


def sealed_headers(geometry: SlotGeometry, count: int, rng: random.Random) -> Iterator[bytearray]:
    """Runs of whole headers, `count` in all, with random keys."""
    for first in range(1, count + 1, BATCH):
        slots = min(BATCH, count + 1 - first)
        data = bytearray(HEADER_BYTES * slots)
        headers = np.frombuffer(data, SLOT_HEADER)
        headers["key"] = np.frombuffer(rng.randbytes(32 * slots), "V32")
        headers["generation"] = np.arange(first, first + slots)
        headers["payload_bytes"] = geometry.payload_bytes
        headers["ttl_class"] = b"chat"
        starts = range(0, len(data), HEADER_BYTES)
        seal_headers(headers, [memoryview(data)[at : at + CHECKED_BYTES] for at in starts])
        yield data


def fill(folder: Path, size_bytes: int, segment_bytes: int, shard_bytes: int, count: int) -> bytes:
    """Write `count` shards straight into new segments; returns the key of the last."""
    disk, left, rng = OsDisk(), count, random.Random(3)
    geometry, key = SlotGeometry(shard_bytes), b""
    target = open_target(
        folder,
        IDENTITY,
        capacity_bytes=size_bytes,
        settings=TargetSettings(segment_bytes=segment_bytes),
        disk=disk,
        clock=SystemClock(),
        pid=os.getpid(),
    )
    payloads = memoryview(rng.randbytes(shard_bytes * BATCH))
    while left:
        growth = target.space.plan_growth(geometry)
        assert growth is not None
        segment = create_segment(disk, folder, IDENTITY, growth.shape)
        slots = min(left, growth.shape.slot_count)
        at = 0
        for data in sealed_headers(geometry, slots, rng):
            run = len(data) // HEADER_BYTES
            segment.write_slots(disk, at, [payloads[: run * shard_bytes]], memoryview(data))
            key = np.frombuffer(data, SLOT_HEADER)["key"][-1].tobytes()
            at += run
        disk.sync(segment.descriptor)
        # Nothing is free in it, as far as this process is concerned.
        target.space.add(segment, [])
        left -= slots
    for segment in target.space.segments.values():
        segment.close(disk)
    target.folder.release()
    return key


# Starting -------------------------------------------------------------------------------------


def start(map_path: Path, key: bytes, shard_bytes: int) -> tuple[subprocess.Popen[bytes], float]:
    """Start a node; returns it, and the seconds until it sent the shard of `key`."""
    begin_s = time.perf_counter()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "kvstore.node", "--cluster", str(map_path)]
        process = subprocess.Popen(
            [*command, "--node", "n01", "--listen-fd", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        address = listener.getsockname()
    # The kernel takes the connection; the node answers when it is up.
    with socket.create_connection(address, START_S) as peer:
        hello = wire.pack_hello(IDENTITY.cluster, IDENTITY.name)
        ask(peer, wire.Op.HELLO, hello, 0)
        if key:
            payload = ask(peer, wire.Op.READ, wire.pack_read([key], shard_bytes), 1)
            assert len(payload) == shard_bytes, "the shard is not there"
    return process, time.perf_counter() - begin_s


def ask(peer: socket.socket, op: wire.Op, body: bytes, count: int) -> bytes:
    """The payload of a node's answer."""
    request = wire.pack_frame(
        op, wire.KIND_REQUEST, request_id=1, body=body, count=count, epoch=1, deadline_ms=60_000
    )
    peer.sendall(request)
    header = wire.parse_header(receive(peer, wire.HEADER_BYTES))
    assert header.status == wire.Status.OK, header
    receive(peer, header.body_bytes)
    return receive(peer, header.payload_bytes)


def receive(peer: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = peer.recv(size_bytes - len(data))
        assert more, "the node is gone"
        data += more
    return data


def memory_bytes(process: subprocess.Popen[bytes], field: str) -> int:
    """A field of the process's status: VmRSS is all, RssAnon leaves out files, as of libraries."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Processor time that the process has taken; other work on the machine does not change it."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stop(process: subprocess.Popen[bytes], number: int) -> float:
    """End a node with a signal; returns the seconds until it was gone."""
    begin_s = time.perf_counter()
    process.send_signal(number)
    process.wait(START_S)
    return time.perf_counter() - begin_s


def measure_empty(folder: Path) -> int:
    """Resident bytes of a node without shards."""
    folder.mkdir()
    process, _ = start(write_map(folder, 1 << 30), b"", 0)
    resident = memory_bytes(process, "VmRSS")
    stop(process, signal.SIGTERM)
    return resident


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds to the first hit, bytes a key")
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--shard-bytes", type=int, default=64)
    parser.add_argument("--segment-bytes", type=int, default=8 << 20)
    parser.add_argument("--folder", help="where the target lies (default: a temporary folder)")
    arguments = parser.parse_args()
    shards, shard_bytes = arguments.shards, arguments.shard_bytes
    size_bytes = max(int(1.05 * shards * SlotGeometry(shard_bytes).slot_bytes), 1 << 26)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    machine = f"{platform.machine()} {os.cpu_count()} cores, Linux {platform.release()}"
    base = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        empty_bytes = measure_empty(base / "empty")
        map_path, target = write_map(base, size_bytes), base / "t01"
        key = fill(target, size_bytes, arguments.segment_bytes, shard_bytes, shards)
        for after, number in (("kill -9", signal.SIGKILL), ("clean stop", signal.SIGTERM)):
            # The first start is only there to be ended in this way.
            process, _ = start(map_path, key, shard_bytes)
            stop_s = stop(process, number)
            for files in ("in memory", "on disk"):
                if files == "on disk":
                    drop_pages(target.iterdir())
                process, seconds = start(map_path, key, shard_bytes)
                resident = memory_bytes(process, "VmRSS")
                line = {
                    "benchmark": "node_start",
                    "shards": shards,
                    "shard_bytes": shard_bytes,
                    "segments": len(list(target.glob("*.seg"))),
                    "after": after,
                    "files": files,
                    "first_hit_s": round(seconds, 3),
                    "cpu_s": round(cpu_s(process), 2),
                    "stop_s": round(stop_s, 3),
                    "resident_bytes": resident,
                    "anonymous_bytes": memory_bytes(process, "RssAnon"),
                    "bytes_per_key": round((resident - empty_bytes) / shards, 1),
                }
                line |= {"machine": machine, "commit": commit or "none"}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
                stop_s = stop(process, number)
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
