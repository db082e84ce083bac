"""Keeps a client connected to the agent of its host, and connects again when the agent was away.

One life of a connection is an `AgentConnection`: the session, the arena that came with it, the
namespaces and runs that are valid in it. All of them end with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..agent_messages import (
    PROTOCOL_VERSION,
    Hello,
    NamespaceOpened,
    OpenNamespace,
    SectionRow,
    Welcome,
)
from ..arena.region import ArenaRegion
from ..errors import AgentError, AgentRefused, AgentUnreachable, InvalidArgument, StoreError
from ..key import Namespace
from ..layout import BlockLayout
from .agent_arguments import check_is_run, check_run
from .agent_session import AgentSession, Received
from .arena_run import ArenaRun

SOCKET_PATH_BYTES_MAX = 107
ROOT_UID = 0
_CREDENTIALS = struct.Struct("iII")
"""struct ucred of unix(7): pid, uid, gid."""
CONNECT_DEADLINE_S = 2.0
OPEN_DEADLINE_S = 2.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0


@dataclass(slots=True, eq=False)
class AgentConnection:
    """What is valid as long as one session lasts."""

    session: AgentSession
    welcome: Welcome
    region: ArenaRegion | None
    """None for an agent without an arena."""
    runs: dict[int, weakref.ref[ArenaRun]] = field(default_factory=dict)
    """Those that this client has, by number. It is the caller who holds them: one that nobody holds
    any more is given back."""
    namespaces: dict[tuple[bytes, bytes], asyncio.Future[Received]] = field(default_factory=dict)

    async def open_namespace(
        self, namespace: Namespace, window: BlockLayout | None, *, deadline_s: float
    ) -> int:
        """The session's number of a namespace; asked for once. Raises AgentError, also if the
        answer is not there within `deadline_s` and the margin that every request has."""
        key = (namespace.namespace_id, window.fingerprint if window is not None else b"")
        opening = self.namespaces.get(key)
        if opening is None:
            request = OpenNamespace(
                model=namespace.model,
                weights=namespace.weights,
                tokenizer=namespace.tokenizer,
                sections=_section_rows(namespace.layout),
                lora=namespace.lora,
                tenant=namespace.tenant,
                window_sections=None if window is None else _section_rows(window),
            )
            opening = self.session.send(request, OPEN_DEADLINE_S)
            self.namespaces[key] = opening
        received = await self.session.share(opening, deadline_s)
        if not isinstance(received.answer, NamespaceOpened):
            self.namespaces.pop(key, None)
        return self.session.expect(received, NamespaceOpened).namespace

    def check_idle_run(self, run: ArenaRun, layout: BlockLayout, blocks: int) -> None:
        """`check_own_run` of one that has room for `blocks` blocks of the layout. Raises
        InvalidArgument, or AgentError if the run is lost."""
        check_run(run, layout, blocks)
        self.check_own_run(run)

    def check_own_run(self, run: ArenaRun) -> None:
        """Nothing is under way with the run, and it was leased here: its number means another run
        to another session. Raises as `check_idle_run`."""
        check_is_run(run)
        run.check_idle()
        held = self.runs.get(run.number)
        if held is None or held() is not run:
            raise InvalidArgument(
                "run", given="a run of another client", expected="one that this client leased"
            )

    def need_region(self) -> ArenaRegion:
        """Raises AgentRefused if the agent has no arena."""
        if self.region is None:
            roles = ", ".join(self.welcome.roles) or "none"
            raise AgentRefused(self.session.path, f"it has no arena; its roles: {roles}")
        return self.region

    def lose(self, error: AgentError) -> None:
        """The session has ended."""
        runs, self.runs = self.runs, {}
        for held in runs.values():
            if (run := held()) is not None:
                run.lose(error)
        if self.region is not None:
            self.region.close()


class AgentLink:
    """The connection of one client, as long as there is one. Belongs to its event loop."""

    def __init__(
        self,
        path: str | Path,
        *,
        name: str,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self.path = Path(path)
        self._name = name
        self._loop = loop
        self._clock = clock
        self._connection: AgentConnection | None = None
        self._problem: AgentError = AgentUnreachable(self.path, "not connected yet")
        self._has_tried = asyncio.Event()
        self._ended = asyncio.Event()
        """The session that there was is gone, or the link is closed."""
        self._is_closed = False
        self.task = loop.create_task(self._keep_connected(), name=f"agent {self.path}")
        self.task.add_done_callback(self._on_task_end)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> AgentConnection:
        """The one that there is. Raises AgentError: why there is none."""
        if self._connection is None:
            raise type(self._problem)(self._problem.socket_path, self._problem.detail)
        return self._connection

    async def wait_for_first_attempt(self) -> None:
        """Return when there is a connection, or it has been tried once to make one."""
        await self._has_tried.wait()

    def close(self) -> None:
        """End the connection for good. May be called again."""
        self._is_closed = True
        self._ended.set()
        self.task.cancel()
        if self._connection is not None:
            self._connection.session.close(AgentUnreachable(self.path, "the client was closed"))

    async def _keep_connected(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._is_closed:
            started_at_s = self._clock()
            self._ended.clear()
            try:
                self._connection = await self._connect()
            except AgentError as error:
                self._problem = error
            finally:
                self._has_tried.set()
            if self._connection is not None:
                await self._ended.wait()
                if self._clock() - started_at_s > BACKOFF_MAX_S:
                    backoff_s = BACKOFF_FIRST_S
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _pause(self, duration_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                while not self._is_closed:
                    self._ended.clear()
                    await self._ended.wait()

    async def _connect(self) -> AgentConnection:
        """Raises AgentError, and leaves nothing open then."""
        connected = connect_socket(self.path)
        session = AgentSession(connected, self.path, self._loop, self._on_session_end)
        try:
            received = await self._greet(session, connected)
            welcome = session.expect(received, Welcome)
            region = None if received.descriptor is None else _map_arena(received.descriptor)
            try:
                self._check_greeting(session, welcome)
            except AgentError:
                if region is not None:
                    region.close()
                raise
        except BaseException as error:
            failure = error if isinstance(error, AgentError) else None
            session.close(failure or AgentUnreachable(self.path, "the greeting was broken off"))
            if isinstance(error, StoreError) and failure is None:
                raise AgentUnreachable(self.path, str(error)) from error
            raise
        return AgentConnection(session, welcome, region)

    async def _greet(self, session: AgentSession, connected: socket.socket) -> Received:
        """The agent's word of welcome, or a refusal. Raises AgentUnreachable."""
        agent_uid = read_listener_uid(connected)
        hello = Hello(version=PROTOCOL_VERSION, client=self._name)
        try:
            return await session.receive(hello, CONNECT_DEADLINE_S)
        except AgentUnreachable as error:
            if session.has_hung_up:
                detail = explain_hang_up(agent_uid, os.geteuid())
                raise AgentUnreachable(self.path, detail) from error
            raise

    def _check_greeting(self, session: AgentSession, welcome: Welcome) -> None:
        """Raises AgentError if this is no agent to work with, or gone by now."""
        if welcome.version != PROTOCOL_VERSION:
            raise AgentRefused(
                self.path, f"speaks version {welcome.version}, expected {PROTOCOL_VERSION}"
            )
        if session.failure is not None:
            raise AgentUnreachable(self.path, session.failure.detail)

    def _on_session_end(self, error: AgentError) -> None:
        self._problem = error
        self._ended.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lose(error)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Ends when the link is closed; by any other error than AgentError it is a fault of ours,
        and says so at once."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            context = {"message": f"the link to agent {self.path} failed", "exception": fault}
            self._loop.call_exception_handler(context)


def check_socket_path(path: str | Path) -> Path:
    """A path that a Unix socket can have. Raises InvalidArgument."""
    length = len(os.fsencode(path))
    if not 0 < length <= SOCKET_PATH_BYTES_MAX:
        raise InvalidArgument(
            "socket path",
            given=f"{str(path)!r}, {length} bytes",
            expected=f"1 to {SOCKET_PATH_BYTES_MAX} bytes, the most that a Unix socket can have",
        )
    return Path(path)


def connect_socket(path: Path) -> socket.socket:
    """A connected, non-blocking Unix socket. Raises AgentUnreachable, also if this process has no
    descriptor left for one: that passes."""
    try:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise AgentUnreachable(path, error.strerror or str(error)) from error
    try:
        # Done at once or not at all. (The loop's sock_connect takes EAGAIN, which here means that
        # too many wait in line, for a connection that is being made.)
        connected.connect(os.fspath(path))
    except BlockingIOError as error:
        connected.close()
        raise AgentUnreachable(path, "too many wait to be connected") from error
    except OSError as error:
        connected.close()
        raise AgentUnreachable(path, _explain_failure(path, error)) from error
    return connected


def _explain_failure(path: Path, error: OSError) -> str:
    """Why nothing could be connected to, and what may help."""
    if isinstance(error, FileNotFoundError):
        return "there is no such socket; is the agent running?"
    if isinstance(error, PermissionError):
        return f"{error.strerror}; an agent takes only processes of its own user, and of root"
    if isinstance(error, ConnectionRefusedError):
        # The system says so of files of any kind.
        try:
            is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
        except OSError:
            is_socket = True  # gone by now: there was one
        if is_socket:
            return f"{error.strerror}: nobody listens there; is the agent running?"
        return "this is no socket, but a file or folder of another kind"
    return error.strerror or str(error)


def read_listener_uid(connected: socket.socket) -> int:
    """The user who listens at the other end, as the system noted it (unix(7))."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(found)[1]
    return uid


def explain_hang_up(agent_uid: int, own_uid: int) -> str:
    """Why an agent closes a connection before it has answered anything."""
    detail = "it closed the connection before it answered"
    if own_uid not in (agent_uid, ROOT_UID):
        return (
            f"{detail}: it runs as user {agent_uid}, and takes only processes of its own user, "
            f"and of root; this one is of user {own_uid}"
        )
    return f"{detail}: it ends, or has as many sessions as it takes; its log says which"


def _map_arena(descriptor: int) -> ArenaRegion:
    try:
        return ArenaRegion(descriptor)
    except (OSError, ValueError) as error:
        raise StoreError(f"the arena cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _section_rows(layout: BlockLayout) -> list[SectionRow]:
    return [(section.name, section.bytes) for section in layout.sections]
