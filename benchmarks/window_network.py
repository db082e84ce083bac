"""Window records between hosts: lookups, fetches, and how soon a lost share is found again.

    python -m benchmarks.window_network [--rounds 5]

Prints JSON lines: milliseconds of a lookup of one key and of a fetch of a record of V4.1-Flash
(1,415,040 B) from another host, and seconds until all records are found again after one of three
entrypoints was lost, when it begins anew at once and when it stays away. All five hosts run in
one event loop over loopback, so the figures hold the work of both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import socket
import statistics
import time

from kvstore.admin.machine import describe_machine
from kvstore.agent.peer_server import PeerServer
from kvstore.cluster.entities import ClusterMap, CodeShape, Entrypoint, Group, Node, Target
from kvstore.layout import BlockLayout, Section
from kvstore.window.directory import DirectoryPart
from kvstore.window.directory_host import DirectoryHost
from kvstore.window.pool import WindowPool
from kvstore.window.service import WindowService

LAYOUT = BlockLayout(tuple(Section(f"L{layer}", 134 * 528) for layer in range(20)))
SMALL_LAYOUT = BlockLayout((Section("window", 4096),))
NAMESPACE_ID = bytes(16)
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(300)]
BIG_KEY = hashlib.sha256(b"big").digest()
ENTRYPOINTS = ("e1", "e2", "e3")


class BenchHost:
    """One agent's window memory, served."""

    def __init__(
        self, name: str, listener: socket.socket, cluster_map: ClusterMap, instance: int
    ) -> None:
        loop, clock = asyncio.get_running_loop(), time.monotonic
        self.name, self.place = name, listener.getsockname()
        self.directory = None
        if name in cluster_map.entrypoint_by_name:
            part = DirectoryPart(clock)
            self.directory = DirectoryHost(part, instance=instance, clock=clock)
        self.service = WindowService(
            pool=WindowPool(64 << 20, lambda: 180.0, clock),
            directory=self.directory,
            entrypoint=name,
            cluster_map=lambda: cluster_map,
            address=f"{self.place[0]}:{self.place[1]}",
            instance=instance,
            loop=loop,
            clock=clock,
        )
        server = PeerServer(
            listener,
            cluster=cluster_map.cluster_id,
            find=self.service.find,
            ttl_left_s=self.service.pool.ttl_left_s,
            directory=self.directory,
            status=lambda: {},
            loop=loop,
        )
        self._serving = loop.create_task(server.run())
        self.service.start()

    async def kill(self) -> None:
        """Ends it without a word to anybody."""
        self.service.close()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


def make_map(listeners: list[socket.socket]) -> ClusterMap:
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    return ClusterMap(
        cluster="ab" * 16,
        epoch=1,
        code=CodeShape(k=1, m=0, write_acks=1),
        nodes=(Node(name="n01", address="127.0.0.1:9"),),
        targets=(Target(name="t01", node="n01", path="t", size_bytes=1 << 30),),
        groups=(Group(name="g01", targets=("t01",)),),
        entrypoints=tuple(
            Entrypoint(name=name, address=address)
            for name, address in zip(ENTRYPOINTS, addresses, strict=True)
        ),
    )


async def find_all_s(reader: BenchHost) -> float:
    """Seconds until the reader finds every record."""
    begun_s = time.monotonic()
    while None in await reader.service.lookup(KEYS, 1.0):
        await asyncio.sleep(0.01)
    return time.monotonic() - begun_s


async def run_round(figures: dict[str, list[float]], instance: int) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    cluster_map = make_map(listeners[:3])
    names = (*ENTRYPOINTS, "maker", "reader")
    hosts = [
        BenchHost(name, listener, cluster_map, instance + index)
        for index, (name, listener) in enumerate(zip(names, listeners, strict=True))
    ]
    maker, reader = hosts[3:]
    for key in KEYS:
        maker.service.put(key, NAMESPACE_ID, SMALL_LAYOUT, bytes(SMALL_LAYOUT.block_bytes))
    maker.service.put(BIG_KEY, NAMESPACE_ID, LAYOUT, bytes(LAYOUT.block_bytes))
    await find_all_s(reader)
    for key in KEYS:
        begun_s = time.perf_counter()
        await reader.service.lookup([key], 1.0)
        figures["lookup_ms"].append((time.perf_counter() - begun_s) * 1e3)
    into = memoryview(bytearray(LAYOUT.block_bytes))
    for _ in range(50):
        begun_s = time.perf_counter()
        result = await reader.service.fetch(NAMESPACE_ID, LAYOUT, BIG_KEY, into, 2.0)
        figures["fetch_ms"].append((time.perf_counter() - begun_s) * 1e3)
        assert result.is_found
    await hosts[1].kill()
    again = socket.create_server(hosts[1].place[:2])
    hosts[1] = BenchHost("e2", again, cluster_map, instance + 9)
    figures["back_after_restart_s"].append(await find_all_s(reader))
    await hosts[2].kill()
    figures["moved_after_loss_s"].append(await find_all_s(reader))
    for host in (*hosts[:2], *hosts[3:]):
        await host.kill()


async def run(rounds: int) -> None:
    figures: dict[str, list[float]] = {
        name: [] for name in ("lookup_ms", "fetch_ms", "back_after_restart_s", "moved_after_loss_s")
    }
    for number in range(rounds):
        await run_round(figures, instance=100 * number + 1)
    for name, values in figures.items():
        line = {
            "benchmark": "window_network",
            "figure": name,
            "median": round(statistics.median(values), 3),
            "max": round(max(values), 3),
            "count": len(values),
            "machine": describe_machine(),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    logging.disable(logging.WARNING)
    asyncio.run(run(parser.parse_args().rounds))
