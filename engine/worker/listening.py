"""The address of a worker, taken before anything else is done: a model takes a while to load, and
that somebody has the address already should be said at once. Not for what is said there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.socket_file import SocketFile

from ..errors import InvalidRequest, reason_of
from .address import WorkerAddress

LISTEN_BACKLOG = 1024
LOST_HOST_S = 60
"""A TCP client from whose host nothing comes for so long is gone."""
PROBES = 4
UNSENT_BYTES = 16 << 10
"""That the system takes of a TCP connection's answers beyond what the client's host has room for: a
client that does not read is to be noticed here."""


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that clients can reach, which nobody answers yet."""

    listener: socket.socket
    note_serving: Callable[[], None]
    """To be called once it serves."""


@contextmanager
def listen(address: WorkerAddress) -> Iterator[Listening]:
    """A listening socket; a Unix socket is of this user only, and locked.

    Raises InvalidRequest, InvalidArgument, StoreError for an address that cannot be had.
    """
    if address.path is not None:
        with SocketFile(address.path, os.getpid(), option="--listen", noun="engine") as file:
            yield Listening(file.listener, file.keep_lock)
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    place = (address.host, address.port)
    try:
        made = socket.create_server(place, family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise InvalidRequest(
            "--listen",
            given=f"{address}: {reason_of(error)}",
            expected="an address of this host, and a port that nobody listens on",
        ) from error
    with made as listener:
        listener.setblocking(False)
        _notice_lost_hosts(listener)
        # Inherited by its connections too.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        yield Listening(listener, lambda: None)


def _notice_lost_hosts(listener: socket.socket) -> None:
    """Its connections inherit this: a client whose host has vanished says nothing, and would have
    its whole answer computed."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, LOST_HOST_S // PROBES),
        (socket.TCP_KEEPINTVL, LOST_HOST_S // PROBES),
        (socket.TCP_KEEPCNT, PROBES - 1),
        (socket.TCP_USER_TIMEOUT, LOST_HOST_S * 1000),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
