"""The agent's socket: who may connect, and the sessions of those who did."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from dataclasses import dataclass
from typing import Any

from .copy_turns import CopyTurns
from .session import Handler, Peer, Session, SessionContext
from .session_bounds import ByteBudget, SessionBounds

log = logging.getLogger(__name__)

SCRATCH_BYTES = 256 << 10
ACCEPTS_AT_ONCE_MAX = 64
ACCEPT_AGAIN_S = 0.25
ROOT_UID = 0
_CREDENTIALS = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid."""


@dataclass(slots=True)
class SessionCounters:
    """Since the agent was started."""

    accepted: int = 0
    refused: int = 0
    """Closed at once: strangers, and those beyond the bound."""


class UnixServer:
    """Accepts sessions on a listening Unix socket, from processes of `uid` and of root.

    Belongs to the event loop; requests run in `group`.
    """

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        *,
        group: asyncio.TaskGroup,
        loop: asyncio.AbstractEventLoop,
        uid: int,
        bounds: SessionBounds | None = None,
    ) -> None:
        self._listener = listener
        self._uid = uid
        self._loop = loop
        self._bounds = bounds or SessionBounds()
        self._sessions: dict[int, Session] = {}
        self._last_number = 0
        self._counters = SessionCounters()
        self._accept_timer: asyncio.TimerHandle | None = None
        self._is_accepting = False
        self._context = SessionContext(
            handler=handler,
            group=group,
            loop=loop,
            bounds=self._bounds,
            total=ByteBudget(self._bounds.total_request_bytes_max),
            total_unsent=ByteBudget(self._bounds.total_unsent_bytes_max),
            make_room=self._make_room,
            turns=CopyTurns(loop, self._bounds.copied_per_turn_bytes_max),
            scratch=memoryview(bytearray(SCRATCH_BYTES)),
            on_closed=self._forget,
        )

    def start(self) -> None:
        """Accept from now on."""
        self._is_accepting = True
        self._loop.add_reader(self._listener, self._accept)

    def stop_accepting(self) -> None:
        """Nobody is accepted any more; sessions go on. May be called again."""
        if not self._is_accepting:
            return
        self._is_accepting = False
        self._loop.remove_reader(self._listener)
        if self._accept_timer is not None:
            self._accept_timer.cancel()

    async def send_last_answers(self, deadline_s: float) -> None:
        """Waits for the work that a stop waits for; its answers have been sent then."""
        tasks = [
            task for session in self._sessions.values() for task in session.tasks_awaited_at_stop()
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)

    def close_sessions(self, reason: str) -> None:
        """Ends all sessions."""
        for session in list(self._sessions.values()):
            session.close(reason)

    def describe(self) -> dict[str, Any]:
        """Sessions now, and counters, for the status document."""
        return {
            "open": len(self._sessions),
            "accepted": self._counters.accepted,
            "refused": self._counters.refused,
            "requests": sum(session.requests for session in self._sessions.values()),
            "request_bytes": self._context.total.taken_bytes,
            "unsent_bytes": self._context.total_unsent.taken_bytes,
        }

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE_MAX):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors: those who wait are accepted when there are some again.
                log.error("cannot accept: %s", error.strerror or error)
                self._loop.remove_reader(self._listener)
                self._accept_timer = self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
                return
            self._welcome(sock)

    def _accept_again(self) -> None:
        self._accept_timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _welcome(self, sock: socket.socket) -> None:
        peer = read_peer(sock)
        if peer.uid not in (self._uid, ROOT_UID):
            self._refuse(sock, peer, "another user's process")
            return
        if len(self._sessions) >= self._bounds.sessions_max:
            self._refuse(sock, peer, f"{len(self._sessions)} sessions are open")
            return
        self._counters.accepted += 1
        self._last_number += 1
        sock.setblocking(False)
        session = Session(sock, self._last_number, peer, self._context)
        self._sessions[session.number] = session

    def _refuse(self, sock: socket.socket, peer: Peer, reason: str) -> None:
        self._counters.refused += 1
        log.warning("refused pid=%d uid=%d: %s", peer.pid, peer.uid, reason)
        sock.close()

    def _make_room(self, asking: Session, length_bytes: int) -> None:
        """All sessions together leave too much unread: the one that leaves most is ended."""

        def unread_bytes(session: Session) -> int:
            return session.unsent_bytes + (length_bytes if session is asking else 0)

        most = max(self._sessions.values(), key=unread_bytes)
        most.close("of all sessions it leaves most unread, and there is too much", logging.WARNING)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.number]


def read_peer(sock: socket.socket) -> Peer:
    """Who connected, as the kernel knows it."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return Peer(pid, uid)
