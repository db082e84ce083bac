"""The storage nodes of a local cluster: `kvstored` processes on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from socket import socket as Listener

from ..cluster.entities import Node
from ..errors import NodeError
from .local_folder import LocalFolder
from .local_processes import LocalProcesses
from .node_process import KVSTORED, StopDeadlines
from .node_start import StartingNode, spawn_node


class LocalNodes(LocalProcesses):
    """Starts, finds and ends the nodes of one local cluster. Belongs to one thread."""

    def __init__(self, folder: LocalFolder) -> None:
        super().__init__(folder.of(KVSTORED), StopDeadlines())

    def missing(self, nodes: Sequence[Node]) -> list[Node]:
        """Those of which no process runs."""
        return [node for node in nodes if self.pid(node.name) is None]

    def check_running(self, nodes: Sequence[Node], deadline_s: float) -> None:
        """Raises NodeError if a node that has a process does not answer, as a stopped one."""
        running = {node.name for node in nodes} - {node.name for node in self.missing(nodes)}
        if not running:
            return
        # It comes with numpy, which most starts do without.
        from ..client import StoreClient

        with StoreClient.open(self._folder.cluster_path) as store:
            reports = store.node_reports(deadline_s=deadline_s)
        silent = [one for one in reports if one.node in running and not one.is_alive]
        if silent:
            first, more = silent[0], len(silent) - 1
            raise NodeError(
                first.node,
                f"process {self.pid(first.node)} is there but does not answer"
                f"{f' (and {more} more)' if more else ''}: {first.problem}; nothing was started;"
                f" to end it: cachalot down --dir {shlex.quote(str(self._folder.path))}",
            )

    def start_all(
        self, nodes: Sequence[Node], listeners: Mapping[str, Listener], deadline_s: float
    ) -> None:
        """Start all of `nodes`, each on its listener, and wait; all or none of them run then.

        The listeners are closed here. Raises NodeStartFailed.
        """
        options = self._folder.read_options()
        by_name = {node.name: node for node in nodes}

        def spawn(name: str) -> StartingNode:
            return spawn_node(self._folder, by_name[name], options, listeners[name])

        self._start_all(list(by_name), spawn, listeners.values(), deadline_s)
