"""No window state touches storage: two agents with the role window alone and one that holds the
directory, watched while records come and go.

What a process has open for writing is what the kernel says of it, and so is how much it had
written to disks; a file that it made and closed again would lie in one of its folders.
"""

import asyncio
import dataclasses
import os
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvstore.client import AgentClient
from kvstore.cluster.entities import Entrypoint
from kvstore.cluster.map import load_cluster_map, write_cluster_map
from kvstore.key import Namespace
from kvstore.layout import BlockLayout, Section
from tests.kvstore.agent.agent_process import ROOT, AgentProcess, short_folder
from tests.kvstore.agent.process_usage import descriptors_of
from tests.kvstore.window.hosts import V41_LAYOUT, bytes_of, key_of
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", layout=BlockLayout((Section("kv", 8192),))
)
DIRECTORY = ("--roles", "check", "--entrypoint", "e1")
WINDOWS = ("--roles", "window", "--arena", "16MiB", "--window-memory", "17MiB")
RECORDS = range(24)
"""Twice as many as one agent has memory for."""
WRITTEN_BYTES_MAX = 1 << 20
"""A record is larger. The log is written, and a page counts whole."""


class WatchedAgent:
    """An agent in folders of its own, which are empty when it starts."""

    def __init__(self, stack: ExitStack, cluster_path: Path, words: tuple[str, ...]) -> None:
        self.place = short_folder()
        stack.callback(shutil.rmtree, self.place)
        self.empty = [self.place / one for one in ("work", "tmp", "home")]
        for folder in self.empty:
            folder.mkdir(mode=0o500)
        work, temporary, home = map(str, self.empty)
        environment = {"TMPDIR": temporary, "HOME": home, "XDG_CACHE_HOME": home}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = stack.enter_context(
            AgentProcess(cluster_path, words, working_folder=Path(work), environment=environment)
        )
        self._written_bytes = self._read_written_bytes()

    def check(self) -> None:
        """Nothing is open for writing, mapped or made but what must be."""
        pid = self.process.process.pid
        log, lock = map(str, (self.process.log_path, f"{self.process.socket_path}.lock"))
        writable = {
            name
            for number, name in descriptors_of(pid).items()
            if is_file(pid, number) and is_writable(pid, number)
        }
        assert log in writable
        others = writable - {log, lock, os.devnull}
        assert all(name.startswith("/memfd:cachalot-arena") for name in others), others
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, modes, _, _, inode, *path = line.split()
            if modes[1] == "w" and modes[3] == "s" and inode != "0":
                assert path[0].startswith("/memfd:cachalot-arena"), line
        assert {one.name for one in self.process.folder.iterdir()} == {
            "agent.sock",
            "agent.sock.lock",
            "agent.log",
        }
        assert [list(folder.iterdir()) for folder in self.empty] == [[], [], []]

    def written_bytes(self) -> int:
        """What it had the system write to any disk since it served."""
        return self._read_written_bytes() - self._written_bytes

    def _read_written_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.process.pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["write_bytes"])


def is_file(pid: int, number: int) -> bool:
    """A regular file or a device, also one that was removed: no socket, no pipe."""
    try:
        mode = os.stat(f"/proc/{pid}/fd/{number}").st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def is_writable(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines()
    except FileNotFoundError:
        return False
    flags = int(dict(line.split(":", 1) for line in lines)["flags"], 8)
    return flags & os.O_ACCMODE != os.O_RDONLY


@pytest.fixture
def window_map(cluster_path: str, tmp_path: Path) -> Path:
    """The shared cluster's map, with an entrypoint."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        point = Entrypoint(name="e1", address=f"127.0.0.1:{holder.getsockname()[1]}")
    path = tmp_path / "cluster.toml"
    known = load_cluster_map(Path(cluster_path))
    write_cluster_map(dataclasses.replace(known, entrypoints=(point,)), path)
    return path


@asynccontextmanager
async def engine_of(agent: WatchedAgent) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(agent.process.socket_path) as client:
        await client.open_namespace(NAMESPACE, window_layout=V41_LAYOUT)
        yield client


async def test_window_records_are_put_found_fetched_and_evicted_without_any_storage(
    window_map: Path,
) -> None:
    with ExitStack() as stack:
        agents = [WatchedAgent(stack, window_map, words) for words in (DIRECTORY, WINDOWS, WINDOWS)]
        async with engine_of(agents[1]) as maker, engine_of(agents[2]) as reader:
            into = bytearray(V41_LAYOUT.block_bytes)
            for number in RECORDS:
                record = bytes_of(number, V41_LAYOUT.block_bytes)
                assert await maker.put_window(NAMESPACE, key_of(number), record)
                async with asyncio.timeout(PATIENCE_S):
                    while await reader.lookup(NAMESPACE, [key_of(number)]) == [None]:
                        await asyncio.sleep(0.01)
                assert (await reader.fetch_window(NAMESPACE, key_of(number), into)).is_found
                assert into == record
                for agent in agents:
                    agent.check()
            assert (await maker.status())["windows"]["evicted"] > 0
            assert (await reader.status())["windows"]["remote_found"] == len(RECORDS)
        directory = agents[0].process.status()["directory"]
        assert directory["announced"] == len(RECORDS)
        for agent in agents:
            assert agent.written_bytes() < WRITTEN_BYTES_MAX
            agent.check()
