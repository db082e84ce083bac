"""Moves bytes between a non-blocking socket and memory or files: one thing at a time.

Knows no frames and no time. The end of the connection, whoever causes it, is PeerGone; a file that
cannot be read is FileUnreadable.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Sequence

from .disk import Disk
from .effects import FileUnreadable
from .io_cursor import VIEWS_PER_CALL_MAX, IoCursor

FILE_BYTES_PER_CALL_MAX = 1 << 20
"""A call that sends from a file holds up the loop for as long as the kernel copies."""
_NETWORK_ERRORS = frozenset(
    {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH}
)


class PeerGone(Exception):
    """The socket failed, or the peer closed it."""


class SocketTransfer:
    """What is being sent, received or thrown away now. `moved_bytes` only grows; `is_active` says
    whether something begun is not complete."""

    __slots__ = (
        "_cursor",
        "_disk",
        "_drain_bytes",
        "_files",
        "_scratch",
        "_socket",
        "is_active",
        "is_sending",
        "moved_bytes",
    )

    def __init__(self, sock: socket.socket, disk: Disk, scratch: memoryview) -> None:
        self._socket = sock
        self._disk = disk
        self._scratch = scratch
        self._files: deque[tuple[int, int, int]] = deque()
        self._cursor: IoCursor | None = None
        self._drain_bytes = 0
        self.is_active = False
        self.is_sending = False
        self.moved_bytes = 0

    def begin_send(self, views: Sequence[memoryview]) -> None:
        """Send all of `views`, which must not change until it is done: what the socket takes now,
        and the rest step by step."""
        assert not self.is_active
        self.is_sending = True
        sent = self._send(views[:VIEWS_PER_CALL_MAX])
        if sent < sum(map(len, views)):
            self._cursor = IoCursor(views)
            self._cursor.advance(sent)
        self._note_activity()

    def begin_send_file(self, head: memoryview, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Send `head` and then pieces of files, likewise: (descriptor, offset, size in bytes)."""
        self._files.extend(pieces)
        self.begin_send((head,))
        if self._cursor is None:
            self._send_file()

    def _note_activity(self) -> None:
        self.is_active = self._cursor is not None or self._drain_bytes > 0 or bool(self._files)

    def begin_receive(self, views: Sequence[memoryview], arrived: memoryview) -> int:
        """Fill `views`, first with what has arrived already; returns how much of that was used."""
        cursor = IoCursor(views)
        used = cursor.fill(arrived)
        assert not self.is_active
        self.is_sending = False
        self._cursor = cursor if cursor.left_bytes else None
        self._note_activity()
        return used

    def begin_drain(self, size_bytes: int, arrived: memoryview) -> int:
        """Throw bytes away, first of what has arrived; returns how much of that was used."""
        used = min(len(arrived), size_bytes)
        self._drain_bytes = size_bytes - used
        self.is_sending = False
        self._note_activity()
        return used

    def step(self) -> bool:
        """One system call for what was begun; False if the socket is not ready for it."""
        if self._cursor is None:
            if self._files:
                return self._send_file()
            count = self.receive((self._scratch[: self._drain_bytes],))
            self._drain_bytes -= count
            self._note_activity()
            return count > 0
        window = self._cursor.window()
        count = self._send(window) if self.is_sending else self.receive(window)
        self._cursor.advance(count)
        if not self._cursor.left_bytes:
            self._cursor = None
            self._note_activity()
        return count > 0

    def receive(self, into: Sequence[memoryview]) -> int:
        """One receive; 0 if there is nothing now."""
        try:
            if len(into) == 1:
                count = self._socket.recv_into(into[0])
            else:
                count = self._socket.recvmsg_into(into)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGone(error.strerror or str(error)) from error
        if count == 0:
            raise PeerGone("closed by the peer")
        self.moved_bytes += count
        return count

    def _send(self, views: Sequence[memoryview]) -> int:
        flags = socket.MSG_MORE if self._files else 0
        try:
            count = self._socket.sendmsg(views, (), flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGone(error.strerror or str(error)) from error
        self.moved_bytes += count
        return count

    def _send_file(self) -> bool:
        descriptor, offset, size_bytes = self._files[0]
        asked_bytes = min(size_bytes, FILE_BYTES_PER_CALL_MAX)
        try:
            count = self._disk.send_file(self._socket.fileno(), descriptor, offset, asked_bytes)
        except BlockingIOError:
            return False
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError) or error.errno in _NETWORK_ERRORS:
                raise PeerGone(error.strerror or str(error)) from error
            raise FileUnreadable(error, descriptor) from error
        if count < size_bytes:
            self._files[0] = (descriptor, offset + count, size_bytes - count)
        else:
            self._files.popleft()
            self._note_activity()
        self.moved_bytes += count
        return True
