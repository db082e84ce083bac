"""What one storage node costs: READ, MATCH and WRITE over loopback, measured at the node's process.

Starts a `kvstored` on a temporary folder, fills it, and talks to it with a client that does as
little as possible. Prints JSON lines: benchmark, parameters, values with their units, machine,
commit. "node_cpu_s_per_gb" is user and system time of the node's process alone, from the kernel's
accounting (10 ms steps); "bytes_only_read" is the same for a process that moves the bytes and does
nothing else.

    python -m benchmarks.node_read [--seconds 3] [--shard-bytes 11392] [--folder DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.cluster.entities import ClusterMap, CodeShape, Group, Node, Target
from kvstore.cluster.map import write_cluster_map

CLUSTER = "00000000000000000000000000000bec"
TARGET = "t01"
ROOT = Path(__file__).resolve().parents[1]
START_S = 30.0
SHARDS = 64
"""In one request."""


@dataclass
class Peer:
    """A connection that sends whole frames and lets answers land in one scratch buffer."""

    socket: socket.socket
    scratch: memoryview

    def send(self, op: wire.Op, body: bytes, count: int, payload: bytes = b"") -> None:
        frame = wire.pack_frame(
            op,
            wire.KIND_REQUEST,
            request_id=1,
            body=body,
            count=count,
            payload_bytes=len(payload),
            epoch=1,
            deadline_ms=10_000,
        )
        self.socket.sendall(frame + payload)

    def receive(self) -> bytes:
        """The body of the last frame of the next answer."""
        while True:
            head = memoryview(bytearray(wire.HEADER_BYTES))
            self._fill(head)
            header = wire.parse_header(head)
            assert header.status == wire.Status.OK, wire.Status(header.status)
            body = memoryview(bytearray(header.body_bytes))
            self._fill(body)
            self._fill(self.scratch[: header.payload_bytes])
            if header.is_last:
                return bytes(body)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self.socket.recv_into(view, 0, socket.MSG_WAITALL)
            assert count, "the node closed the connection"
            view = view[count:]


@contextlib.contextmanager
def running_node(folder: Path) -> Iterator[tuple[int, Peer]]:
    """A node with one target of 1 GiB; its pid and a greeted connection."""
    target = Target(name=TARGET, node="n01", path="data", size_bytes=1 << 30)
    cluster_map = ClusterMap(
        cluster=CLUSTER,
        epoch=1,
        code=CodeShape(k=1, m=0, write_acks=1),
        nodes=(Node(name="n01", address="127.0.0.1:1"),),
        targets=(target,),
        groups=(Group(name="g1", targets=(TARGET,)),),
    )
    write_cluster_map(cluster_map, folder / "cluster.toml")
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-m", "kvstore.node.main", "--cluster", str(folder / "cluster.toml")]
    command += ["--node", "n01", "--listen-fd", str(listener.fileno()), "--sync", "never"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0], "the node did not start"
        address = listener.getsockname()
        listener.close()
        with socket.create_connection(address) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(sock, memoryview(bytearray(4 << 20)))
            peer.send(wire.Op.HELLO, wire.pack_hello(bytes.fromhex(CLUSTER), TARGET), 0)
            peer.receive()
            yield process.pid, peer
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def running_baseline(shard_bytes: int, folder: Path) -> Iterator[tuple[int, Peer]]:
    """A process that only moves bytes: one preadv of 64 slots and one sendmsg for each request."""
    listener = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("fork").Process(
        target=serve_baseline, args=(listener, shard_bytes, folder)
    )
    process.start()
    try:
        with socket.create_connection(listener.getsockname()) as sock:
            listener.close()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            assert process.pid is not None
            yield process.pid, Peer(sock, memoryview(bytearray(4 << 20)))
    finally:
        process.terminate()
        process.join()


def serve_baseline(listener: socket.socket, shard_bytes: int, folder: Path) -> None:
    slot_bytes = -(-shard_bytes // 64) * 64 + 256
    buffer = memoryview(bytearray(SHARDS * slot_bytes))
    views = [buffer[at : at + shard_bytes] for at in range(0, SHARDS * slot_bytes, slot_bytes)]
    descriptor = os.open(folder / "baseline", os.O_RDWR | os.O_CREAT)
    rounds = max((100 << 20) // len(buffer), 1)
    for turn in range(rounds):
        os.pwrite(descriptor, buffer, turn * len(buffer))
    frame = wire.pack_frame(
        wire.Op.READ, wire.KIND_RESPONSE, request_id=1, payload_bytes=SHARDS * shard_bytes
    )
    sock, _ = listener.accept()
    request = memoryview(bytearray(wire.HEADER_BYTES + 8 + 32 * SHARDS))
    turn = 0
    while sock.recv_into(request, 0, socket.MSG_WAITALL):
        turn = (turn + 1) % rounds
        os.preadv(descriptor, [buffer], turn * len(buffer))
        left = len(frame) + SHARDS * shard_bytes - sock.sendmsg([frame, *views])
        while left:
            done = SHARDS * shard_bytes - left
            rest = views[done // shard_bytes :]
            rest[0] = rest[0][done % shard_bytes :]
            left -= sock.sendmsg(rest)


def cpu_s(pid: int) -> float:
    """User and system seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pack_write(keys: list[bytes], payload: bytes, version: int) -> bytes:
    """Body of a WRITE of equal-sized shards."""
    shard_bytes = len(payload) // len(keys)
    batch = np.zeros(1, wire.WRITE_BATCH)
    batch["k"], batch["m"], batch["ttl_class"] = 10, 2, b"chat"
    batch["shard_bytes"], batch["block_bytes"] = shard_bytes, 10 * shard_bytes
    items = np.zeros(len(keys), wire.WRITE_ITEM)
    items["key"] = np.frombuffer(b"".join(keys), "V32")
    items["block_xxh3"] = version
    view = memoryview(payload)
    starts = range(0, len(payload), shard_bytes)
    items["payload_xxh3"] = [xxh3_64_intdigest(view[at : at + shard_bytes]) for at in starts]
    return batch.tobytes() + items.tobytes()


def repeat(call: Callable[[], None], seconds: float) -> list[float]:
    """Seconds that each call took, for about so long in all."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        call()
        took.append(time.perf_counter() - begin)
    return took


def emit(name: str, parameters: dict[str, object], **values: float) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    machine = f"{platform.machine()} {os.cpu_count()} cores, Linux {platform.release()}"
    line = {"benchmark": name, **parameters, **{k: round(v, 4) for k, v in values.items()}}
    print(json.dumps({**line, "machine": machine, "commit": commit or "none"}), flush=True)


def measure_writes(
    pid: int, peer: Peer, rng: random.Random, shard_bytes: int, count: int
) -> list[list[bytes]]:
    """Store `count` batches of 64 shards; returns their keys."""
    batches = [[rng.randbytes(32) for _ in range(SHARDS)] for _ in range(count)]
    payload = rng.randbytes(SHARDS * shard_bytes)
    bodies = [pack_write(keys, payload, version=1) for keys in batches]
    before_s, begin = cpu_s(pid), time.perf_counter()
    for body in bodies:
        peer.send(wire.Op.WRITE, body, SHARDS, payload)
        assert set(peer.receive()) == {wire.WriteOutcome.STORED}
    wall_s, used_s = time.perf_counter() - begin, cpu_s(pid) - before_s
    gb = count * len(payload) / 1e9
    parameters: dict[str, object] = {"shards": SHARDS, "shard_bytes": shard_bytes, "sync": "never"}
    emit("node_write", parameters, gb_per_s=gb / wall_s, node_cpu_s_per_gb=used_s / gb)
    return batches


def measure_reads(
    pid: int,
    peer: Peer,
    batches: list[list[bytes]],
    *,
    shard_bytes: int,
    seconds: float,
    order: str,
    name: str = "node_read",
) -> None:
    """READ requests, two on the way at any time."""
    bodies = [wire.pack_read(keys, shard_bytes) for keys in batches]
    turn = 0
    peer.send(wire.Op.READ, bodies[0], len(batches[0]))

    def read_one() -> None:
        nonlocal turn
        turn += 1
        at = turn % len(bodies)
        peer.send(wire.Op.READ, bodies[at], len(batches[at]))
        peer.receive()

    before_s, begin = cpu_s(pid), time.perf_counter()
    took = repeat(read_one, seconds)
    wall_s, used_s = time.perf_counter() - begin, cpu_s(pid) - before_s
    peer.receive()
    gb = len(took) * len(batches[0]) * shard_bytes / 1e9
    emit(
        name,
        {"shards": len(batches[0]), "shard_bytes": shard_bytes, "depth": 2, "order": order},
        gb_per_s=gb / wall_s,
        node_cpu_s_per_gb=used_s / gb,
        node_cpu_us_per_request=used_s / len(took) * 1e6,
    )


def measure_match(pid: int, peer: Peer, keys: list[bytes], seconds: float) -> None:
    body = wire.join_keys(keys)

    def match_one() -> None:
        peer.send(wire.Op.MATCH, body, len(keys))
        peer.receive()

    before_s = cpu_s(pid)
    took = repeat(match_one, seconds)
    used_s = cpu_s(pid) - before_s
    emit(
        "node_match",
        {"keys": len(keys)},
        median_ms=statistics.median(took) * 1e3,
        node_cpu_us_per_request=used_s / len(took) * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--shard-bytes", type=int, default=11392)
    parser.add_argument("--folder", help="where the target lies (default: a temporary folder)")
    arguments = parser.parse_args()
    shard_bytes, seconds = arguments.shard_bytes, arguments.seconds
    rng = random.Random(7)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        running_node(Path(folder)) as (pid, peer),
    ):
        count = min(600, (600 << 20) // (SHARDS * shard_bytes))
        batches = measure_writes(pid, peer, rng, shard_bytes, count)
        common = {"shard_bytes": shard_bytes, "seconds": seconds}
        measure_reads(pid, peer, batches, order="as written", **common)
        keys = [key for batch in batches for key in batch]
        rng.shuffle(keys)
        shuffled = [keys[at : at + SHARDS] for at in range(0, len(keys), SHARDS)]
        measure_reads(pid, peer, shuffled, order="random", **common)
        measure_reads(pid, peer, [[key] for key in keys], order="random", **common)
        with running_baseline(shard_bytes, Path(folder)) as (baseline_pid, baseline_peer):
            # The first answer comes when the file is written.
            baseline_peer.send(wire.Op.READ, wire.pack_read(batches[0], shard_bytes), SHARDS)
            baseline_peer.receive()
            measure_reads(
                baseline_pid,
                baseline_peer,
                batches,
                order="as written",
                name="bytes_only_read",
                **common,
            )
        measure_match(pid, peer, keys[:1024], seconds)


if __name__ == "__main__":
    main()
