"""One connection: takes requests from its socket, runs one operation at a time, sends its answers.

                 bytes                      effect                       the end
    idle ------> receiving ---> running --> sending | receiving payload ---------> idle
                                        |   waiting for a thread, memory, a turn
                                        '-> closed, by the peer, by a bad frame, by being slow

While an operation runs nothing of the next request is looked at, so a peer that does not read its
answers is not served further. A frame that is begun, in either direction, must be complete within
`frame_s`, and a payload that has a buffer must go on within `stall_s` while others wait for memory.
After the socket is gone an operation is resumed only to finish what a thread has begun, or to learn
that a file could not be read.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Generator
from typing import Any, Protocol

from .. import wire
from .answers import Request
from .effects import (
    Drain,
    Effect,
    FileUnreadable,
    NeedBuffer,
    NeedTurn,
    Operation,
    Receive,
    Send,
    SendFile,
    Work,
)
from .node import Node
from .operations import Session, begin_operation, plan_at_once
from .request_reader import RequestReader
from .socket_transfer import PeerGone, SocketTransfer
from .waiting import Waiter
from .worker_pool import Completion

log = logging.getLogger(__name__)

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
BYTES_PER_VISIT_MAX = 4 << 20
"""After moving so much for one peer the loop looks after the others."""
REQUESTS_PER_VISIT_MAX = 16
"""The same for small requests, which many of fit into one receive."""
PROGRESS_BYTES_MIN = 64 << 10
"""A payload that brings less than that in a while makes no progress: single bytes are none."""
NO_DEADLINE_S = 30.0
"""How long a request without a deadline may wait for memory or its turn."""


class Reactor(Protocol):
    """What a connection needs of the loop that runs it."""

    scratch: memoryview
    """Bytes nobody wants go here."""

    def watch(self, connection: Connection, events: int) -> None:
        """Call `visit` when the socket is ready for one of `events` (READABLE, WRITABLE, 0)."""

    def visit_soon(self, connection: Connection) -> None:
        """Call `visit` once all that is ready now was looked after."""

    def submit(self, call: Callable[[], Any], deliver: Callable[[Completion], None]) -> None:
        """Run `call` in a thread and `deliver` its result in the loop."""

    def check_soon(self) -> None:
        """Call `check_time` often: somebody waits, and has a deadline."""

    def release_socket(self, connection: Connection) -> None:
        """The socket is about to be closed: no more visits."""

    def forget(self, connection: Connection) -> None:
        """The socket is closed, and no thread works for the connection any more."""


class Connection:
    """A peer. All methods belong to the event loop."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        node: Node,
        reactor: Reactor,
        frame_s: float,
        stall_s: float,
    ) -> None:
        self.socket = sock
        self.peer = peer
        self.is_closed = False
        self._is_stopping = False
        self._node = node
        self._reactor = reactor
        self._frame_s = frame_s
        self._stall_s = stall_s
        self._session = Session()
        self._reader = RequestReader()
        self._transfer = SocketTransfer(sock, node.disk, reactor.scratch)
        self._operation: Operation | None = None
        self._op = 0
        self._begun_at_s = 0.0
        # What the operation is to be resumed with, once `_has_answer` says that it is there.
        self._answer: Any = None
        self._has_answer = False
        self._is_working = False
        self._waiter: Waiter | None = None
        self._wait_due_s = 0.0
        self._received_at_s = node.clock.monotonic_s()
        # When the frame that is being received or sent must be complete; at first, a greeting.
        self._frame_due_s: float | None = self._received_at_s + frame_s
        # Since when, and since how many bytes, a payload that has a buffer makes no progress.
        self._stalled_since_s: float | None = None
        self._stalled_at_bytes = 0
        self._requests_left = 0
        # Whether the last receive left room: the socket is empty and need not be asked again.
        self._is_drained = False

    # From the loop --------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in line for memory or a turn."""
        return self._waiter is not None

    def visit(self) -> None:
        """Go on as far as possible without waiting, for a fair share of the loop's time."""
        self._is_drained = False
        self._requests_left = REQUESTS_PER_VISIT_MAX
        moved_bytes_max = self._transfer.moved_bytes + BYTES_PER_VISIT_MAX
        try:
            while self._go_on():
                if self._transfer.moved_bytes > moved_bytes_max or not self._requests_left:
                    self._reactor.visit_soon(self)
                    return
        except wire.FrameError as error:
            self._node.counters.bad_frames += 1
            self.close(f"bad frame: {error}", logging.WARNING)
        except PeerGone as error:
            self.close(f"connection lost: {error}")
        except FileUnreadable as error:
            self._node.counters.cut_answers += 1
            # The operation is told, so that the next READ finds out what is bad.
            self._answer_with(error)
            self.close(f"an answer cannot be completed: {error}", logging.ERROR)

    def check_time(self, now_s: float) -> None:
        """Close a peer that is too slow; end a wait whose deadline has passed."""
        if self._frame_due_s is not None and now_s > self._frame_due_s:
            self._node.counters.slow_peers += 1
            what = "taking an answer" if self._transfer.is_sending else "sending a request"
            self.close(f"too slow: {what} took over {self._frame_s} s", logging.WARNING)
        elif self._is_hoarding(now_s):
            self._node.counters.slow_peers += 1
            text = f"too slow: no progress for {self._stall_s} s while others wait for memory"
            self.close(text, logging.WARNING)
        elif self._waiter is not None and now_s > self._wait_due_s:
            self._waiter.leave()
            self._serve(None)

    def _is_hoarding(self, now_s: float) -> bool:
        """Whether it keeps a buffer that its peer does not fill, and others wait for memory."""
        if self._stalled_since_s is None:
            return False
        if self._transfer.moved_bytes - self._stalled_at_bytes >= PROGRESS_BYTES_MIN:
            self._note_progress(now_s)
        return now_s - self._stalled_since_s > self._stall_s and self._node.pool.has_line

    def _note_progress(self, now_s: float) -> None:
        self._stalled_since_s = now_s
        self._stalled_at_bytes = self._transfer.moved_bytes

    def stop(self) -> None:
        """Finish the request under way, begin no other, and close."""
        self._is_stopping = True
        if self._operation is None:
            self.close("the node stops")

    def close(self, reason: str, level: int = logging.DEBUG) -> None:
        """Close the socket. An operation at work in a thread is kept until that returns."""
        if self.is_closed:
            return
        log.log(level, "closed peer=%s: %s", self.peer, reason)
        self.is_closed = True
        self._frame_due_s = None
        self._reactor.release_socket(self)
        self.socket.close()
        if self._waiter is not None:
            self._waiter.leave()
            self._waiter = None
        if not self._is_working:
            self._wind_up()

    # The state machine ----------------------------------------------------------------------------

    def _go_on(self) -> bool:
        """Until something is to be waited for, or a request was served; False if it must wait."""
        if self._operation is None:
            return self._begin_request() and self._run()
        if self._transfer.is_active:
            return self._move_bytes()
        if not self._has_answer:
            self._reactor.watch(self, 0)
            return False
        return self._run()

    def _begin_request(self) -> bool:
        if self._is_stopping:
            self.close("the node stops")
            return False
        arrived = self._reader.next_request()
        while arrived is None:
            if not self._read_some():
                return False
            arrived = self._reader.next_request()
        self._requests_left -= 1
        self._frame_due_s = None
        header, body = arrived
        allowed_s = header.deadline_ms / 1000 if header.deadline_ms else NO_DEADLINE_S
        request = Request(header, body, self._received_at_s + allowed_s)
        self._op, self._begun_at_s = header.op, self._node.clock.monotonic_s()
        answer = plan_at_once(self._node, self._session, request)
        if answer is None:
            self._operation = begin_operation(self._node, self._session, request)
            self._answer_with(None)
            return True
        answer.begin(self._transfer)
        if self._transfer.is_active:
            self._frame_due_s = self._node.clock.monotonic_s() + self._frame_s
            operation: Generator[Effect, Any, Any] = answer.hold()
            next(operation)
            self._operation = operation
        else:
            self._note_end()
        return True

    def _run(self) -> bool:
        """Resume the operation for as long as its effects are there at once."""
        while self._has_answer:
            effect = self._resume()
            if effect is None:
                return True
            self._begin_effect(effect)
        return True

    def _resume(self) -> Effect | None:
        """Hand the operation its answer; returns what it wants next, or None if it has ended."""
        assert self._operation is not None
        assert self._has_answer
        answer, self._answer, self._has_answer = self._answer, None, False
        try:
            if isinstance(answer, OSError):
                return self._operation.throw(answer)
            return self._operation.send(answer)
        except StopIteration:
            self._operation = None
            self._note_end()
            return None

    def _note_end(self) -> None:
        self._node.requests.note(self._op, self._begun_at_s, self._node.clock.monotonic_s())

    def _begin_effect(self, effect: Effect) -> None:
        transfer = self._transfer
        if isinstance(effect, SendFile):
            transfer.begin_send_file(effect.head, effect.pieces)
        elif isinstance(effect, Send):
            transfer.begin_send(effect.views)
        elif isinstance(effect, Receive):
            self._reader.skip(transfer.begin_receive(effect.views, self._reader.waiting()))
        elif isinstance(effect, Drain):
            used = transfer.begin_drain(effect.size_bytes, self._reader.waiting())
            self._reader.skip(used)
        elif isinstance(effect, Work):
            self._begin_work(effect)
            return
        else:
            self._begin_waiting(effect)
            return
        if transfer.is_active:
            now_s = self._node.clock.monotonic_s()
            self._frame_due_s = now_s + self._frame_s
            if isinstance(effect, Receive):
                self._note_progress(now_s)
        else:
            self._answer_with(None)

    def _answer_with(self, value: object) -> None:
        self._answer = value
        self._has_answer = True

    def _wind_up(self) -> None:
        """The peer is gone: resume the operation for as long as only threads keep it waiting."""
        while self._operation is not None:
            effect = self._resume() if self._has_answer else None
            if isinstance(effect, Work):
                self._begin_work(effect)
                return
            if self._operation is not None:
                self._operation.close()
                self._operation = None
        self._reactor.forget(self)

    # Waiting --------------------------------------------------------------------------------------

    def _begin_waiting(self, effect: NeedBuffer | NeedTurn) -> None:
        pool = self._node.pool
        if isinstance(effect, NeedBuffer):
            is_for_write = effect.is_for_write
            buffer = pool.try_acquire(effect.size_bytes, is_for_write=is_for_write)
            if buffer is not None:
                self._answer_with(buffer)
                return
            waiter = Waiter(self._serve)
            pool.wait(effect.size_bytes, waiter, is_for_write=is_for_write)
        else:
            if effect.turn.try_take():
                self._answer_with(True)
                return
            waiter = Waiter(self._serve)
            effect.turn.wait(waiter)
        self._waiter = waiter
        self._wait_due_s = effect.due_s
        self._reactor.check_soon()

    def _serve(self, value: object) -> None:
        """What was waited for is here, or None for a deadline that has passed."""
        self._waiter = None
        self._answer_with(value)
        self._reactor.visit_soon(self)

    def _begin_work(self, effect: Work) -> None:
        self._is_working = True
        self._reactor.submit(effect.call, self._on_worked)

    def _on_worked(self, completion: Completion) -> None:
        self._is_working = False
        if completion.error is not None and not isinstance(completion.error, OSError):
            raise completion.error
        self._answer_with(completion.value if completion.error is None else completion.error)
        if self.is_closed:
            self._wind_up()
        else:
            self.visit()

    # Bytes ----------------------------------------------------------------------------------------

    def _move_bytes(self) -> bool:
        if not self._transfer.step():
            self._reactor.watch(self, WRITABLE if self._transfer.is_sending else READABLE)
            return False
        if not self._transfer.is_active:
            self._frame_due_s = None
            self._stalled_since_s = None
            self._answer_with(None)
        return True

    def _read_some(self) -> bool:
        """Take bytes of the next request from the socket; False if there are none."""
        count = 0
        if not self._is_drained:
            room = self._reader.room()
            count = self._transfer.receive((room,))
        if count:
            self._is_drained = count < len(room)
            self._received_at_s = self._node.clock.monotonic_s()
            self._reader.received(count)
        else:
            self._reactor.watch(self, READABLE)
        if self._frame_due_s is None and self._reader.has_begun:
            self._frame_due_s = self._node.clock.monotonic_s() + self._frame_s
        return count > 0
