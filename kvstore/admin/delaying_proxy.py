"""A slow node for `cachalot bench`: passes frames on to a real node, each after a fixed delay.

    python -m kvstore.admin.delaying_proxy HOST PORT DELAY_MS

Prints the port it listens on; ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from .. import wire
from .bench_failure import BenchFailed

CHUNK_BYTES = 1 << 18
START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 5.0


async def _pass_requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """One request after the other: a node that takes `delay_s` longer for each."""
    while True:
        head = await reader.readexactly(wire.HEADER_BYTES)
        header = wire.parse_header(head)
        rest = await reader.readexactly(header.body_bytes + header.payload_bytes)
        await asyncio.sleep(delay_s)
        writer.write(head + rest)
        await writer.drain()


async def _pass_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


async def _pass_on(
    node: tuple[str, int],
    delay_s: float,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Serves one connection until either side ends it."""
    try:
        node_reader, node_writer = await asyncio.open_connection(*node)
    except OSError:
        writer.close()  # the client sees a node that is down
        return
    directions = [
        asyncio.ensure_future(_pass_requests(reader, node_writer, delay_s)),
        asyncio.ensure_future(_pass_answers(node_reader, writer)),
    ]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
        node_writer.close()
        writer.close()


async def _serve(host: str, port: int, delay_s: float) -> None:
    connections: set[asyncio.Task[None]] = set()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(_pass_on((host, port), delay_s, reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


def _read_port(stdout: IO[str], deadline_s: float) -> int:
    ready, _, _ = select.select([stdout], [], [], deadline_s)
    if not ready:
        raise BenchFailed(f"the slow node's proxy did not start within {deadline_s:g} s")
    line = stdout.readline().strip()
    if not line.isdecimal():
        # What it had to say of that is on stderr, which it shares with this process.
        raise BenchFailed(f"the slow node's proxy ended at its start; it said {line[:80]!r}")
    return int(line)


@contextmanager
def delaying_proxy(host: str, port: int, delay_ms: int) -> Iterator[int]:
    """A proxy process in front of a node, for the time of the block; its port on 127.0.0.1.

    Raises BenchFailed if the process ends at its start, or does not say its port in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, host, str(port), str(delay_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _read_port(process.stdout, START_DEADLINE_S)
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) / 1000))
