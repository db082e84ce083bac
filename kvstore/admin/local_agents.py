"""The agents of a local cluster: `cachalot agent` processes on this machine.

All of them have all roles, and each is an entrypoint of the map, under its own name. What an agent
keeps is soft, so one that was killed is started again on its old address and begins empty.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from socket import socket as Listener

from ..cluster.entities import Entrypoint
from ..cluster.map import load_cluster_map
from ..errors import AgentError, InvalidArgument, NodeError
from ..socket_file import SOCKET_PATH_BYTES_MAX, remove_stale_socket
from .local_folder import LocalAgentOptions, LocalFolder
from .local_processes import START_DEADLINE_S, LocalProcesses
from .node_process import AGENT, StopDeadlines, read_option
from .node_start import StartingNode, bind_known_ports, spawn_recorded
from .node_stop import StoppedNode, stop_nodes
from .quantities import format_size

STOP_DEADLINES = StopDeadlines(term_s=10.0)
"""An agent lets the saves that run end, for 5 s."""
ARENA_BYTES_DEFAULT = 256 << 20
WINDOW_MEMORY_BYTES_DEFAULT = 64 << 20
FETCH_WORKERS_DEFAULT = 1
COUNTS = frozenset({"--fetch-workers"})
"""Options of an agent whose values are no bytes."""


class LocalAgents(LocalProcesses):
    """Starts, finds and ends the agents of one local cluster. Belongs to one thread."""

    def __init__(self, folder: LocalFolder) -> None:
        super().__init__(folder.of(AGENT), STOP_DEADLINES)

    def socket(self, name: str) -> Path:
        """Where engines reach an agent."""
        return self._folder.socket_path(name)

    def missing(self, entrypoints: Sequence[Entrypoint]) -> list[Entrypoint]:
        """Those of which no process runs."""
        return [one for one in entrypoints if self.pid(one.name) is None]

    def describe_kept(self, entrypoints: Sequence[Entrypoint]) -> list[str]:
        """A line for each agent that runs with other options than it would be started with now."""
        wanted = option_values(self._folder.read_agent_options())
        lines = []
        for one in entrypoints:
            pid = self.pid(one.name)
            found = {} if pid is None else {name: read_option(pid, name) for name in wanted}
            kept = [
                f"{name} {value if name in COUNTS else format_size(int(value))}"
                for name, value in found.items()
                if value is not None and value.isdecimal() and int(value) != wanted[name]
            ]
            if kept:
                folder = shlex.quote(str(self._folder.path))
                lines.append(
                    f"{one.name} keeps {', '.join(kept)} until it is started anew: cachalot down"
                    f" --dir {folder} --agent {one.name}; cachalot up --dir {folder}"
                )
        return lines

    def check_running(self, entrypoints: Sequence[Entrypoint], deadline_s: float) -> None:
        """Raises NodeError if an agent that has a process does not answer, as a stopped one."""
        running = [one.name for one in entrypoints if self.pid(one.name) is not None]
        if not running:
            return
        # It comes with msgspec and numpy, which most starts do without.
        from .agent_socket import ask_agent_at

        for name in running:
            try:
                ask_agent_at(self.socket(name), deadline_s)
            except AgentError as error:
                raise NodeError(
                    name,
                    f"process {self.pid(name)} is there but does not answer: {error.detail};"
                    " nothing was started; to end it: cachalot down --dir"
                    f" {shlex.quote(str(self._folder.path))}",
                    noun=AGENT.noun,
                ) from error

    def start(self, name: str, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Start an agent of the map that is not running, on its old address.

        Raises InvalidArgument for one that is not in the map, or runs; NodeStartFailed.
        """
        with self._folder.locked():
            known = load_cluster_map(self._folder.cluster_path).entrypoint_by_name
            if name not in known:
                expected = f"one of the map: {', '.join(known) or 'it has none'}"
                raise InvalidArgument("agent", given=repr(name), expected=expected)
            if self.pid(name) is not None:
                given, expected = f"{name}, which runs", "one that is down"
                raise InvalidArgument("agent", given=given, expected=expected)
            (listener,) = bind_known_ports([known[name]], AGENT.noun)
            self.start_all([known[name]], {name: listener}, deadline_s)

    def start_all(
        self,
        entrypoints: Sequence[Entrypoint],
        listeners: Mapping[str, Listener],
        deadline_s: float,
    ) -> None:
        """Start an agent for each of `entrypoints`, each on its listener, and wait for all of them.

        All or none of them run then. The listeners are closed here. Raises NodeStartFailed.
        """
        options = self._folder.read_agent_options()
        by_name = {one.name: one for one in entrypoints}

        def spawn(name: str) -> StartingNode:
            return self._spawn(by_name[name], options, listeners[name])

        self._start_all(list(by_name), spawn, listeners.values(), deadline_s)

    def _spawn(
        self, entrypoint: Entrypoint, options: LocalAgentOptions, listener: Listener
    ) -> StartingNode:
        command = agent_command(self._folder, entrypoint.name, options, listener.fileno())
        return spawn_recorded(self._folder, entrypoint.name, entrypoint.address, command, listener)

    def stop(
        self, names: Sequence[str], deadlines: StopDeadlines | None = None
    ) -> list[StoppedNode]:
        """End agents cleanly. May be called again. Raises NodeError."""
        stopped = stop_agents(self._folder, names, deadlines or self._stop_deadlines)
        self._reap()
        return stopped


def stop_agents(
    folder: LocalFolder, names: Sequence[str], deadlines: StopDeadlines
) -> list[StoppedNode]:
    """As `stop_nodes`, of a folder of agents; also removes the sockets that killed ones left."""
    stopped = stop_nodes(folder, names, deadlines)
    for one in stopped:
        remove_stale_socket(folder.socket_path(one.node))
    return stopped


def agent_command(
    folder: LocalFolder, name: str, options: LocalAgentOptions, listen_fd: int
) -> list[str]:
    """The command line of an agent; `node_process` recognises it by its first options."""
    command = [sys.executable, "-m", AGENT.module, AGENT.command]
    command += ["--cluster", str(folder.cluster_path), "--name", name]
    command += ["--socket", str(folder.socket_path(name))]
    command += ["--entrypoint", name, "--listen-fd", str(listen_fd)]
    for option, value in option_values(options).items():
        command += [option, str(value)]
    return command


def option_values(options: LocalAgentOptions) -> dict[str, int]:
    """What an agent is started with, by the option of its command line: bytes, or a count."""
    return {
        "--arena": options.arena_bytes or ARENA_BYTES_DEFAULT,
        "--fetch-workers": options.fetch_workers or FETCH_WORKERS_DEFAULT,
        "--window-memory": options.window_memory_bytes or WINDOW_MEMORY_BYTES_DEFAULT,
    }


def check_agents(folder: LocalFolder, names: Sequence[str], options: LocalAgentOptions) -> None:
    """Raises InvalidArgument for what agents would refuse, before anything is made or kept.

    That is an option that no agent may have, more memory than the machine has left, and a folder
    whose path is too long for sockets.
    """
    if not names and options == LocalAgentOptions():
        return
    # Here, because most commands need nothing of the agent.
    from ..agent.memory_check import check_memory, read_memory_left
    from ..agent.options import AgentOptions

    for name in names:
        path = os.fsencode(folder.socket_path(name))
        if len(path) > SOCKET_PATH_BYTES_MAX:
            longest = SOCKET_PATH_BYTES_MAX - (len(path) - len(os.fsencode(folder.path)))
            raise InvalidArgument(
                "folder",
                given=f"{folder.path}, where the socket of agent {name} would have a path of"
                f" {len(path)} bytes",
                expected=f"a folder with a path of at most {longest} bytes: a Unix socket's may"
                f" have {SOCKET_PATH_BYTES_MAX}",
            )
    said = {name: value for name, value in asdict(options).items() if value is not None}
    AgentOptions(cluster_path=folder.cluster_path, socket_path=Path("any"), **said)
    if options.arena_bytes is not None or options.window_memory_bytes is not None:
        values = option_values(folder.read_agent_options().updated(options))
        check_memory(values["--arena"], values["--window-memory"], read_memory_left())
