"""What a session has to send and its client has not taken yet: bounded, descriptors beside."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .session_bounds import ByteBudget

HELD_BYTES = 512
"""What it takes to hold the rest of an answer, beside its bytes."""


@dataclass(slots=True, eq=False)
class _Unsent:
    """The rest of an answer. `descriptor` is ours. All its memory counts until it is gone: a
    client that leaves the last byte of each unread must not be let off with that byte."""

    view: memoryview
    held_bytes: int
    descriptor: int | None = None


class AnswerQueue:
    """Sends on a socket that must not block, and stays the caller's. Belongs to the event loop.

    `on_failure` is told why nothing can be sent any more, `on_sent` that nothing is left to send.
    Neither is called after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        bytes_max: int,
        descriptors_max: int,
        total: ByteBudget,
        make_room: Callable[[int], None],
        on_failure: Callable[[str], None],
        on_sent: Callable[[], None],
    ) -> None:
        """`total` is that of all sessions; `make_room` is told of bytes for which it has none left,
        and ends the session that holds most, which may be this one."""
        self._socket = sock
        self._loop = loop
        self._bytes_max = bytes_max
        self._descriptors_max = descriptors_max
        self._total = total
        self._make_room = make_room
        self._on_failure = on_failure
        self._on_sent = on_sent
        self._unsent: deque[_Unsent] = deque()
        self._unsent_descriptors = 0
        self.unsent_bytes = 0
        """Memory of what is not sent."""
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        return not self._unsent

    def send(self, data: bytes, descriptor: int | None) -> None:
        """Sends a message, now or later, and a copy of the descriptor with its first byte."""
        view = memoryview(data)
        try:
            if not self._unsent:
                sent = self._send_now(view, descriptor)
                view = view[sent:]
                if sent:
                    descriptor = None
            if not len(view):
                return
            held_bytes = len(data) + HELD_BYTES
            if not self._has_room(held_bytes, descriptor):
                self._on_failure("it does not read its answers")
                return
            while not self._total.try_take(held_bytes):
                self._make_room(held_bytes)
                if self._is_closed:
                    return
            self.unsent_bytes += held_bytes
            copy = None if descriptor is None else os.dup(descriptor)
        except OSError as error:
            self._on_failure(error.strerror or str(error))
            return
        self._unsent.append(_Unsent(view, held_bytes, copy))
        self._unsent_descriptors += copy is not None
        if len(self._unsent) == 1:
            self._loop.add_writer(self._socket, self._send_waiting)

    def close(self) -> None:
        """Sends nothing more. Before the socket is closed."""
        self._is_closed = True
        self._loop.remove_writer(self._socket)
        for rest in self._unsent:
            if rest.descriptor is not None:
                os.close(rest.descriptor)
        self._unsent.clear()
        self._give(self.unsent_bytes)

    def _has_room(self, length_bytes: int, descriptor: int | None) -> bool:
        if descriptor is not None and self._unsent_descriptors >= self._descriptors_max:
            return False
        return self.unsent_bytes + length_bytes <= self._bytes_max

    def _give(self, held_bytes: int) -> None:
        self.unsent_bytes -= held_bytes
        self._total.give(held_bytes)

    def _send_now(self, view: memoryview, descriptor: int | None) -> int:
        """Bytes that the system took."""
        beside = []
        if descriptor is not None:
            rights = array.array("i", [descriptor])
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            return self._socket.sendmsg([view], beside)
        except BlockingIOError:
            return 0

    def _send_waiting(self) -> None:
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self._send_now(first.view, first.descriptor)
            except OSError as error:
                self._on_failure(error.strerror or str(error))
                return
            if not sent:
                return
            if first.descriptor is not None:
                os.close(first.descriptor)
                first.descriptor = None
                self._unsent_descriptors -= 1
            first.view = first.view[sent:]
            if not len(first.view):
                self._unsent.popleft()
                self._give(first.held_bytes)
        self._loop.remove_writer(self._socket)
        self._on_sent()
