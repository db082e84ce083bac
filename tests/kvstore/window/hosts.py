"""Hosts with window records for tests: the real service and the real peer server, in one loop.

The clock is the real one, moved forward when a test says so; sockets are on loopback.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvstore.agent.peer_server import PeerServer, PeerServerSettings
from kvstore.cluster.entities import (
    ClusterMap,
    CodeShape,
    Entrypoint,
    Group,
    Node,
    Target,
)
from kvstore.layout import BlockLayout, Section
from kvstore.window.directory import DirectoryPart
from kvstore.window.directory_host import DirectoryHost
from kvstore.window.pool import WindowPool
from kvstore.window.service import WindowService
from tests.patience import OPERATION_S, PATIENCE_S

NAMESPACE = b"namespace 16 by."
LAYOUT = BlockLayout((Section("window", 20_000),))
BIG_LAYOUT = BlockLayout((Section("window", 16 << 20),))
"""The largest record there may be: more than sockets buffer."""
V41_LAYOUT = BlockLayout(tuple(Section(f"layer {i}", 70_752) for i in range(20)))
LEAP_S = 1.5
"""Less than what a host takes for a standstill of its own, which it would forgive the others."""
BETWEEN_LEAPS_S = 0.4
"""Enough for each host to speak."""


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"window {number}".encode()).digest()


def bytes_of(number: int, size_bytes: int = LAYOUT.block_bytes) -> bytes:
    """The record of `key_of(number)`, the same in every process."""
    return random.Random(number).randbytes(size_bytes)


def free_listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=256)


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def map_of(entrypoints: Sequence[tuple[str, str]], *, epoch: int = 1) -> ClusterMap:
    """A map with these entrypoints, (name, address), and one node that is never there."""
    return ClusterMap(
        cluster="ab" * 16,
        epoch=epoch,
        code=CodeShape(k=1, m=0, write_acks=1),
        nodes=(Node(name="n01", address="127.0.0.1:9"),),
        targets=(Target(name="t01", node="n01", path="t", size_bytes=1 << 30),),
        groups=(Group(name="g01", targets=("t01",)),),
        entrypoints=tuple(Entrypoint(name=name, address=at) for name, at in entrypoints),
    )


@dataclass
class MovedClock:
    """The real clock, and what a test adds to it."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class Host:
    """One agent's window memory. `ttl_s` may be changed."""

    fleet: Fleet
    name: str
    listener: socket.socket
    is_entrypoint: bool
    memory_bytes: int
    instance: int
    clock: MovedClock = field(default_factory=MovedClock)
    ttl_s: float = 180.0

    def __post_init__(self) -> None:
        self.address = address_of(self.listener)
        self.listener_address = self.listener.getsockname()
        loop = asyncio.get_running_loop()
        self.pool = WindowPool(self.memory_bytes, lambda: self.ttl_s, self.clock)
        self.directory = None
        if self.is_entrypoint:
            part = DirectoryPart(self.clock)
            self.directory = DirectoryHost(part, instance=self.instance, clock=self.clock)
        self.service = WindowService(
            pool=self.pool,
            directory=self.directory,
            entrypoint=self.name if self.is_entrypoint else None,
            cluster_map=lambda: self.fleet.map,
            address=self.address,
            instance=self.instance,
            loop=loop,
            clock=self.clock,
        )
        self.server = PeerServer(
            self.listener,
            cluster=self.fleet.map.cluster_id,
            find=self.service.find,
            ttl_left_s=self.pool.ttl_left_s,
            directory=self.directory,
            status=lambda: {"agent": self.name, "windows": self.service.describe()},
            loop=loop,
            settings=self.fleet.settings,
        )
        self.serving = loop.create_task(self.server.run())
        self.service.start()

    def put(self, *numbers: int) -> None:
        for number in numbers:
            assert self.service.put(key_of(number), NAMESPACE, LAYOUT, bytes_of(number))

    async def lookup(self, *numbers: int) -> list[str | None]:
        return await self.service.lookup([key_of(number) for number in numbers], OPERATION_S)

    async def fetch(self, number: int, *, deadline_s: float = OPERATION_S) -> bytes | None:
        """The record as it arrived; None for a miss."""
        into = bytearray(LAYOUT.block_bytes)
        result = await self.service.fetch(
            NAMESPACE, LAYOUT, key_of(number), memoryview(into), deadline_s
        )
        return bytes(into) if result.is_found else None

    async def stop(self, *, is_killed: bool = False) -> None:
        """Ends it; `is_killed`: without a word to anybody."""
        if is_killed:
            self.service.close()
        else:
            await self.service.stop()
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.listener.close()  # if it was cancelled before it began


class Fleet:
    """Hosts of one cluster. `map` is the map in force for all of them."""

    def __init__(
        self, settings: PeerServerSettings | None = None, *, first_instance: int = 100
    ) -> None:
        self.settings = settings
        self.map = map_of([])
        self.hosts: list[Host] = []
        self._last_instance = first_instance

    def open(
        self,
        name: str,
        *,
        listener: socket.socket | None = None,
        is_entrypoint: bool = False,
        memory_bytes: int = 64 << 20,
    ) -> Host:
        self._last_instance += 1
        host = Host(
            fleet=self,
            name=name,
            listener=listener or free_listener(),
            is_entrypoint=is_entrypoint,
            memory_bytes=memory_bytes,
            instance=self._last_instance,
        )
        self.hosts.append(host)
        return host

    def open_entrypoints(self, *names: str) -> list[Host]:
        """Entrypoints of these names, which the map has from now on."""
        listeners = [free_listener() for _ in names]
        self.add_to_map(*zip(names, map(address_of, listeners), strict=True))
        return [
            self.open(name, listener=listener, is_entrypoint=True)
            for name, listener in zip(names, listeners, strict=True)
        ]

    def add_to_map(self, *entrypoints: tuple[str, str]) -> None:
        points = tuple(Entrypoint(name=name, address=at) for name, at in entrypoints)
        self.map = dataclasses.replace(
            self.map, epoch=self.map.epoch + 1, entrypoints=self.map.entrypoints + points
        )

    async def stop(self, host: Host, *, is_killed: bool = False) -> None:
        self.hosts.remove(host)
        await host.stop(is_killed=is_killed)

    async def restart(self, host: Host) -> Host:
        """Kills a host and starts it again on its address, with empty memory."""
        await self.stop(host, is_killed=True)
        again = socket.create_server(host.listener_address, backlog=256)
        return self.open(host.name, listener=again, is_entrypoint=host.is_entrypoint)

    async def leap(self, seconds: float) -> None:
        """So much time passes for the hosts in this loop, and less for those that wait. All of them
        speak meanwhile as they would have."""
        while seconds > 0:
            for host in self.hosts:
                host.clock.ahead_s += LEAP_S
            seconds -= LEAP_S
            await asyncio.sleep(BETWEEN_LEAPS_S)


@asynccontextmanager
async def open_fleet(settings: PeerServerSettings | None = None) -> AsyncIterator[Fleet]:
    """A fleet whose hosts end with the block; no exception may have escaped into the loop."""
    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    fleet = Fleet(settings)
    try:
        yield fleet
    finally:
        for host in list(fleet.hosts):
            await fleet.stop(host)
    await asyncio.sleep(0)
    assert not escaped, escaped


async def wait_until_found(host: Host, numbers: range | list[int]) -> None:
    """Waits until the host finds all of these records somewhere."""
    async with asyncio.timeout(PATIENCE_S):
        while None in await host.lookup(*numbers):
            await asyncio.sleep(0.05)
