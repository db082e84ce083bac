"""Moves bytes between a non-blocking socket and memory: one thing at a time, as far as it goes.

Knows no frames and no time. The end of the connection, whoever causes it, is PeerGone.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from .io_cursor import IoCursor


class PeerGone(Exception):
    """The socket failed, or the peer closed it."""


class SocketTransfer:
    """What is being sent, received or thrown away now. `moved_bytes` only grows."""

    __slots__ = ("_cursor", "_drain_bytes", "_scratch", "_socket", "is_sending", "moved_bytes")

    def __init__(self, sock: socket.socket, scratch: memoryview) -> None:
        self._socket = sock
        self._scratch = scratch
        self._cursor: IoCursor | None = None
        self._drain_bytes = 0
        self.is_sending = False
        self.moved_bytes = 0

    @property
    def is_active(self) -> bool:
        """Whether something begun is not complete."""
        return self._cursor is not None or self._drain_bytes > 0

    def begin_send(self, views: Sequence[memoryview]) -> None:
        """Send all of `views`, which must not change until it is done."""
        self._begin(IoCursor(views), is_sending=True)

    def begin_receive(self, views: Sequence[memoryview], arrived: memoryview) -> int:
        """Fill `views`, first with what has arrived already; returns how much of that was used."""
        cursor = IoCursor(views)
        used = cursor.fill(arrived)
        self._begin(cursor, is_sending=False)
        return used

    def begin_drain(self, size_bytes: int, arrived: memoryview) -> int:
        """Throw bytes away, first of what has arrived; returns how much of that was used."""
        used = min(len(arrived), size_bytes)
        self._drain_bytes = size_bytes - used
        self.is_sending = False
        return used

    def step(self) -> bool:
        """One system call for what was begun; False if the socket is not ready for it."""
        if self._cursor is None:
            count = self.receive([self._scratch[: self._drain_bytes]])
            self._drain_bytes -= count
            return count > 0
        window = self._cursor.window()
        count = self._send(window) if self.is_sending else self.receive(window)
        self._cursor.advance(count)
        if not self._cursor.left_bytes:
            self._cursor = None
        return count > 0

    def receive(self, into: list[memoryview]) -> int:
        """One receive; 0 if there is nothing now."""
        try:
            count = self._socket.recvmsg_into(into)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGone(error.strerror or str(error)) from error
        if count == 0:
            raise PeerGone("closed by the peer")
        self.moved_bytes += count
        return count

    def _send(self, views: list[memoryview]) -> int:
        try:
            count = self._socket.sendmsg(views)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGone(error.strerror or str(error)) from error
        self.moved_bytes += count
        return count

    def _begin(self, cursor: IoCursor, *, is_sending: bool) -> None:
        assert not self.is_active
        self._cursor = cursor if cursor.left_bytes else None
        self.is_sending = is_sending
