"""A cluster of real `kvstored` processes on this machine, in one folder.

Behind `cachalot up` and `cachalot down`, and for the demo, benchmarks and tests that need nodes to
start, kill and start again:

    with LocalCluster.start(folder, nodes=6, k=4, m=2) as cluster:      # stops them at the end
        store = StoreClient.open(cluster.cluster_path)
        cluster.kill("n03")

With `agents=2` the folder also has the agents a01 and a02: `cluster.agents.socket("a01")`. Engines
are started by themselves: `cluster.engines.bring_up(..)`.

Not for nodes on other machines, nor for nodes that something else started.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from ..cluster.entities import ClusterMap, Node
from ..cluster.map import load_cluster_map, write_cluster_map
from ..errors import InvalidArgument, shown
from .local_agents import LocalAgents, check_agents
from .local_engines import LocalEngines
from .local_folder import LocalAgentOptions, LocalFolder, NodeOptions, naming_file
from .local_nodes import LocalNodes
from .local_plan import LocalWishes, choose_agents, choose_shape, find_differences, name_agents
from .local_processes import START_DEADLINE_S
from .local_start import LocalStart, hold_missing, hold_new
from .local_workers import LocalWorkers
from .node_process import StopDeadlines
from .node_start import bind_known_ports, check_node_options
from .node_stop import SIGNAL_DEADLINE_S, StopOutcome, StoppedNode
from .quantities import make_code


class LocalCluster:
    """The nodes of one folder. Make one with `start`, or with `attach` to start nothing.

    Belongs to one thread. Processes outlive it unless it is used in `with` or `stop` is called.
    """

    def __init__(self, folder: LocalFolder, cluster_map: ClusterMap) -> None:
        self._folder = folder
        self._map = cluster_map
        self._nodes = LocalNodes(folder)
        self.workers = LocalWorkers(folder)
        """The `gc_worker` beside each node, where they were asked for."""
        self.agents = LocalAgents(folder)
        """The agents of this machine, where they were asked for."""
        self.engines = LocalEngines(folder)
        """The engine workers of this machine, which `start` leaves alone."""

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
        names = name_agents(choose_agents(wishes))
        check_agents(place, names, agent_options or LocalAgentOptions())
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
            cluster._nodes.check_running(cluster.map.nodes, deadline_s)
            cluster.agents.check_running(cluster.map.entrypoints, deadline_s)
            return cluster, cluster._start_missing(wishes, gc=gc, deadline_s=deadline_s)

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
        with hold_new(choose_shape(wishes), choose_agents(wishes), has_workers=gc) as start:
            place.write_options(options)
            with naming_file(place.cluster_path):
                write_cluster_map(start.cluster_map, place.cluster_path)
            cluster = cls(place, start.cluster_map)
            cluster._start(start, deadline_s)
        return cluster, [*start.nodes, *start.agents]

    def _start_missing(self, wishes: LocalWishes, *, gc: bool, deadline_s: float) -> list[str]:
        """Start nodes, then workers and agents that are missing; names of nodes and agents."""
        known = self._map.entrypoints
        with hold_missing(
            self._map,
            nodes=self._nodes.missing(self._map.nodes),
            workers=self.workers.missing(self._map) if gc else [],
            agents=self.agents.missing(known),
            agents_added=choose_agents(wishes, len(known)) - len(known),
        ) as start:
            if start.cluster_map is not self._map:
                with naming_file(self.cluster_path):
                    write_cluster_map(start.cluster_map, self.cluster_path)
                self._map = start.cluster_map
            self._start(start, deadline_s)
        return [*start.nodes, *start.agents]

    def _start(self, start: LocalStart, deadline_s: float) -> None:
        """Start nodes, the workers beside them, then agents; all of it or nothing."""
        nodes = [self._map.node_by_name[name] for name in start.nodes]
        agents = [self._map.entrypoint_by_name[name] for name in start.agents]
        with ExitStack() as undo:
            self._nodes.start_all(nodes, start.nodes, deadline_s)
            undo.callback(self._nodes.stop, list(start.nodes))
            undo.callback(self.workers.stop, [node.name for node in start.workers])
            self.workers.start(start.workers, start.control)
            self.agents.start_all(agents, start.agents, deadline_s)
            undo.pop_all()

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
        return self._nodes.log_path(self._node(node).name)

    def node_pid(self, node: str) -> int | None:
        """The pid of a node's process, None if it is not running."""
        return self._nodes.pid(self._node(node).name)

    def is_alive(self, node: str) -> bool:
        """Whether the node's process exists; a stopped one (SIGSTOP) does."""
        return self.node_pid(node) is not None

    # Starting and ending ------------------------------------------------------------------------

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a node's process.

        Returns after SIGKILL when the process has ended, and after SIGSTOP when it stands still.
        Raises NodeError if it is not running, or if that does not come about.
        """
        self._nodes.kill(self._node(node).name, number)

    def stop_node(self, node: str, *, deadlines: StopDeadlines | None = None) -> StopOutcome:
        """End one node cleanly. Raises NodeError if it does not end."""
        name = self._node(node).name
        with self._folder.locked():
            (stopped,) = self._nodes.stop([name], deadlines)
        return stopped.outcome

    def restart_node(self, node: str, *, deadline_s: float = START_DEADLINE_S) -> None:
        """Start a node again on its old address; one that still runs is stopped first.

        Raises NodeStartFailed.
        """
        found = self._node(node)
        with self._folder.locked():
            self._nodes.stop([node])
            (listener,) = bind_known_ports([found])
            self._nodes.start_all([found], {node: listener}, deadline_s)

    def stop(self, *, deadlines: StopDeadlines | None = None) -> list[StoppedNode]:
        """End all nodes cleanly and wait for them. May be called again. Raises NodeError."""
        with self._folder.locked():
            # Who uses the nodes goes first, so that none complains about nodes meant to go.
            self.engines.stop(self.engines.recorded(), deadlines)
            self.agents.stop(self.agents.recorded(), deadlines)
            self.workers.stop(self.workers.recorded(), deadlines)
            return self._nodes.stop(self.node_names, deadlines)

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
            for processes in (self.engines, self.agents, self.workers, self._nodes):
                processes.end_children(SIGNAL_DEADLINE_S)

    def _node(self, name: str) -> Node:
        node = self._map.node_by_name.get(name)
        if node is None:
            known = f"{self.node_names[0]} to {self.node_names[-1]}"
            raise InvalidArgument("node", given=shown(name), expected=f"one of the map: {known}")
        return node


def _keep_agent_options(place: LocalFolder, options: LocalAgentOptions | None) -> None:
    if options is not None and options != LocalAgentOptions():
        place.write_agent_options(place.read_agent_options().updated(options))
