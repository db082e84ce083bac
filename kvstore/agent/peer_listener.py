"""The TCP socket on which other agents reach this one."""

from __future__ import annotations

import socket

from ..cluster.address import host_of, port_of
from ..cluster.entities import ClusterMap
from ..errors import InvalidArgument, StoreError
from .options import LISTEN_DEFAULT, AgentOptions

LISTEN_BACKLOG = 1024


def listen_for_peers(options: AgentOptions, cluster_map: ClusterMap) -> socket.socket:
    """The inherited socket, or one on the entrypoint's address, or one on `--listen`.

    Raises InvalidArgument for an entrypoint that is not in the map, or a descriptor that is no
    listening TCP socket; StoreError if the address cannot be listened on.
    """
    address = options.listen or LISTEN_DEFAULT
    if options.entrypoint is not None:
        known = cluster_map.entrypoint_by_name
        if options.entrypoint not in known:
            listed = ", ".join(sorted(known)) or "it has none"
            raise InvalidArgument(
                "--entrypoint", given=options.entrypoint, expected=f"one of the map's: {listed}"
            )
        address = known[options.entrypoint].address
    if options.listen_fd is not None:
        return _adopt(options.listen_fd)
    host = host_of(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port_of(address)))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise StoreError(f"cannot listen on {address}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """What other agents are told: the IP address and port on which the system listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _adopt(descriptor: int) -> socket.socket:
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
    listener.setblocking(False)
    return listener
