"""A node that serves on a real socket from a thread of the test, for bounds that must be small."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from kvstore.node.buffers import BufferPool
from kvstore.node.clock import Clock, SystemClock
from kvstore.node.disk import Disk, OsDisk
from kvstore.node.node import Node, SyncPolicy
from kvstore.node.policy_store import PolicyStore
from kvstore.node.segment import TargetIdentity
from kvstore.node.server import Server, ServerSettings
from kvstore.node.target import TargetSettings
from kvstore.node.target_life import close_target, open_target

from .raw_client import RawClient

CLUSTER = bytes(range(16))
STOP_S = 15.0


class ServedNode:
    """A running node: `node` and `server` belong to its thread, and may be looked at."""

    def __init__(self, node: Node, server: Server, address: tuple[str, int]) -> None:
        self.node = node
        self.server = server
        self.address = address
        self.failure: BaseException | None = None

    def client(self, *, is_greeted: bool = True) -> RawClient:
        client = RawClient(self.address, CLUSTER, "t01")
        if is_greeted:
            client.hello()
        return client

    def run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            # Raised again in the test's own thread.
            self.failure = error


@contextlib.contextmanager
def served_node(
    folder: Path,
    *,
    settings: ServerSettings | None = None,
    target_settings: TargetSettings | None = None,
    disk: Disk | None = None,
    memory_bytes: int = 64 << 20,
    capacity_bytes: int = 64 << 20,
    sync: SyncPolicy = SyncPolicy.NEVER,
    clock: Clock | None = None,
) -> Iterator[ServedNode]:
    """Serve a target in `folder` until the block ends; a failure of the loop is raised there."""
    clock, disk = clock or SystemClock(), disk or OsDisk()
    target = open_target(
        folder,
        TargetIdentity(CLUSTER, "t01"),
        capacity_bytes=capacity_bytes,
        settings=target_settings or TargetSettings(segment_bytes=1 << 20),
        disk=disk,
        clock=clock,
        pid=1,
    )
    node = Node(
        name="n01",
        cluster=CLUSTER,
        epoch=1,
        targets={0: target},
        disk=disk,
        clock=clock,
        pool=BufferPool(memory_bytes),
        sync=sync,
        policy=PolicyStore(folder, disk),
        pid=1,
        version="0",
        started_s=clock.monotonic_s(),
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    served = ServedNode(node, Server(node, listener, settings), listener.getsockname())
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        yield served
    finally:
        served.server.request_stop()
        thread.join(STOP_S)
        close_target(target, disk)
    assert not thread.is_alive()
    if served.failure is not None:
        raise served.failure


def is_closed(client: RawClient) -> bool:
    """Whether the node closes the connection, soon, without sending anything more."""
    try:
        return client.socket.recv(1) == b""
    except ConnectionResetError:
        return True
