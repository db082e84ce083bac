"""A host with window records in a process of its own, which a test may stop and kill.

Run as a program it is that process: the real service and peer server, on a listener that it
inherits, told what to do by one JSON object a line on stdin. Started by `HostProcess`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.kvstore.window.hosts import (
    BIG_LAYOUT,
    NAMESPACE,
    Fleet,
    Host,
    address_of,
    bytes_of,
    free_listener,
    key_of,
    map_of,
)

STOP_S = 5.0


@dataclass
class HostProcess:
    """The parent's end. `address`: of its peer server."""

    process: subprocess.Popen[str]
    address: str

    def tell(self, order: str, *numbers: int) -> Any:  # noqa: ANN401 (JSON)
        """Has it do something, and returns what it says; see `_obey`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([order, *numbers]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline()) == "ready"

    def kill(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Ends it whatever state it is in."""
        self.process.kill()
        self.process.wait(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def start_host(
    entrypoints: Sequence[tuple[str, str]],
    *,
    name: str = "other",
    listener: socket.socket | None = None,
    memory_bytes: int = 64 << 20,
) -> HostProcess:
    """A host; an entrypoint if the map has its name. It serves when `wait_until_ready` returns.

    Nobody else keeps its listener, so that its address refuses when it is gone.
    """
    with listener or free_listener() as own:
        address = address_of(own)
        words = [sys.executable, "-m", __spec__.name, str(own.fileno()), name, str(memory_bytes)]
        process = subprocess.Popen(
            [*words, json.dumps(list(entrypoints))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[own.fileno()],
            text=True,
        )
    return HostProcess(process, address)


@contextmanager
def host_process(entrypoints: Sequence[tuple[str, str]]) -> Iterator[HostProcess]:
    """A host that serves until the block ends."""
    host = start_host(entrypoints)
    try:
        host.wait_until_ready()
        yield host
    finally:
        host.end()


async def _run(descriptor: int, name: str, memory_bytes: int, entrypoints: list[Any]) -> None:
    fleet = Fleet(first_instance=os.getpid() << 8)
    fleet.map = map_of([(point, at) for point, at in entrypoints])
    listener = socket.socket(fileno=descriptor)
    is_entrypoint = name in fleet.map.entrypoint_by_name
    host = fleet.open(
        name, listener=listener, is_entrypoint=is_entrypoint, memory_bytes=memory_bytes
    )
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say("ready")
    while line := await reader.readline():
        order, *numbers = json.loads(line)
        _say(await _obey(host, order, numbers))


def _say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _obey(host: Host, order: str, numbers: list[int]) -> Any:  # noqa: ANN401 (JSON)
    if order == "put":
        host.put(*numbers)
        return "done"
    if order == "put-big":
        for number in numbers:
            record = bytes([number]) * BIG_LAYOUT.block_bytes
            assert host.service.put(key_of(number), NAMESPACE, BIG_LAYOUT, record)
        return "done"
    if order == "lookup":
        return await host.lookup(*numbers)
    if order == "fetch":
        return [await host.fetch(number) == bytes_of(number) for number in numbers]
    if order == "entries":
        return 0 if host.directory is None else host.directory.entries
    assert order == "describe"
    return host.service.describe()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))
