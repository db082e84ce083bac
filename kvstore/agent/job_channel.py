"""One end of the socket between the agent and a worker: whole messages out and in, descriptors
beside them.

Both ends are ours, so a message that is malformed, or longer than allowed, is a fault that ends the
channel. What waits to be sent is bounded by the number of jobs that a worker may have at one time.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ..agent_messages import HEAD, MESSAGE_BYTES_MAX
from .jobs import Order, Report, pack

RECEIVE_BYTES = 1 << 16
DESCRIPTORS_PER_CALL_MAX = 4
"""The kernel gives those of one sendmsg at a time; we send one beside a message."""

MessageT = TypeVar("MessageT", bound="Order | Report")


class JobChannel(Generic[MessageT]):
    """Belongs to one event loop. `on_message` gets number and message; `on_end` is called once,
    with the reason, when the other side is gone or cannot be understood; never after `close`."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[MessageT],
        *,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[int, MessageT], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Owns `sock`, which must not block."""
        self._socket = sock
        self._decoder = decoder
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._is_closed = False
        loop.add_reader(sock, self._receive)

    def send(self, number: int, message: Order | Report, descriptor: int | None = None) -> None:
        """Send a message, and a copy of `descriptor`, which must stay open until it is answered."""
        if self._is_closed:
            return
        self._unsent.append((memoryview(pack(number, message)), descriptor))
        if len(self._unsent) == 1:
            self._send_waiting()

    def take_descriptor(self) -> int:
        """The descriptor that came with the message of which `on_message` is told now; the caller's
        from now on."""
        return self._descriptors.popleft()

    def read_rest(self) -> None:
        """Take what the other side had sent when it ended."""
        while not self._is_closed and self._receive_once():
            continue

    def close(self) -> None:
        """May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _send_waiting(self) -> None:
        while self._unsent:
            view, descriptor = self._unsent[0]
            beside = [] if descriptor is None else [_rights(descriptor)]
            try:
                sent = self._socket.sendmsg([view], beside)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._send_waiting)
                return
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            # The descriptor has gone with the first byte.
            self._unsent[0] = (view[sent:], None)
            if sent == len(view):
                self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        self._receive_once()

    def _receive_once(self) -> bool:
        """One receive; whether there may be more."""
        room = socket.CMSG_SPACE(DESCRIPTORS_PER_CALL_MAX * array.array("i").itemsize)
        try:
            data, beside, flags, _ = self._socket.recvmsg(
                RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(error.strerror or str(error))
            return False
        for level, kind, content in beside:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS), (level, kind)
            self._descriptors.extend(array.array("i", content))
        if flags & socket.MSG_CTRUNC:
            # From now on each message would be given the descriptor of a later one.
            self._end("no descriptor is left for one that came")
            return False
        if not data:
            self._end("closed by the other side")
            return False
        self._received += data
        self._take_messages()
        return True

    def _take_messages(self) -> None:
        at = 0
        while not self._is_closed and len(self._received) - at >= HEAD.size:
            length, number = HEAD.unpack_from(self._received, at)
            if length > MESSAGE_BYTES_MAX:
                self._end(f"a message of {length} bytes, at most {MESSAGE_BYTES_MAX}")
                return
            end = at + HEAD.size + length
            if len(self._received) < end:
                break
            body = bytes(self._received[at + HEAD.size : end])
            at = end
            try:
                message = self._decoder.decode(body)
            except msgspec.DecodeError as error:
                self._end(f"not one of our messages: {error}")
                return
            self._on_message(number, message)
        del self._received[:at]

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(reason)


def _rights(descriptor: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])
