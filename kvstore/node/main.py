"""`kvstored`: puts one storage node together and runs it until SIGTERM or SIGINT.

The only place of the node that picks the real clock, disk and socket. When the node listens, one
JSON line with its name, address and pid goes to stdout, and nothing else ever does; events go to
stderr.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from ..cluster.entities import ClusterMap
from ..cluster.source import FileMapSource
from ..errors import InvalidArgument, StoreError
from ..event_log import set_up_logging
from ..identity import DISTRIBUTION, check_package_identity
from .arguments import NodeArguments, parse_arguments
from .buffers import BufferPool
from .clock import SystemClock
from .disk import OsDisk
from .map_follower import MapFollower
from .node import Node
from .policy_store import PolicyStore
from .segment import TargetIdentity
from .server import Server, ServerSettings
from .target import Target, TargetSettings
from .target_life import close_target, open_target

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024


def main(words: Sequence[str] | None = None) -> int:
    """Run a node; returns the exit code (`arguments.EXIT_CODES`)."""
    check_package_identity()
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    set_up_logging(SystemClock().monotonic_s, is_json=arguments.is_log_json)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_at_once)
    try:
        _run(arguments)
    except StoreError as error:
        sys.stderr.write(f"kvstored: {error}\n")
        return error.exit_code
    return 0


def _run(arguments: NodeArguments) -> None:
    source = FileMapSource(arguments.cluster_path)
    cluster_map = source.load()
    if arguments.node not in cluster_map.node_by_name:
        known = ", ".join(sorted(cluster_map.node_by_name))
        raise InvalidArgument("--node", given=arguments.node, expected=f"one of the map's: {known}")
    _raise_descriptor_limit()
    with ExitStack() as stack:
        targets = stack.enter_context(_open_targets(arguments, cluster_map))
        listener = stack.enter_context(_listen(arguments, cluster_map))
        clock, disk = SystemClock(), OsDisk()
        node = Node(
            name=arguments.node,
            cluster=cluster_map.cluster_id,
            epoch=cluster_map.epoch,
            targets=targets,
            disk=disk,
            clock=clock,
            pool=BufferPool(arguments.memory_bytes),
            sync=arguments.sync,
            policy=PolicyStore(_policy_folder(targets), disk),
            pid=os.getpid(),
            version=_version(),
            started_s=clock.monotonic_s(),
            follower=MapFollower(source, cluster_map, arguments.node, clock),
        )
        _serve(node, listener)


def _policy_folder(targets: Mapping[int, Target]) -> Path | None:
    """Where the policy lies: with the first target in the map."""
    return next((target.folder.path for target in targets.values()), None)


def _serve(node: Node, listener: socket.socket) -> None:
    server = Server(node, listener, ServerSettings())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.request_stop())
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    log.info("serving node=%s address=%s pid=%d", node.name, address, node.pid)
    _say_ready({"node": node.name, "address": address, "pid": node.pid})
    server.run()


def _say_ready(content: Mapping[str, object]) -> None:
    """Write the ready line. Whoever started the node may have gone away: it serves all the same."""
    try:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("nobody reads the ready line: %s", error.strerror or error)
        # The interpreter flushes stdout once more when it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def _open_targets(
    arguments: NodeArguments, cluster_map: ClusterMap
) -> Iterator[Mapping[int, Target]]:
    """The node's targets by their number in the map; closed, and so synced, at the end."""
    disk = OsDisk()
    targets: dict[int, Target] = {}
    try:
        for entry in cluster_map.targets_by_node[arguments.node]:
            targets[cluster_map.target_number_by_name[entry.name]] = open_target(
                entry.folder(arguments.cluster_path),
                TargetIdentity(cluster_map.cluster_id, entry.name),
                capacity_bytes=entry.size_bytes,
                settings=TargetSettings(
                    segment_bytes=arguments.segment_bytes,
                    hash_seed=int.from_bytes(os.urandom(8)),
                ),
                disk=disk,
                clock=SystemClock(),
                pid=os.getpid(),
            )
        yield targets
    finally:
        for target in targets.values():
            close_target(target, disk)
        log.info("targets closed node=%s", arguments.node)


def _listen(arguments: NodeArguments, cluster_map: ClusterMap) -> socket.socket:
    """The inherited socket, or a new one on the node's address."""
    if arguments.listen_fd is not None:
        return _adopt_listener(arguments.listen_fd)
    entry = cluster_map.node_by_name[arguments.node]
    family = socket.AF_INET6 if ":" in entry.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((entry.host, entry.port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise StoreError(f"cannot listen on {entry.address}: {error.strerror or error}") from error
    return listener


def _adopt_listener(descriptor: int) -> socket.socket:
    expected = "a listening TCP socket"
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise InvalidArgument(
            "--listen-fd", given=f"{descriptor}: {error.strerror}", expected=expected
        ) from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise InvalidArgument("--listen-fd", given=descriptor, expected=expected)
    listener.set_inheritable(False)
    return listener


def _raise_descriptor_limit() -> None:
    """Connections and segments each take a descriptor; the usual soft limit of 1,024 is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was not installed


def _stop_at_once(number: int, _frame: object) -> NoReturn:
    """Before it serves, a node has nothing to finish."""
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
