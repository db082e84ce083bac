"""Twelve storage nodes and an agent in a folder, worked as a user would: by `cachalot`."""

import json
import os
import select
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
CACHALOT = (sys.executable, "-m", "kvstore.admin.cli")
"""`cachalot`, also where the environment's scripts are not on the path."""

NODES = 12
CODE = "10+2"
TARGET_SIZE = "64MiB"
"""Room for some 200 blocks of the model; the files grow only as they fill."""

COMMAND_DEADLINE_S = 120.0
KILL_DEADLINE_S = 10.0
NODES_DOWN = 6
"""Exit code of `cachalot status` where a node is down."""


class CommandFailed(Exception):
    """A command ended with an exit code that was not expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node as `cachalot status` shows it; figures are None for a node that is down."""

    name: str
    is_alive: bool
    pid: int | None
    blocks: int | None
    rejected_shards: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """The agent through which the engines reach the nodes, as `cachalot up` shows it."""

    name: str
    socket_path: Path


class DemoNodes:
    """The nodes and the agent of one folder. Nothing runs before `start` or after `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._agent: AgentView | None = None

    @property
    def agent(self) -> AgentView:
        """There is one once `start` has returned."""
        assert self._agent is not None, "nothing was started"
        return self._agent

    @property
    def cluster_path(self) -> Path:
        return self.folder / "cluster.toml"

    def start(self) -> list[str]:
        """Start all nodes, or those that are not alive; the names of the ones that were started."""
        shape = ["--nodes", str(NODES), "--code", CODE, "--target-size", TARGET_SIZE]
        found = run_cachalot("up", "--dir", str(self.folder), *shape, "--agents", "1", "--json")
        (agent,) = found["agents"]
        self._agent = AgentView(name=agent["agent"], socket_path=Path(agent["socket"]))
        return [node["node"] for node in found["nodes"] if node["is_started"]]

    def stop(self) -> None:
        """Stop every node that `start` started, and the agent. Does nothing if none was."""
        if self.cluster_path.exists():
            run_cachalot("down", "--dir", str(self.folder), "--wait-s", "5", "--json")

    def status(self) -> list[NodeView]:
        """Every node, in the map's order."""
        found = run_cachalot(
            "status", "--cluster", str(self.cluster_path), "--json", may_end_with=(NODES_DOWN,)
        )
        return [
            NodeView(
                name=node["node"],
                is_alive=node["is_alive"],
                pid=node["pid"],
                blocks=node["blocks"],
                rejected_shards=node["rejected_shards"],
            )
            for node in found["nodes"]
        ]

    def kill(self, names: Sequence[str]) -> None:
        """SIGKILL to the processes of these nodes; returns when all of them have ended."""
        pids = {node.name: node.pid for node in self.status() if node.is_alive}
        with ExitStack() as stack:
            descriptors = []
            for name in names:
                pid = pids.get(name)
                if pid is None:
                    raise CommandFailed(f"{name} is to be killed, but it is not alive")
                # Opened first, so that the signal cannot reach a later process of the same number.
                descriptors.append(os.pidfd_open(pid))
                stack.callback(os.close, descriptors[-1])
            for descriptor in descriptors:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            for name, descriptor in zip(names, descriptors, strict=True):
                if not select.select([descriptor], [], [], KILL_DEADLINE_S)[0]:
                    raise CommandFailed(f"{name} does not end after SIGKILL")

    def target_folders(self) -> dict[str, Path]:
        """By the node's name, the folder where it stores, as the cluster map says."""
        cluster_map = tomllib.loads(self.cluster_path.read_text(encoding="utf-8"))
        return {target["node"]: self.folder / target["path"] for target in cluster_map["targets"]}


def run_cachalot(command: str, *words: str, may_end_with: Sequence[int] = ()) -> dict[str, Any]:
    """The JSON object that a command of `cachalot` prints. Raises CommandFailed."""
    return run_json([*CACHALOT, command, *words], may_end_with=may_end_with)


def run_json(
    words: Sequence[str],
    *,
    may_end_with: Sequence[int] = (),
    deadline_s: float = COMMAND_DEADLINE_S,
) -> dict[str, Any]:
    """The JSON object that a program prints. Raises CommandFailed with what it said on stderr.

    It runs in a session of its own: a Ctrl-C at the terminal is for the demo to deal with. If the
    demo is interrupted while it waits, the program is killed.
    """
    try:
        done = subprocess.run(
            words,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(words)}: still running after {deadline_s} s") from error
    if done.returncode not in (0, *may_end_with):
        said = done.stderr.strip() or "nothing on stderr"
        raise CommandFailed(f"{' '.join(words)}: exit code {done.returncode}: {said}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
