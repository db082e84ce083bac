"""What a session has to send and its client has not taken yet: bounded, descriptors beside."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Unsent:
    """The rest of an answer. `descriptor` is ours."""

    view: memoryview
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
        on_failure: Callable[[str], None],
        on_sent: Callable[[], None],
    ) -> None:
        self._socket = sock
        self._loop = loop
        self._bytes_max = bytes_max
        self._descriptors_max = descriptors_max
        self._on_failure = on_failure
        self._on_sent = on_sent
        self._unsent: deque[_Unsent] = deque()
        self._unsent_bytes = 0
        self._unsent_descriptors = 0

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
            if not self._has_room(len(view), descriptor):
                self._on_failure("it does not read its answers")
                return
            copy = None if descriptor is None else os.dup(descriptor)
        except OSError as error:
            self._on_failure(error.strerror or str(error))
            return
        self._unsent.append(_Unsent(view, copy))
        self._unsent_bytes += len(view)
        self._unsent_descriptors += copy is not None
        if len(self._unsent) == 1:
            self._loop.add_writer(self._socket, self._send_waiting)

    def close(self) -> None:
        """Sends nothing more. Before the socket is closed."""
        self._loop.remove_writer(self._socket)
        for rest in self._unsent:
            if rest.descriptor is not None:
                os.close(rest.descriptor)
        self._unsent.clear()

    def _has_room(self, length_bytes: int, descriptor: int | None) -> bool:
        if descriptor is not None and self._unsent_descriptors >= self._descriptors_max:
            return False
        return self._unsent_bytes + length_bytes <= self._bytes_max

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
            self._unsent_bytes -= sent
            if not len(first.view):
                self._unsent.popleft()
        self._loop.remove_writer(self._socket)
        self._on_sent()
