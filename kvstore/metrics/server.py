"""Serves /metrics of an agent or an engine, in threads beside its own: small, bounded, read only.

Whoever reaches the address can read the figures. They hold no tokens, keys or names of tenants; an
address that only the network of operators reaches is right all the same.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Self, TypeAlias

from ..errors import InvalidArgument, StoreError, shown
from .exposition import CONTENT_TYPE, render_readings
from .readings import cut_label
from .status_table import StatusMetric, read_all

log = logging.getLogger(__name__)

REQUESTS_AT_ONCE_MAX = 8
"""More than so many connections are closed unread."""
REQUEST_DEADLINE_S = 10.0
"""From the connection to the end of the answer."""
LISTEN_BACKLOG = 16
STOP_POLL_S = 0.1
ACCEPT_RETRY_S = 0.1
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PORT_MAX = 65535

Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]
"""What the standard library's servers call a connection, of TCP and of UDP."""


StatusReader: TypeAlias = Callable[[], dict[str, Any]]
"""Gives the status document of the process, from any thread; raises TimeoutError if the process
does not come to it in time."""


@dataclass(frozen=True, slots=True)
class MetricTable:
    """What is served of a kind of process."""

    who: str
    """The kind: name of the first label of all metrics."""
    name_field: str
    """Where the document has the value of that label."""
    metrics: Sequence[StatusMetric]

    def render(self, status: Mapping[str, Any]) -> bytes:
        """The metrics of a process, from its status document."""
        name = cut_label(status.get(self.name_field, ""))
        return render_readings((self.who, name), read_all(self.metrics, status))


class MetricsServer:
    """A listening socket, and what answers on it while `serve` is entered."""

    def __init__(self, listener: socket.socket, table: MetricTable) -> None:
        self._listener = listener
        self._table = table
        self.address: tuple[str, int] = listener.getsockname()[:2]
        """Host and port, as the system says them."""

    @classmethod
    def listen(cls, option: str, address: str, table: MetricTable) -> MetricsServer:
        """Listen on "host:port", port 0: any. `option` names the address in a message.

        Raises InvalidArgument for what is no address, StoreError if the system refuses.
        """
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
            raise InvalidArgument(option, given=shown(address), expected='"host:port"')
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:
            listener.close()
            raise StoreError(
                f"{option}: cannot listen on {address}: {error.strerror or error}"
            ) from error
        return cls(listener, table)

    @contextmanager
    def serve(self, read_status: StatusReader) -> Iterator[None]:
        """Answer requests from what `read_status` gives, until left. Returns at once."""
        server = _Server(self._listener, self._table, read_status)
        thread = threading.Thread(target=server.serve_forever, args=(STOP_POLL_S,), daemon=True)
        thread.start()
        log.info("metrics: http://%s:%d/metrics", *self.address)
        try:
            yield
        finally:
            server.shutdown()
            thread.join()

    def close(self) -> None:
        """Listen no longer. May be called again."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingMixIn, HTTPServer):
    """Threads of a bounded number, each with a deadline; on a listener that it is given."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listener: socket.socket,
        table: MetricTable,
        read_status: StatusReader,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.table = table
        self._sleep = sleep
        self.read_status = read_status
        self._free = threading.BoundedSemaphore(REQUESTS_AT_ONCE_MAX)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                # Who connects stays in line, and would wake us again at once and for ever.
                self._sleep(ACCEPT_RETRY_S)
            raise

    def process_request(self, request: Request, client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # There is no thread, which would have done it.
            self._free.release()
            raise

    def process_request_thread(self, request: Request, client_address: object) -> None:
        # A peer that sends or reads a byte now and then never runs into a limit on one call.
        alarm = threading.Timer(REQUEST_DEADLINE_S, _cut, [request])
        alarm.daemon = True
        try:
            alarm.start()
            super().process_request_thread(request, client_address)
        finally:
            alarm.cancel()
            self._free.release()

    def handle_error(self, request: Request, client_address: object) -> None:
        """A peer that went away, or was cut off, is no news; a mistake of ours is."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("metrics: a request was not answered", exc_info=error)


def _cut(connection: Request) -> None:
    assert isinstance(connection, socket.socket)  # of a TCP server
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics and GET /healthz, one request a connection."""

    server: _Server
    timeout = REQUEST_DEADLINE_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/metrics", "/healthz"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"/metrics is what there is\n")
            return
        try:
            # Also for /healthz: this thread lives on beside an event loop that hangs.
            status = self.server.read_status()
        except TimeoutError:
            said = f"the {self.server.table.who} is busy\n".encode()
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", said)
            return
        if path == "/healthz":
            self._answer(HTTPStatus.OK, "application/json", b'{"is_serving":true}')
        else:
            self._answer(HTTPStatus.OK, CONTENT_TYPE, self.server.table.render(status))

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Nothing about what we are made of."""
        return "cachalot"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: there is one every few seconds."""
