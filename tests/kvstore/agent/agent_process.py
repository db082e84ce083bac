"""A real agent in a process of its own, for tests, on a socket in a folder with a short name."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .raw_engine import RawEngine

ROOT = Path(__file__).resolve().parents[3]
START_S = 30.0


def agent_command(cluster_path: str | Path, socket_path: str | Path, *words: str) -> list[str]:
    command = [sys.executable, "-m", "kvstore.admin.cli", "agent"]
    return [*command, "--cluster", str(cluster_path), "--socket", str(socket_path), *words]


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waits for somebody to take note of its end."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def short_folder() -> Path:
    """A new folder whose name leaves room for a socket's."""
    return Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))


@dataclass
class AgentProcess:
    """`cachalot agent` with a small arena and one fetch worker, unless told otherwise."""

    cluster_path: str | Path
    words: Sequence[str] = ("--arena", "64MiB", "--window-memory", "16MiB")
    descriptors_max: int | None = None
    """Limit of the process, soft and hard."""
    working_folder: Path = ROOT
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of this process."""
    folder: Path = field(default_factory=short_folder)
    process: subprocess.Popen[bytes] = field(init=False)
    ready: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    @property
    def socket_path(self) -> Path:
        return self.folder / "agent.sock"

    @property
    def log_path(self) -> Path:
        return self.folder / "agent.log"

    def start(self) -> None:
        command = agent_command(self.cluster_path, self.socket_path, *self.words)
        if self.descriptors_max is not None:
            command = ["sh", "-c", f'ulimit -n {self.descriptors_max}; exec "$@"', "sh", *command]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.working_folder,
                env={**os.environ, **self.environment},
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if readable else b""
        assert line, self.log()
        self.ready = json.loads(line)

    def engine(self, *, is_greeted: bool = True) -> RawEngine:
        engine = RawEngine(self.socket_path)
        if is_greeted:
            engine.hello()
        return engine

    def status(self) -> dict[str, Any]:
        with self.engine() as engine:
            return engine.status()

    def log(self) -> str:
        return self.log_path.read_text()

    def descriptor_count(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_bytes(self) -> int:
        """Memory of the agent's process that is its own: nothing that it shares."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        private = [line.split()[1] for line in lines if line.startswith("Private_")]
        return sum(map(int, private)) * 1024

    def workers(self) -> list[int]:
        """Pids of its workers."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(pid) for one in threads for pid in (one / "children").read_text().split()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(START_S)

    def revive(self) -> None:
        """Let it go on, or start it again, whatever a test did to it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        else:
            self.kill()
            self.start()

    def kill(self) -> None:
        """SIGKILL; `start` starts another one on the same socket."""
        self.process.kill()
        self.process.wait(START_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def close(self) -> None:
        """SIGKILL, if it still runs; removes the folder."""
        self.process.kill()
        self.process.wait(START_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
