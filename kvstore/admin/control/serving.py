"""Serving the control API within an event loop that has other work.

Nothing of FastAPI is loaded until somebody connects: the listening socket alone waits for that. Of
twelve workers on one small machine most are never asked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket

from ...errors import InvalidArgument, StoreError
from .handle import WorkerHandle

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 64
STOP_DEADLINE_S = 3.0


class ControlAddressError(StoreError):
    """The control API cannot be served on its address."""


def check_control_address(address: str, *, is_remote_allowed: bool) -> tuple[str, int]:
    """Host and port of "host:port". Raises InvalidArgument if others could reach it unasked.

    The API speaks plain HTTP: whoever can listen on the way sees the token.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise InvalidArgument("control address", given=repr(address), expected='"host:port"')
    if not is_remote_allowed and not _is_loopback(host):
        raise InvalidArgument(
            "control address",
            given=f"{address}, which other machines can reach",
            expected="127.0.0.1, [::1] or localhost; --control-remote allows others",
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_for_control(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ControlAddressError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ControlAddressError(
            f"control: cannot listen on {host}:{port}: {error.strerror or error}"
        ) from error
    return listener


def adopt_control_listener(descriptor: int) -> socket.socket:
    """A listening socket that was inherited. Raises InvalidArgument for anything else."""
    expected = "the number of an inherited listening TCP socket"
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        given = f"{descriptor}: {error.strerror}"
        raise InvalidArgument("--control-fd", given=given, expected=expected) from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6)
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.close()
        raise InvalidArgument("--control-fd", given=descriptor, expected=expected)
    listener.set_inheritable(False)
    return listener


async def serve_control(listener: socket.socket, handle: WorkerHandle, token: str) -> None:
    """Serve the API on `listener` until cancelled; requests in progress get STOP_DEADLINE_S then.

    The listener is closed at the end.
    """
    with listener:
        listener.setblocking(False)
        await _wait_for_peer(listener)
        from .http_server import start_server

        log.info("control API: loading for the first request")
        await start_server(listener, handle, token, stop_deadline_s=STOP_DEADLINE_S)


async def _wait_for_peer(listener: socket.socket) -> None:
    """Until somebody has connected; the connection is left in the queue."""
    loop = asyncio.get_running_loop()
    is_asked: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not is_asked.done():
            is_asked.set_result(None)

    loop.add_reader(listener, wake)
    try:
        await is_asked
    finally:
        loop.remove_reader(listener)
