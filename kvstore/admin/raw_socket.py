"""The baseline of `cachalot bench`: the same bytes over the same sockets, and nothing else.

As many processes as the code is wide send shard-sized pieces out of memory with `sendmsg`; one
client takes exactly the bytes of the blocks with `recvmsg_into`, in place, with the same request
sizes as a fetch and as many in flight as suits it best. No code, no checksum, no disk.
"""

from __future__ import annotations

import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .bench_failure import BenchFailed

REQUEST = struct.Struct("<II")
"""First shard and number of shards."""
VIEWS_MAX = 128
DEADLINE_S = 30.0


def serve(listener: socket.socket, shard_bytes: int, shard_count: int) -> None:
    """Answers requests on one connection until it is closed."""
    arena = memoryview(bytearray(shard_bytes * shard_count))
    arena[:] = bytes(range(251)) * (len(arena) // 251) + bytes(len(arena) % 251)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
        first, count = REQUEST.unpack(request)
        views = [
            arena[i * shard_bytes : (i + 1) * shard_bytes] for i in range(first, first + count)
        ]
        while views:
            sent = connection.sendmsg(views[:VIEWS_MAX])
            _drop_front(views, sent)


def _drop_front(views: list[memoryview], byte_count: int) -> None:
    whole = 0
    while whole < len(views) and byte_count >= len(views[whole]):
        byte_count -= len(views[whole])
        whole += 1
    del views[:whole]
    if byte_count:
        views[0] = views[0][byte_count:]


class RawSocketBaseline:
    """Connections to the serving processes; `fetch` takes blocks the raw way."""

    def __init__(
        self,
        connections: list[socket.socket],
        *,
        k: int,
        shard_bytes: int,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._connections = connections
        self._k = k
        self._shard_bytes = shard_bytes
        self._deadline_s = deadline_s

    def fetch(self, blocks: list[memoryview], *, batch_blocks: int, in_flight: int) -> float:
        """Fills every block from k processes, a different k for each batch; seconds it took.

        Raises BenchFailed if a process has ended, or if none of them sends anything for
        `deadline_s`.
        """
        started_s = time.perf_counter()
        queues: list[list[list[memoryview]]] = [[] for _ in self._connections]
        batches = [blocks[i : i + batch_blocks] for i in range(0, len(blocks), batch_blocks)]
        left = [0] * len(batches)
        owners: list[list[int]] = [[] for _ in self._connections]
        started = finished = 0
        with selectors.DefaultSelector() as selector:
            for index, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, index)
            while finished < len(batches):
                while started < len(batches) and started - finished < in_flight:
                    first = started * batch_blocks
                    left[started] = self._ask(batches[started], first, started, queues, owners)
                    started += 1
                ready = selector.select(self._deadline_s)
                if not ready:
                    raise BenchFailed(f"raw sockets: nothing was sent for {self._deadline_s:g} s")
                for key, _ in ready:
                    for batch in self._take(key.data, queues, owners):
                        left[batch] -= 1
                        finished += left[batch] == 0
        return time.perf_counter() - started_s

    def _ask(
        self,
        batch: list[memoryview],
        first: int,
        number: int,
        queues: list[list[list[memoryview]]],
        owners: list[list[int]],
    ) -> int:
        size = self._shard_bytes
        for shard in range(self._k):
            index = (number + shard) % len(self._connections)
            self._connections[index].sendall(REQUEST.pack(first, len(batch)))
            queues[index].append([block[shard * size : (shard + 1) * size] for block in batch])
            owners[index].append(number)
        return self._k

    def _take(
        self, index: int, queues: list[list[list[memoryview]]], owners: list[list[int]]
    ) -> Iterator[int]:
        # A connection that nothing was asked of can only become ready by its end.
        views = queues[index][0] if queues[index] else []
        received = self._connections[index].recvmsg_into(views[:VIEWS_MAX])[0] if views else 0
        if not received:
            raise BenchFailed("raw sockets: a serving process has ended")
        _drop_front(views, received)
        if not views:
            queues[index].pop(0)
            yield owners[index].pop(0)


@contextmanager
def raw_socket_baseline(
    *, width: int, k: int, shard_bytes: int, shard_count: int
) -> Iterator[RawSocketBaseline]:
    """`width` serving processes, for the time of the block, each with `shard_count` shards."""
    processes, connections = [], []
    try:
        for _ in range(width):
            listener = socket.create_server(("127.0.0.1", 0))
            with listener:
                listener.set_inheritable(True)
                command = [sys.executable, "-m", __name__, str(listener.fileno())]
                processes.append(
                    subprocess.Popen(
                        [*command, str(shard_bytes), str(shard_count)],
                        pass_fds=[listener.fileno()],
                    )
                )
                connection = socket.create_connection(listener.getsockname(), DEADLINE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections.append(connection)
        yield RawSocketBaseline(connections, k=k, shard_bytes=shard_bytes)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_S)
            if process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
