"""The `gc_worker` processes beside the nodes of a local cluster.

A node serves without its worker, so nobody waits for workers: they come up behind the nodes, at a
lower priority, and wait for their node themselves. What became of one says its log, `cachalot
status`, and its record here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from ..cluster.entities import ClusterMap, Node
from .local_folder import LocalFolder, NodeRecord, naming_file
from .local_processes import LocalProcesses
from .new_token import make_token_file
from .node_process import GC_WORKER, StopDeadlines
from .node_start import CODE_ROOT, KILL_DEADLINE_S, NodeStartFailed, bind_known_ports
from .output import write_remark

NICENESS = 10
"""Twelve workers that start, or that clean up, must not take the machine from twelve nodes."""
NAMED_DEADLINE_S = 5.0
NAMED_POLL_S = 0.002


class LocalWorkers(LocalProcesses):
    """Starts, finds and ends the workers of one local cluster. Belongs to one thread.

    The name of each is that of its node.
    """

    def __init__(self, folder: LocalFolder) -> None:
        super().__init__(folder.of(GC_WORKER), StopDeadlines(term_s=10.0))

    def missing(self, cluster_map: ClusterMap) -> list[Node]:
        """The nodes beside which no worker runs."""
        return [node for node in cluster_map.nodes if self.pid(node.name) is None]

    def start(self, nodes: Sequence[Node], listeners: Mapping[str, socket.socket]) -> None:
        """Start a worker beside each of `nodes`; those with a listener serve the control API.

        The listeners are closed here. Returns at once: a worker waits for its node by itself.
        """
        with ExitStack() as held:
            for listener in listeners.values():
                held.enter_context(listener)
            if nodes:
                with naming_file(self._folder.token_path):
                    make_token_file(self._folder.token_path)
            for node in nodes:
                self._spawn(node, listeners.get(node.name))

    def _spawn(self, node: Node, listener: socket.socket | None) -> None:
        self._folder.node_path(node.name).mkdir(parents=True, exist_ok=True)
        with open(self.log_path(node.name), "ab") as log:
            process = subprocess.Popen(
                worker_command(self._folder, node.name, listener),
                stdin=subprocess.DEVNULL,
                # Its ready line is for a service manager; nobody waits for it here.
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=CODE_ROOT,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[] if listener is None else [listener.fileno()],
                start_new_session=True,
            )
        try:
            record = NodeRecord(node=node.name, address=node.control or "", pid=process.pid)
            self._folder.write_record(record)
        except BaseException:
            # Without a record nobody would find it again.
            process.kill()
            process.wait(KILL_DEADLINE_S)
            raise
        self._adopt(process)
        self._wait_until_named(node.name, process)
        # A process that has ended already has no priority any more.
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)

    def _wait_until_named(self, node: str, process: subprocess.Popen[bytes]) -> None:
        """Until the process is seen to be what it is.

        The kernel lets us go on in the middle of its exec, when it has no command line yet: looked
        for in that moment it would not be found, and counted as somebody else's.
        """
        due_s = time.monotonic() + NAMED_DEADLINE_S
        while self.pid(node) is None and process.poll() is None and time.monotonic() < due_s:
            time.sleep(NAMED_POLL_S)


def worker_command(folder: LocalFolder, node: str, listener: socket.socket | None) -> list[str]:
    """The command line of a worker; `node_process` recognises it by its first options."""
    command = [sys.executable, "-m", GC_WORKER.module]
    command += ["--cluster", str(folder.cluster_path), "--node", node]
    if listener is not None:
        command += ["--control-fd", str(listener.fileno())]
        command += ["--token-file", str(folder.token_path)]
    return command


def bind_control_ports(nodes: Sequence[Node]) -> dict[str, socket.socket]:
    """Listening sockets on the control addresses of the map, by node.

    A port that is taken costs that worker its control API, with a remark, and nobody their data.
    """
    listeners: dict[str, socket.socket] = {}
    for node in nodes:
        if node.control is None:
            continue
        try:
            (listener,) = bind_known_ports([Node(name=node.name, address=node.control)])
        except NodeStartFailed as error:
            write_remark(f"{error}; its worker runs without the control API")
            continue
        listeners[node.name] = listener
    return listeners
