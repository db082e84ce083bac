"""A frame that waits to be sent over a connection, or is being sent."""

from __future__ import annotations

import socket

GATHER_VIEWS_MAX = 128
"""Views handed to one system call."""


class OutgoingFrame:
    """A frame on its way out: `views` from `begun` on, the first of them cut to what is left."""

    __slots__ = ("begun", "left_bytes", "request_id", "views")

    def __init__(self, request_id: int, views: list[memoryview], size_bytes: int) -> None:
        self.request_id = request_id
        self.views = views
        self.begun = 0
        self.left_bytes = size_bytes

    def send_some(self, connection: socket.socket) -> int:
        """Bytes that the kernel took; raises BlockingIOError, OSError."""
        sent = connection.sendmsg(self.views[self.begun : self.begun + GATHER_VIEWS_MAX])
        self.left_bytes -= sent
        rest = sent if self.left_bytes else 0
        while rest:
            view = self.views[self.begun]
            if rest < len(view):
                self.views[self.begun] = view[rest:]
                break
            rest -= len(view)
            self.begun += 1
        return sent

    def keep(self) -> int:
        """Copies what is left; bytes."""
        kept = b"".join(self.views[self.begun :])
        self.views, self.begun = [memoryview(kept)], 0
        return len(kept)
