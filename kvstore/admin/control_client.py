"""A small HTTP client of the control API: what commands ask of the `gc_worker` beside each node.

The standard library's client is enough: one request a connection, JSON in and out, a deadline for
the whole of it. Not for the data plane, and not for other people's HTTP servers.
"""

from __future__ import annotations

import errno
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from ..cluster.entities import ClusterMap
from ..errors import InvalidArgument, NodeError, StoreError, shown
from .exit_codes import ExitCode

ANSWER_BYTES_MAX = 16 << 20
CHUNK_BYTES = 256 << 10
CONNECT_DEADLINE_S = 2.0
ASKED_AT_ONCE_MAX = 32
PROBLEMS_NAMED_MAX = 2
REASON_CHARACTERS_MAX = 200

Answer = dict[str, Any]
ResultT = TypeVar("ResultT")

_HOST = re.compile(r"[^\s\x00-\x1f\x7f/@]{1,255}")


class ControlUnreachable(NodeError):
    """Nobody answers at the address of a node's control API, or not in time, or not in JSON.

    `is_sent`: the request may have reached it, so that what it asked for may have been done.
    """

    def __init__(self, node: str, address: str, detail: str, *, is_sent: bool) -> None:
        super().__init__(node, f"control API at {address}: {detail}")
        self.address = address
        self.reason = detail
        self.is_sent = is_sent


class ControlRefused(StoreError):
    """The control API answered that it will not do this; `status` is the HTTP status."""

    def __init__(self, node: str, status: int, answer: Answer) -> None:
        super().__init__(_describe_refusal(node, status, answer))
        self.node = node
        self.status = status
        self.answer = answer
        self.exit_code = _exit_code_of(status)

    @property
    def is_of_token(self) -> bool:
        """It refused the token, and not what was asked."""
        return self.status in (401, 403)


class NoWorker(StoreError):
    """No `gc_worker` can be asked; the message says how to start one."""

    exit_code = ExitCode.NODE


def _exit_code_of(status: int) -> int:
    if status in (400, 401, 403, 404, 413, 422):
        return ExitCode.WRONG_ARGUMENT
    return ExitCode.NODE if status in (502, 503, 504) else ExitCode.FAILED


def _describe_refusal(node: str, status: int, answer: Answer) -> str:
    if status in (401, 403):
        return f"node {node}: the control API refuses the token; give --token-file of this cluster"
    error = str(answer.get("error") or f"HTTP status {status}")
    given, expected = answer.get("given"), answer.get("expected")
    if status == 409:
        return error
    if expected is None:
        # A worker that speaks of a node, perhaps of its own, has named it.
        return error if error.startswith("node ") else f"node {node}: {error}"
    return f"{error}: given {given}, expected {expected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEndpoint:
    """The control API of one node: `address` is "host:port", an IPv6 host in brackets."""

    node: str
    address: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def parse_control_url(text: str) -> ControlEndpoint:
    """The endpoint that `--control` names: `host:port`, perhaps with `http://` before it."""
    url = text if "//" in text else f"http://{text}"
    expected = "HOST:PORT of an HTTP server, as in the cluster map's `control`"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        # What the resolver would raise for a name that cannot be one.
        host.encode("idna")
    except ValueError as error:
        raise InvalidArgument("--control", given=shown(text), expected=expected) from error
    is_bare = parts.path in ("", "/") and not parts.query and parts.username is None
    if parts.scheme != "http" or not _HOST.fullmatch(host) or not port or not is_bare:
        raise InvalidArgument("--control", given=shown(text), expected=expected)
    host = f"[{host}]" if ":" in host else host
    return ControlEndpoint(node=f"{host}:{port}", address=f"{host}:{port}")


def find_endpoints(cluster_map: ClusterMap) -> list[ControlEndpoint]:
    """The control APIs that the map names, in its order."""
    return [
        ControlEndpoint(node=node.name, address=node.control)
        for node in cluster_map.nodes
        if node.control
    ]


class ControlPlane:
    """The control APIs of a cluster, asked one or all."""

    def __init__(
        self,
        endpoints: Sequence[ControlEndpoint],
        token: str,
    ) -> None:
        self.endpoints = list(endpoints)
        self._token = token
        self._links: set[socket.socket] = set()
        """Connections on which an answer is awaited."""
        self._is_aborted = False

    def ask(
        self,
        endpoint: ControlEndpoint,
        method: str,
        path: str,
        *,
        body: object = None,
        deadline_s: float,
    ) -> Answer:
        """One node's answer. Raises ControlUnreachable, ControlRefused."""
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Connection": "close"}
        if content:
            headers["Content-Type"] = "application/json"
        is_sent = False
        connection: http.client.HTTPConnection | None = None
        try:
            if self._is_aborted:
                raise ConnectionAbortedError(errno.ECONNABORTED, "given up")
            connection = http.client.HTTPConnection(
                endpoint.host, endpoint.port, timeout=min(CONNECT_DEADLINE_S, deadline_s)
            )
            connection.connect()
            with self._awaiting(connection.sock, deadline_s):
                is_sent = True
                connection.request(method, path, body=content or None, headers=headers)
                with connection.getresponse() as response:
                    said = _read_all(response)
        # UnicodeError: a host in the map that no resolver takes.
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            detail = "no answer in time" if isinstance(error, TimeoutError) else _reason(error)
            raise ControlUnreachable(
                endpoint.node, endpoint.address, detail, is_sent=is_sent
            ) from error
        finally:
            if connection is not None:
                connection.close()
        # The API redirects nobody, and whoever else does gets no token.
        is_refusal = not 200 <= response.status < 300
        answer = _parse_answer(endpoint, said, is_refusal=is_refusal)
        if is_refusal:
            raise ControlRefused(endpoint.node, response.status, answer)
        return answer

    @contextmanager
    def _awaiting(self, link: socket.socket, deadline_s: float) -> Iterator[None]:
        """While an answer is awaited on `link`; raises TimeoutError after `deadline_s`.

        An alarm ends the connection then: a time limit of the socket would begin anew with every
        byte of the head or the body.
        """
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _shut_down(link)

        alarm = threading.Timer(deadline_s, give_up)
        alarm.daemon = True
        link.settimeout(deadline_s)
        self._links.add(link)
        try:
            if self._is_aborted:
                raise ConnectionAbortedError(errno.ECONNABORTED, "given up")
            alarm.start()
            yield
        except (OSError, http.client.HTTPException) as error:
            if is_late.is_set():
                raise TimeoutError from error
            raise
        finally:
            alarm.cancel()
            self._links.discard(link)
        if is_late.is_set():
            raise TimeoutError

    def ask_any(self, method: str, path: str, *, body: object = None, deadline_s: float) -> Answer:
        """The answer of the first node that can be reached, in the map's order.

        A request that may have reached a node is not sent to a second one. Raises NoWorker,
        ControlUnreachable, ControlRefused.
        """
        problems = []
        for endpoint in self.endpoints:
            try:
                return self.ask(endpoint, method, path, body=body, deadline_s=deadline_s)
            except ControlUnreachable as error:
                if error.is_sent and method != "GET":
                    raise
                problems.append(str(error))
        raise no_worker(problems)

    def ask_each(
        self, method: str, path: str, *, body: object = None, deadline_s: float
    ) -> dict[str, Answer | StoreError]:
        """Every node's answer or error, by the node's name; all are asked at once."""

        def ask_one(endpoint: ControlEndpoint) -> Answer | StoreError:
            try:
                return self.ask(endpoint, method, path, body=body, deadline_s=deadline_s)
            except StoreError as error:
                return error

        answers = self.run_side_by_side([partial(ask_one, one) for one in self.endpoints])
        return {one.node: answer for one, answer in zip(self.endpoints, answers, strict=True)}

    def run_side_by_side(self, jobs: Sequence[Callable[[], ResultT]]) -> list[ResultT]:
        """What each of the jobs, which ask this control plane, returns; they run in threads.

        When this thread is interrupted, the answers that are awaited are given up at once.
        """
        if not jobs:
            return []
        pool = ThreadPoolExecutor(min(len(jobs), ASKED_AT_ONCE_MAX))
        try:
            return [begun.result() for begun in [pool.submit(job) for job in jobs]]
        except BaseException:
            self.abort()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def abort(self) -> None:
        """Let every request fail, those that are under way and those to come."""
        self._is_aborted = True
        for link in list(self._links):
            _shut_down(link)

    def endpoint_of(self, node: str) -> ControlEndpoint:
        """The control API of one node. Raises NoWorker if the map names none for it."""
        for endpoint in self.endpoints:
            if endpoint.node == node:
                return endpoint
        raise NoWorker(f"node {node}: the cluster map names no `control` address for it")


def no_worker(problems: Sequence[str]) -> NoWorker:
    """The error of a command that needs a worker and finds none."""
    found = "; ".join(problems[:PROBLEMS_NAMED_MAX]) or "the cluster map names no `control` address"
    hidden = len(problems) - PROBLEMS_NAMED_MAX
    found += f"; and {hidden} more" if hidden > 0 else ""
    return NoWorker(
        f"no gc_worker answers: {found}; `cachalot up --dir D` starts those of a local cluster,"
        " `systemctl start gc_worker@NODE` that of one node"
    )


def quote_part(text: str) -> str:
    """A text as one part of a path, whatever bytes a command line had for it."""
    return quote(text, safe="", errors="surrogateescape")


def _shut_down(link: socket.socket) -> None:
    # Its thread may have closed it just now.
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _read_all(response: http.client.HTTPResponse) -> bytes:
    """The whole body, if it is not too long."""
    parts: list[bytes] = []
    total_bytes = 0
    while part := response.read1(CHUNK_BYTES):
        total_bytes += len(part)
        if total_bytes > ANSWER_BYTES_MAX:
            raise http.client.HTTPException(f"more than {ANSWER_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # What the peer sent may be quoted in it.
    return " ".join(str(error).split())[:REASON_CHARACTERS_MAX] or type(error).__name__


def _parse_answer(endpoint: ControlEndpoint, said: bytes, *, is_refusal: bool) -> Answer:
    if not said:
        return {}
    try:
        answer = json.loads(said)
    except (ValueError, RecursionError) as error:
        if is_refusal:
            return {}
        raise ControlUnreachable(
            endpoint.node, endpoint.address, "its answer is not JSON", is_sent=True
        ) from error
    return answer if isinstance(answer, dict) else {"items": answer}
