"""A cluster of real `kvstored` processes on this machine, in one folder.

Behind `cachalot up` and `cachalot down`, and for the demo, benchmarks and tests that need nodes to
start, kill and start again:

    with LocalCluster.start(folder, nodes=6, k=4, m=2) as cluster:      # stops them at the end
        store = StoreClient.open(cluster.cluster_path)
        cluster.kill("n03")

Not for nodes on other machines, nor for nodes that something else started.
"""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ..cluster.entities import ClusterMap, Node
from ..cluster.map import load_cluster_map, write_cluster_map
from ..errors import InvalidArgument, NodeError
from .local_folder import LocalFolder, NodeOptions
from .local_plan import (
    HOST,
    LocalWishes,
    add_control,
    choose_shape,
    find_differences,
    plan_local_map,
)
from .local_workers import LocalWorkers, bind_control_ports
from .node_process import StopDeadlines
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
        deadline_s: float = START_DEADLINE_S,
    ) -> LocalCluster:
        """Bring up all nodes of the cluster in `folder`, which is made if it is not there.

        With `gc` a worker is started beside each node too, and not waited for.

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
        )
        options = NodeOptions(segment_size_bytes=segment_size_bytes, sync=sync)
        cluster, _ = cls.bring_up(folder, wishes, options, gc=gc, deadline_s=deadline_s)
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
        *,
        gc: bool = False,
        deadline_s: float = START_DEADLINE_S,
    ) -> tuple[LocalCluster, list[str]]:
        """As `start`; also the names of the nodes that this call started."""
        place = LocalFolder(folder)
        check_node_options(options)
        if not place.cluster_path.exists():
            choose_shape(wishes)  # its mistakes, before anything is made
        place.create()
        with place.locked():
            if not place.cluster_path.exists():
                place.refuse_lost_map()
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
            missing = [node for node in cluster.map.nodes if not cluster.is_alive(node.name)]
            cluster._check_running(missing, deadline_s)
            listeners = bind_known_ports(missing)
            if gc:
                cluster._start_with_workers(missing, listeners, deadline_s)
            else:
                cluster._start_nodes(missing, listeners, deadline_s)
            return cluster, [node.name for node in missing]

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
        shape = choose_shape(wishes)
        listeners = bind_new_ports(shape.nodes * (2 if gc else 1), HOST)
        ports = [listener.getsockname()[1] for listener in listeners]
        try:
            cluster_map = plan_local_map(
                shape,
                cluster=secrets.token_hex(16),
                ports=ports[: shape.nodes],
                control_ports=ports[shape.nodes :],
            )
            place.write_options(options)
            write_cluster_map(cluster_map, place.cluster_path)
        except BaseException:
            _close_all(listeners)
            raise
        cluster = cls(place, cluster_map)
        control = dict(zip(cluster.node_names, listeners[shape.nodes :], strict=False))
        absent = cluster_map.nodes if gc else ()
        cluster._start_all(cluster_map.nodes, listeners[: shape.nodes], absent, control, deadline_s)
        return cluster, cluster.node_names

    def _start_with_workers(
        self, missing: Sequence[Node], listeners: Sequence[socket.socket], deadline_s: float
    ) -> None:
        """Start `missing` nodes on their listeners, then the workers that are missing."""
        try:
            absent = self.workers.missing(self._map)
            if absent and any(node.control is None for node in self._map.nodes):
                control = self._give_control_ports()
                absent = self.workers.missing(self._map)
            else:
                control = bind_control_ports(absent)
        except BaseException:
            _close_all(listeners)
            raise
        self._start_all(missing, listeners, absent, control, deadline_s)

    def _start_all(
        self,
        nodes: Sequence[Node],
        listeners: Sequence[socket.socket],
        absent: Sequence[Node],
        control: Mapping[str, socket.socket],
        deadline_s: float,
    ) -> None:
        """Start `nodes`, then the workers of `absent`; what was started is stopped if that fails.

        `control`: the listeners of the workers' control APIs, by node.
        """
        try:
            self._start_nodes(nodes, listeners, deadline_s)
        except BaseException:
            _close_all(list(control.values()))
            raise
        try:
            self.workers.start(absent, control)
        except BaseException:
            self.workers.stop([node.name for node in absent])
            stop_nodes(self._folder, [node.name for node in nodes], STOP_DEADLINES)
            self._reap()
            raise

    def _give_control_ports(self) -> dict[str, socket.socket]:
        """Write a map of the next epoch that has a control address for each node."""
        listeners = bind_new_ports(len(self._map.nodes), HOST)
        try:
            ports = [listener.getsockname()[1] for listener in listeners]
            changed = replace(add_control(self._map, ports), epoch=self._map.epoch + 1)
            write_cluster_map(changed, self.cluster_path)
        except BaseException:
            _close_all(listeners)
            raise
        self._map = changed
        return dict(zip(self.node_names, listeners, strict=True))

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
            # Workers first, so that none complains about nodes that are meant to go.
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


def _close_all(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
