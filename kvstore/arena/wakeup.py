"""Wakes an engine that sleeps until more of its run is ready: a pair of stream sockets for a run.

The agent and its workers have the writing end, the engine the reading one. What an engine does to
its end changes nothing at the other: status flags belong to an end, where those of an eventfd
belong to all who have it, so that an engine could make a write to it wait for ever (docs/decisions/
0022). Not for what is ready: that stands in the run's progress table.
"""

from __future__ import annotations

import errno
import os
import socket

DRAINED_BYTES_MAX = 4096
"""Of one `drain`; more than a socket's buffer holds of messages of one byte."""
_WAKE = b"\x01"
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_HARMLESS = {
    errno.EAGAIN,  # it has not read the last ones, and is woken by them
    errno.EPIPE,  # it has closed its end
    errno.ECONNRESET,
    errno.ENOBUFS,  # the kernel has no memory: it is woken by the next one, or its deadline
    errno.ENOMEM,
}


class Waker:
    """The writing end. For the agent's side alone: whoever has it could take its wake-ups away."""

    __slots__ = ("_socket",)

    def __init__(self, descriptor: int) -> None:
        """Owns `descriptor`, of a stream socket."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=descriptor)

    def fileno(self) -> int:
        """The descriptor, to hand a copy to a worker."""
        return self._socket.fileno()

    def wake(self) -> None:
        """Never waits, whatever the reader has done to its end or left undone."""
        try:
            self._socket.send(_WAKE, _FLAGS)
        except OSError as error:
            if error.errno not in _HARMLESS:
                raise

    def close(self) -> None:
        """The reader finds the end of the stream once all copies are closed. May be repeated."""
        self._socket.close()


def make_wakeup() -> tuple[Waker, int]:
    """The writing end, and the descriptor of the reading one. Raises OSError if there is none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    # Nothing that an engine sends the other way is kept for anybody.
    ours.shutdown(socket.SHUT_RD)
    return Waker(ours.detach()), theirs.detach()


def drain(reader: int) -> bool:
    """Takes the wake-ups that wait at a reading end, which may be none; False at the end of the
    stream: the agent's side is gone, or has taken the run back."""
    try:
        return bool(os.read(reader, DRAINED_BYTES_MAX))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
