"""A cluster of real `kvstored` processes on this machine, in one folder.

Behind `cachalot up` and `cachalot down`, and for the demo, benchmarks and tests that need nodes to
start, kill and start again:

    with LocalCluster.start(folder, nodes=6, k=4, m=2) as cluster:      # stops them at the end
        store = StoreClient.open(cluster.cluster_path)
        cluster.kill("n03")

With `agents=2` the folder also has the agents a01 and a02: `cluster.agents.socket("a01")`.

Not for nodes on other machines, nor for nodes that something else started.
"""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ..cluster.entities import ClusterMap, Node
from ..cluster.map import load_cluster_map, write_cluster_map
from ..errors import InvalidArgument, NodeError
from .local_agents import LocalAgents, check_socket_paths
from .local_folder import LocalAgentOptions, LocalFolder, NodeOptions
from .local_plan import (
    HOST,
    LocalWishes,
    add_control,
    add_entrypoints,
    choose_agents,
    choose_shape,
    find_differences,
    name_agents,
    plan_local_map,
)
from .local_workers import LocalWorkers, bind_control_ports
from .node_process import AGENT, StopDeadlines
from .node_start import (
    StartingNode,
    bind_known_ports,
    bind_new_ports,
    check_node_options,
    spawn_node,
    wait_until_ready,
)
from .node_stop import (
    SIGNAL_DEADLINE_S,
    StopOutcome,
    StoppedNode,
    find_process,
    signal_process,
    stop_nodes,
)
from .quantities import make_code

START_DEADLINE_S = 60.0
STOP_DEADLINES = StopDeadlines()


class LocalCluster:
    """The nodes of one folder. Make one with `start`, or with `attach` to start nothing.

    Belongs to one thread. Processes outlive it unless it is used in `with` or `stop` is called.
    """

    def __init__(self, folder: LocalFolder, cluster_map: ClusterMap) -> None:
        self._folder = folder
        self._map = cluster_map
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self.workers = LocalWorkers(folder)
        """The `gc_worker` beside each node, where they were asked for."""
        self.agents = LocalAgents(folder)
        """The agents of this machine, where they were asked for."""

    @classmethod
    def start(
        cls,
        folder: str | Path,
        *,
        nodes: int | None = None,
        k: int | None = None,
        m: int | None = None,
        target_size_bytes: int | None = None,
        segment_size_bytes: int | None = None,
        sync: str | None = None,
        gc: bool = False,
        agents: int | None = None,
        agent_options: LocalAgentOptions | None = None,
        deadline_s: float = START_DEADLINE_S,
    ) -> LocalCluster:
        """Bring up all nodes of the cluster in `folder`, which is made if it is not there.

        With `gc` a worker is started beside each node too, and not waited for. `agents`: so many
        agents (a01, a02, ...), which are entrypoints of the map; None: those that the map has.

        A new cluster has 12 nodes, code 10+2 and targets of 4 GiB where nothing else is said. In
        one that is there, only nodes that are not alive are started, and InvalidArgument is raised
        if it is not what was asked for, NodeError if one that is alive does not answer, in which
        case nothing is started. Raises NodeStartFailed if a node is not ready within
        `deadline_s`; the ones started by this call are stopped again then.
        """
        if (k is None) != (m is None):
            raise InvalidArgument("code", given=f"k={k}, m={m}", expected="both or none of them")
        wishes = LocalWishes(
            nodes=nodes,
            code=None if k is None or m is None else make_code("code", k, m),
            target_size_bytes=target_size_bytes,
            agents=agents,
        )
        options = NodeOptions(segment_size_bytes=segment_size_bytes, sync=sync)
        cluster, _ = cls.bring_up(
            folder, wishes, options, agent_options, gc=gc, deadline_s=deadline_s
        )
        return cluster

    @classmethod
    def attach(cls, folder: str | Path) -> LocalCluster:
        """The cluster that is in `folder`, as it is. Raises ClusterMapError."""
        place = LocalFolder(folder)
        return cls(place, load_cluster_map(place.cluster_path))

    @classmethod
    def bring_up(
        cls,
        folder: str | Path,
        wishes: LocalWishes,
        options: NodeOptions,
        agent_options: LocalAgentOptions | None = None,
        *,
        gc: bool = False,
        deadline_s: float = START_DEADLINE_S,
    ) -> tuple[LocalCluster, list[str]]:
        """As `start`; also the names of the nodes and agents that this call started."""
        place = LocalFolder(folder)
        check_node_options(options)
        if not place.cluster_path.exists():
            choose_shape(wishes)  # its mistakes, before anything is made
        check_socket_paths(place, name_agents(choose_agents(wishes)))
        place.create()
        with place.locked():
            if not place.cluster_path.exists():
                place.refuse_lost_map()
                _keep_agent_options(place, agent_options)
                return cls._create(place, wishes, options, gc=gc, deadline_s=deadline_s)
            cluster = cls(place, load_cluster_map(place.cluster_path))
            differences = find_differences(wishes, cluster.map)
            if differences:
                raise InvalidArgument(
                    "cluster",
                    given=f"one in {place.path} that has {' and '.join(differences)}",
                    expected="the same, or another folder for another cluster",
                )
            place.write_options(place.read_options().updated(options))
            _keep_agent_options(place, agent_options)
            missing = [node for node in cluster.map.nodes if not cluster.is_alive(node.name)]
            cluster._check_running(missing, deadline_s)
            cluster.agents.check_running(cluster.map.entrypoints, deadline_s)
            return cluster, cluster._start_missing(missing, wishes, gc=gc, deadline_s=deadline_s)

    @classmethod
    def _create(
        cls,
        place: LocalFolder,
        wishes: LocalWishes,
        options: NodeOptions,
        *,
        gc: bool,
        deadline_s: float,
    ) -> tuple[LocalCluster, list[str]]:
        shape, agents = choose_shape(wishes), choose_agents(wishes)
        with_control = shape.nodes * (2 if gc else 1)
        listeners = bind_new_ports(with_control + agents, HOST)
        ports = [listener.getsockname()[1] for listener in listeners]
        try:
            cluster_map = plan_local_map(
                shape,
                cluster=secrets.token_hex(16),
                ports=ports[: shape.nodes],
                control_ports=ports[shape.nodes : with_control],
            )
            cluster_map = add_entrypoints(cluster_map, ports[with_control:])
            place.write_options(options)
            write_cluster_map(cluster_map, place.cluster_path)
        except BaseException:
            _close_all(listeners)
            raise
        cluster = cls(place, cluster_map)
        control = listeners[shape.nodes : with_control]
        cluster._start_all(
            cluster_map.nodes,
            listeners[: shape.nodes],
            control=dict(zip(cluster.node_names, control, strict=False)),
            workers=cluster_map.nodes if gc else (),
            agents=dict(zip(cluster.agent_names, listeners[with_control:], strict=True)),
            deadline_s=deadline_s,
        )
        return cluster, [*cluster.node_names, *cluster.agent_names]

    def _start_missing(
        self, missing: Sequence[Node], wishes: LocalWishes, *, gc: bool, deadline_s: float
    ) -> list[str]:
        """Start `missing` nodes, then workers and agents that are missing; names of what started.

        What the map lacks of that is added to it, in one new epoch at most.
        """
        with ExitStack() as held:
            listeners = bind_known_ports(missing)
            held.callback(_close_all, listeners)
            lacks_control = gc and any(node.control is None for node in self._map.nodes)
            lacks_control = lacks_control and bool(self.workers.missing(self._map))
            known = self._map.entrypoints
            added = choose_agents(wishes, len(known)) - len(known)
            new = bind_new_ports((len(self._map.nodes) if lacks_control else 0) + added, HOST)
            held.callback(_close_all, new)
            self._grow_map(new[: len(new) - added], new[len(new) - added :])
            workers = self.workers.missing(self._map) if gc else []
            if lacks_control:
                control = dict(zip(self.node_names, new, strict=False))
            else:
                control = bind_control_ports(workers)
            held.callback(_close_all, list(control.values()))
            down = self.agents.missing(known)
            names = [one.name for one in (*down, *self._map.entrypoints[len(known) :])]
            free = [*bind_known_ports(down, AGENT.noun), *new[len(new) - added :]]
            agents = dict(zip(names, free, strict=True))
            # From here on they are closed by those who use them.
            held.pop_all()
        self._start_all(
            missing,
            listeners,
            control=control,
            workers=workers,
            agents=agents,
            deadline_s=deadline_s,
        )
        return [*(node.name for node in missing), *agents]

    def _start_all(
        self,
        nodes: Sequence[Node],
        listeners: Sequence[socket.socket],
        *,
        control: Mapping[str, socket.socket],
        workers: Sequence[Node],
        agents: Mapping[str, socket.socket],
        deadline_s: float,
    ) -> None:
        """Start `nodes`, the workers beside `workers`, then agents; all of it or nothing.

        `control`: the listeners of the workers' control APIs, by node. `agents`: those of the
        agents to start, by name.
        """
        points = [self._map.entrypoint_by_name[name] for name in agents]
        with ExitStack() as undo:
            undo.callback(_close_all, [*control.values(), *agents.values()])
            self._start_nodes(nodes, listeners, deadline_s)
            undo.callback(self._stop_nodes, [node.name for node in nodes])
            undo.callback(self.workers.stop, [node.name for node in workers])
            self.workers.start(workers, control)
            self.agents.start_all(points, agents, deadline_s)
            undo.pop_all()

    def _stop_nodes(self, names: Sequence[str]) -> None:
        stop_nodes(self._folder, names, STOP_DEADLINES)
        self._reap()

    def _grow_map(self, control: Sequence[socket.socket], agents: Sequence[socket.socket]) -> None:
        """Write a map of the next epoch with control addresses for all nodes, and more agents."""
        if not control and not agents:
            return
        changed = self._map
        if control:
            changed = add_control(changed, [one.getsockname()[1] for one in control])
        changed = add_entrypoints(changed, [one.getsockname()[1] for one in agents])
        changed = replace(changed, epoch=self._map.epoch + 1)
        write_cluster_map(changed, self.cluster_path)
        self._map = changed

    def _check_running(self, missing: Sequence[Node], deadline_s: float) -> None:
        """Raises NodeError if a node that has a process does not answer, as a stopped one."""
        running = set(self.node_names) - {node.name for node in missing}
        if not running:
            return
        # It comes with numpy, which most starts do without.
        from ..client import StoreClient

        with StoreClient.open(self.cluster_path) as store:
            reports = store.node_reports(deadline_s=deadline_s)
        silent = [one for one in reports if one.node in running and not one.is_alive]
        if silent:
            first, more = silent[0], len(silent) - 1
            raise NodeError(
                first.node,
                f"process {self.node_pid(first.node)} is there but does not answer"
                f"{f' (and {more} more)' if more else ''}: {first.problem}; nothing was started;"
                f" to end it: cachalot down --dir {self.folder}",
            )

    # What is there ------------------------------------------------------------------------------

    @property
    def map(self) -> ClusterMap:
        return self._map

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def cluster_path(self) -> Path:
        """The map's file, for StoreClient."""
        return self._folder.cluster_path

    @property
    def node_names(self) -> list[str]:
        """Names of all nodes, alive or not, in the map's order."""
        return [node.name for node in self._map.nodes]

    @property
    def agent_names(self) -> list[str]:
        """Names of all agents, alive or not, in the map's order."""
        return [point.name for point in self._map.entrypoints]

    def target_folder(self, node: str) -> Path:
        """The folder of a node's (first) target. Raises InvalidArgument for an unknown node."""
        self._node(node)
        return self._map.targets_by_node[node][0].folder(self.cluster_path)

    def log_path(self, node: str) -> Path:
        """What the node said on stderr. Raises InvalidArgument for an unknown node."""
        return self._folder.log_path(self._node(node).name)

    def node_pid(self, node: str) -> int | None:
        """The pid of a node's process, None if it is not running."""
        process = find_process(self._folder, self._node(node).name)
        if process is None:
            return None
        process.close()
        return process.pid

    def is_alive(self, node: str) -> bool:
        """Whether the node's process exists; a stopped one (SIGSTOP) does."""
        return self.node_pid(node) is not None

    # Starting and ending ------------------------------------------------------------------------

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a node's process.

        Returns after SIGKILL when the process has ended, and after SIGSTOP when it stands still.
        Raises NodeError if it is not running, or if that does not come about.
        """
        signal_process(self._folder, self._node(node).name, number)
        self._reap()

    def stop_node(self, node: str, *, deadlines: StopDeadlines = STOP_DEADLINES) -> StopOutcome:
        """End one node cleanly. Raises NodeError if it does not end."""
        name = self._node(node).name
        with self._folder.locked():
            (stopped,) = stop_nodes(self._folder, [name], deadlines)
        self._reap()
        return stopped.outcome

    def restart_node(self, node: str, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Start a node again on its old address; one that still runs is stopped first.

        Raises NodeStartFailed.
        """
        found = self._node(node)
        with self._folder.locked():
            stop_nodes(self._folder, [node], STOP_DEADLINES)
            self._reap()
            self._start_nodes([found], bind_known_ports([found]), deadline_s)

    def stop(self, *, deadlines: StopDeadlines = STOP_DEADLINES) -> list[StoppedNode]:
        """End all nodes cleanly and wait for them. May be called again. Raises NodeError."""
        with self._folder.locked():
            # Who uses the nodes goes first, so that none complains about nodes meant to go.
            self.agents.stop(self.agents.recorded())
            self.workers.stop(self.workers.recorded())
            stopped = stop_nodes(self._folder, self.node_names, deadlines)
        self._reap()
        return stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.folder.exists():
                self.stop()
        finally:
            # Somebody may have removed the folder, and the records in it, under running nodes.
            for child in self._children.values():
                child.kill()
                child.wait(SIGNAL_DEADLINE_S)
            self._children.clear()
            self.workers.end_children(SIGNAL_DEADLINE_S)
            self.agents.end_children(SIGNAL_DEADLINE_S)

    def _node(self, name: str) -> Node:
        node = self._map.node_by_name.get(name)
        if node is None:
            known = f"{self.node_names[0]} to {self.node_names[-1]}"
            raise InvalidArgument("node", given=repr(name), expected=f"one of the map: {known}")
        return node

    def _start_nodes(
        self, nodes: Sequence[Node], listeners: Sequence[socket.socket], deadline_s: float
    ) -> None:
        """Start all of `nodes`, each on its listener, and wait; all or none of them run then."""
        options = self._folder.read_options()
        starting: dict[str, StartingNode] = {}
        try:
            try:
                for node, listener in zip(nodes, listeners, strict=True):
                    started = spawn_node(self._folder, node, options, listener)
                    starting[node.name] = started
                    self._children[started.process.pid] = started.process
            finally:
                _close_all(listeners)
            wait_until_ready(starting, deadline_s=deadline_s)
        except BaseException:
            # None of them was alive before. By record, so that an interrupt between the start of
            # a process and our note of it leaves nothing behind.
            stop_nodes(self._folder, [node.name for node in nodes], STOP_DEADLINES)
            self._reap()
            raise
        finally:
            for started in starting.values():
                assert started.process.stdout is not None
                started.process.stdout.close()

    def _reap(self) -> None:
        """Take note of children that have ended, or they would stay as zombies."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]


def _keep_agent_options(place: LocalFolder, options: LocalAgentOptions | None) -> None:
    if options is not None and options != LocalAgentOptions():
        place.write_agent_options(place.read_agent_options().updated(options))


def _close_all(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
