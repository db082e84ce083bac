"""Starting nodes and other servers: their sockets, command lines, and waiting until they serve.

All are started first and waited for together, because each takes a while of CPU time to come up.
The listening sockets are made here and handed over, so that no port can be lost in between, and a
client that comes early waits in the socket's queue instead of being refused.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cluster.entities import Entrypoint, Node
from ..errors import InvalidArgument, NodeError
from .exit_codes import ExitCode
from .local_folder import LocalFolder, NodeOptions, NodeRecord
from .node_process import KVSTORED
from .quantities import format_size

LISTEN_BACKLOG = 512
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 8 << 10
FULL_BYTES = 4 << 10
READY_LINE_BYTES_MAX = 4096
KILL_DEADLINE_S = 10.0

# Nodes run the very code that starts them, also where it is not installed.
CODE_ROOT = Path(__file__).resolve().parents[2]


class NodeStartFailed(NodeError):
    """A node did not come up; `exit_code` is the node's own where that says more than "a node"."""

    def __init__(
        self, node: str, detail: str, *, exit_code: int = ExitCode.NODE, noun: str = "node"
    ) -> None:
        super().__init__(node, detail, noun=noun)
        self.exit_code = exit_code


@dataclass(slots=True, kw_only=True)
class StartingNode:
    """A process that was started and has not yet said that it serves."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    log_offset: int
    """Where in the log this process began."""
    said: bytes = field(default=b"")
    noun: str = "node"


def check_node_options(options: NodeOptions) -> None:
    """Raises InvalidArgument for what every node would refuse, before any is started."""
    if options == NodeOptions():
        return
    # They come with numpy, which most starts do without.
    from ..node.arguments import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN
    from ..node.node import SyncPolicy

    size_bytes, policies = options.segment_size_bytes, [policy.value for policy in SyncPolicy]
    if size_bytes is not None and not SEGMENT_BYTES_MIN <= size_bytes <= SEGMENT_BYTES_MAX:
        limits = f"{format_size(SEGMENT_BYTES_MIN)} to {format_size(SEGMENT_BYTES_MAX)}"
        raise InvalidArgument("segment size", given=format_size(size_bytes), expected=limits)
    if options.sync is not None and options.sync not in policies:
        expected = f"one of {', '.join(policies)}"
        raise InvalidArgument("sync", given=repr(options.sync), expected=expected)


def bind_new_ports(count: int, host: str) -> list[socket.socket]:
    """Listening sockets on ports that the kernel chooses."""
    return _listen_all([(f"number {index + 1}", host, 0) for index in range(count)])


def bind_known_ports(nodes: Sequence[Node | Entrypoint], noun: str = "node") -> list[socket.socket]:
    """Listening sockets on the addresses of the map. Raises NodeStartFailed if one is taken."""
    return _listen_all([(node.name, node.host, node.port) for node in nodes], noun)


def _listen_all(places: Sequence[tuple[str, str, int]], noun: str = "node") -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        for node, host, port in places:
            listeners.append(_listen(node, host, port, noun))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen(node: str, host: str, port: int, noun: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of the process before may still linger on the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            reason = "is taken by another process; end that one, or change the map"
        else:
            reason = f"cannot be listened on: {error.strerror or error}"
        detail = f"its address {host}:{port} {reason}"
        raise NodeStartFailed(node, detail, noun=noun) from error
    return listener


def spawn_node(
    folder: LocalFolder, node: Node, options: NodeOptions, listener: socket.socket
) -> StartingNode:
    """Start one process in a session of its own, and record its pid. `listener` stays open."""
    command = node_command(folder.cluster_path, node.name, options, listener.fileno())
    return spawn_recorded(folder, node.name, node.address, command, listener)


def spawn_recorded(
    folder: LocalFolder,
    name: str,
    address: str,
    command: Sequence[str],
    listener: socket.socket | None = None,
) -> StartingNode:
    """Start `command`, of the folder's program, which listens on `address`, by an inherited socket
    or by itself."""
    folder.node_path(name).mkdir(parents=True, exist_ok=True)
    log_path = folder.log_path(name)
    with open(log_path, "ab") as log:
        log_offset = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=CODE_ROOT,
            # numpy's library for linear algebra would start a thread for each core, which a node
            # has no use for and which spin while they start.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[] if listener is None else [listener.fileno()],
            # Ctrl-C at the terminal and the end of the shell are not meant for it.
            start_new_session=True,
        )
    try:
        folder.write_record(NodeRecord(node=name, address=address, pid=process.pid))
    except BaseException:
        # Without a record nobody would find it again.
        process.kill()
        process.wait(KILL_DEADLINE_S)
        raise
    return StartingNode(
        name=name,
        process=process,
        log_path=log_path,
        log_offset=log_offset,
        noun=folder.program.noun,
    )


def node_command(cluster_path: Path, node: str, options: NodeOptions, listen_fd: int) -> list[str]:
    """The command line of a node; `node_process` recognises it by its first options."""
    command = [sys.executable, "-m", KVSTORED.module]
    command += ["--cluster", str(cluster_path), "--node", node]
    command += ["--listen-fd", str(listen_fd)]
    if options.segment_size_bytes is not None:
        command += ["--segment-size", str(options.segment_size_bytes)]
    if options.sync is not None:
        command += ["--sync", options.sync]
    return command


def wait_until_ready(
    starting: Mapping[str, StartingNode],
    *,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait for the ready line of every process. Raises NodeStartFailed for the first that fails."""
    due_s = clock() + deadline_s
    with selectors.DefaultSelector() as selector:
        for node in starting.values():
            assert node.process.stdout is not None
            selector.register(node.process.stdout, selectors.EVENT_READ, node)
        while selector.get_map():
            events = selector.select(max(due_s - clock(), 0.0))
            if not events:
                late = [key.data for key in selector.get_map().values()]
                raise _late(late, deadline_s)
            for key, _ in events:
                if _take_ready_line(key.data):
                    selector.unregister(key.fileobj)
                    key.data.process.stdout.close()


def _take_ready_line(node: StartingNode) -> bool:
    """Read what the node said; True when that is its ready line."""
    assert node.process.stdout is not None
    said = os.read(node.process.stdout.fileno(), READY_LINE_BYTES_MAX)
    node.said += said
    if b"\n" in node.said:
        line = node.said.partition(b"\n")[0]
        if not is_ready_line(line, node=node.name, pid=node.process.pid, noun=node.noun):
            raise _failed(node, f"said {line[:200]!r} and not that it is ready")
        return True
    if len(node.said) > READY_LINE_BYTES_MAX:
        raise _failed(node, "said much, and not that it is ready")
    if not said:
        raise _ended(node)
    return False


def is_ready_line(line: bytes, *, node: str, pid: int, noun: str = "node") -> bool:
    """Whether a line on stdout is the one by which this process says that it serves."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get(noun) == node and said.get("pid") == pid


def _ended(node: StartingNode) -> NodeStartFailed:
    try:
        code = node.process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return _failed(node, "closed its output before it was ready")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    known = (ExitCode.WRONG_ARGUMENT, ExitCode.CLUSTER_MAP, ExitCode.TARGET)
    passed_on = code if code in known else ExitCode.NODE
    return _failed(node, f"ended with {how} before it was ready", exit_code=passed_on)


def _late(nodes: Sequence[StartingNode], deadline_s: float) -> NodeStartFailed:
    others = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
    return _failed(nodes[0], f"was not ready after {deadline_s:.0f} s{others}")


def _failed(node: StartingNode, detail: str, *, exit_code: int = ExitCode.NODE) -> NodeStartFailed:
    lines = read_tail(node.log_path, node.log_offset)
    shown = f"; the end of {node.log_path}:" if lines else f"; {node.log_path} has no more"
    if not lines and _is_full(node.log_path):
        shown = f"; {node.log_path} says nothing, because its disk is full: make room there"
    text = "\n".join([f"{detail}{shown}", *(f"  {line}" for line in lines)])
    return NodeStartFailed(node.name, text, exit_code=exit_code, noun=node.noun)


def _is_full(path: Path) -> bool:
    """Whether the disk of a file has no room for another page of it."""
    try:
        return shutil.disk_usage(path).free < FULL_BYTES
    except OSError:
        return False


def read_tail(path: Path, offset: int) -> list[str]:
    """The last lines of a log, from `offset` on, at most LOG_TAIL_LINES of LOG_TAIL_BYTES."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - LOG_TAIL_BYTES))
            content = file.read(LOG_TAIL_BYTES)
    except OSError:
        return []
    return content.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
