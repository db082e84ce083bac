"""A real `kvstored` in a process of its own, with a cluster map of one node, for tests."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.cluster.entities import ClusterMap, CodeShape, Group, Node, Target
from kvstore.cluster.map import write_cluster_map

from .raw_client import RawClient

CLUSTER = "0123456789abcdef0123456789abcdef"
START_S = 30.0
ROOT = Path(__file__).resolve().parents[3]


def write_map(
    folder: Path,
    *,
    size_bytes: int = 64 << 20,
    cluster: str = CLUSTER,
    targets: int = 1,
    epoch: int = 1,
    path: str = "",
) -> Path:
    """A map of one node n01 with `targets` targets t01, t02, ... in `folder`; a 1+0 code."""
    names = [f"t{i + 1:02}" for i in range(targets)]
    cluster_map = ClusterMap(
        cluster=cluster,
        epoch=epoch,
        code=CodeShape(k=1, m=0, write_acks=1),
        nodes=(Node(name="n01", address="127.0.0.1:1"),),
        targets=tuple(
            Target(name=name, node="n01", path=path or name, size_bytes=size_bytes)
            for name in names
        ),
        groups=tuple(Group(name=f"g{name}", targets=(name,)) for name in names),
    )
    map_path = folder / "cluster.toml"
    write_cluster_map(cluster_map, map_path)
    return map_path


@dataclass
class NodeProcess:
    """`kvstored` for n01 of a map; listens on a port that the kernel chose."""

    map_path: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] = field(init=False)
    address: tuple[str, int] = field(init=False)
    log_path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log_path = self.map_path.parent / "kvstored.log"
        self.start()

    def start(self) -> None:
        self._close_output()
        listener = socket_on_any_port()
        with open(self.log_path, "ab") as log, listener:
            self.process = subprocess.Popen(
                node_command(self.map_path, "--listen-fd", str(listener.fileno()), *self.arguments),
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[listener.fileno()],
                cwd=ROOT,
            )
        line = read_ready_line(self.process)
        assert line is not None, self.log()
        host, _, port = line["address"].rpartition(":")
        self.address = (host, int(port))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def target_path(self) -> Path:
        return self.map_path.parent / "t01"

    def client(self, target_number: int = 0, *, is_greeted: bool = True) -> RawClient:
        name = f"t{target_number + 1:02}"
        client = RawClient(self.address, bytes.fromhex(CLUSTER), name, target_number)
        if is_greeted:
            client.hello()
        return client

    def log(self) -> str:
        return self.log_path.read_text()

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptor_count(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(START_S)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait(START_S)
        self._close_output()

    def _close_output(self) -> None:
        if hasattr(self, "process"):
            assert self.process.stdout is not None
            self.process.stdout.close()

    def restart(self) -> None:
        self.kill()
        self.start()


def socket_on_any_port() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.set_inheritable(True)
    return listener


def node_command(map_path: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "kvstore.node.main", "--cluster", str(map_path)]
    return [*command, "--node", "n01", *arguments]


def read_ready_line(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The JSON line of a node that serves; None if it ended instead."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if ready else b""
    return json.loads(line) if line else None


def run_to_end(map_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a node that is expected to end by itself."""
    return subprocess.run(
        node_command(map_path, *arguments),
        capture_output=True,
        text=True,
        timeout=START_S,
        cwd=ROOT,
        check=False,
    )
