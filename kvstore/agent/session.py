"""One engine or gateway at the agent's socket: messages in and out, and what it may cost.

Whatever comes over the socket, the worst that follows is that this session ends, with one line in
the log. What the requests mean is not known here: a Handler answers them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..agent_messages import Refused, Request, pack_message
from ..errors import StoreError
from ..key import Namespace
from ..layout import BlockLayout
from .answer_queue import AnswerQueue
from .copy_turns import CopyTurns
from .message_reader import MalformedMessage, MessageReader
from .replies import Reply, Running, refusal_of, work_to_reply
from .session_bounds import ByteBudget, SessionBounds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, when it connected."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """A namespace that a session has named, and the layout of its window state, if it has any."""

    namespace: Namespace
    window_layout: BlockLayout | None


class Handler(Protocol):
    """Who knows what requests mean."""

    def begin(self, session: Session, request: Request) -> Reply | Running:
        """Answers a request, or begins to. Raises StoreError to refuse it."""

    def copied_bytes(self, session: Session, request: Request) -> int:
        """How long a request will hold the thread by copying, as bytes; 0 for most."""

    def end_session(self, session: Session) -> None:
        """The session is gone. Its requests have been cancelled, and may take a moment to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionContext:
    """What the sessions of one agent share."""

    handler: Handler
    group: asyncio.TaskGroup
    """In which requests run: one that ends by an error that is no StoreError ends the agent."""
    loop: asyncio.AbstractEventLoop
    bounds: SessionBounds
    total: ByteBudget
    """Of requests."""
    total_unsent: ByteBudget
    make_room: Callable[[Session, int], None]
    """Ends the session that has most unsent, if so much more of this one is counted."""
    turns: CopyTurns
    scratch: memoryview
    """What is received is put here first."""
    on_closed: Callable[[Session], None]


class Session:
    """Belongs to the event loop. Makes itself known to it, until it is closed."""

    def __init__(
        self, sock: socket.socket, number: int, peer: Peer, context: SessionContext
    ) -> None:
        """Owns `sock`, which must not block."""
        self.number = number
        self.peer = peer
        self.client: str | None = None
        """What it calls itself; None until it has said Hello."""
        self.namespaces: list[OpenedNamespace] = []
        self.is_closed = False
        self._socket = sock
        self._context = context
        self._reader = MessageReader()
        self._own = ByteBudget(context.bounds.request_bytes_max)
        self._begun_bytes = 0
        self._running: set[Running] = set()
        self._answers = AnswerQueue(
            sock,
            loop=context.loop,
            bytes_max=context.bounds.unsent_bytes_max,
            descriptors_max=context.bounds.unsent_descriptors_max,
            total=context.total_unsent,
            make_room=partial(context.make_room, self),
            on_failure=self._end_unread,
            on_sent=self._end_when_sent,
        )
        self._is_ending = False
        self._is_held = False
        """A request of it waits for its turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()
        context.loop.add_reader(sock, self._receive)

    @property
    def requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._running)

    @property
    def unsent_bytes(self) -> int:
        """Memory of answers that it has not taken."""
        return self._answers.unsent_bytes

    def tasks_awaited_at_stop(self) -> list[asyncio.Task[Reply]]:
        """Their answers are sent by whatever waits for them to be done."""
        return [one.task for one in self._running if one.task and one.is_awaited_at_stop]

    def close(self, reason: str, level: int = logging.INFO) -> None:
        """Ends the session. May be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        self._context.loop.remove_reader(self._socket)
        self._answers.close()
        self._stop_timer()
        self._socket.close()
        self._account_begun(0)
        log.log(
            level,
            "session ended session=%d client=%s pid=%d: %s",
            self.number,
            self.client,
            self.peer.pid,
            reason,
        )
        for running in list(self._running):
            running.cancel()
        self._context.handler.end_session(self)
        self._context.on_closed(self)

    # In -------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Takes what is there, at most a scratch of it, so that each session has its turn."""
        scratch = self._context.scratch
        try:
            length = self._socket.recv_into(scratch)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if not length:
            self.close("the other side ended it")
            return
        self._reader.add(scratch[:length])
        self._begin_requests()

    def _begin_requests(self) -> None:
        """Begins what has come; if that is a lot, only a part of it, and nothing more is received
        until the others had their turn."""
        completed = 0
        requests_max = self._context.bounds.requests_per_visit_max
        try:
            while completed < requests_max and (taken := self._reader.take()) is not None:
                completed += 1
                copied_bytes = self._context.handler.copied_bytes(self, taken[2])
                if not self._context.turns.try_take(copied_bytes):
                    self._wait_for_turn(copied_bytes, taken)
                    break
                self._begin(*taken)
                if self.is_closed or self._is_ending:
                    return
        except MalformedMessage as error:
            self.close(f"malformed message: {error}", logging.WARNING)
            return
        self._look_at_begun(has_completed=completed > 0)
        if completed == requests_max and not self._is_held and not self.is_closed:
            self._context.loop.remove_reader(self._socket)
            self._context.loop.call_soon(self._go_on)

    def _wait_for_turn(self, copied_bytes: int, taken: tuple[int, int, Request]) -> None:
        """A request that may not be begun yet holds up those behind it, and no other session."""

        def go_on() -> None:
            self._is_held = False
            if not self.is_closed:
                self._begin(*taken)
            self._go_on()

        self._is_held = True
        self._context.loop.remove_reader(self._socket)
        self._context.turns.wait(copied_bytes, go_on)

    def _go_on(self) -> None:
        if self.is_closed or self._is_ending:
            return
        self._context.loop.add_reader(self._socket, self._receive)
        self._begin_requests()

    def _look_at_begun(self, *, has_completed: bool) -> None:
        """Bounds what is kept of a message that is not complete, and how long that may take."""
        begun_bytes = self._reader.begun_bytes
        if not self._account_begun(begun_bytes):
            self.close("too many bytes of requests at one time", logging.WARNING)
            return
        if has_completed or (begun_bytes and self._timer is None):
            self._stop_timer()
            if begun_bytes and not self._is_held:
                self._start_timer()

    def _begin(self, request_id: int, request_bytes: int, request: Request) -> None:
        bounds = self._context.bounds
        if len(self._running) >= bounds.requests_max:
            what = "requests without an answer"
            self._refuse_busy(request_id, what, f"at most {bounds.requests_max} of a session")
            return
        if not self._try_take(request_bytes):
            self._refuse_busy(request_id, "bytes of requests without an answer", "fewer")
            return
        try:
            outcome = self._context.handler.begin(self, request)
        except StoreError as error:
            outcome = Reply(refusal_of(error))
        if isinstance(outcome, Reply):
            self._give(request_bytes)
            self._answer(request_id, outcome)
            return
        self._run(request_id, request_bytes, outcome)

    def _refuse_busy(self, request_id: int, what: str, expected: str) -> None:
        refused = Refused(what=what, given="too many", expected=expected, is_mistake=False)
        self._answer(request_id, Reply(refused))

    def _run(self, request_id: int, request_bytes: int, running: Running) -> None:
        self._running.add(running)
        running.task = self._context.group.create_task(work_to_reply(running))

        def end(task: asyncio.Task[Reply]) -> None:
            running.work.close()  # if it was cancelled before it began
            self._running.remove(running)
            self._give(request_bytes)
            if running.on_end is not None:
                running.on_end()
            if not task.cancelled():
                if task.exception() is None:
                    self._answer(request_id, task.result())
            elif running.when_cancelled is not None:
                self._answer(request_id, running.when_cancelled)

        running.task.add_done_callback(end)

    # Out ------------------------------------------------------------------------------------------

    def _answer(self, request_id: int, reply: Reply) -> None:
        try:
            if not self.is_closed and not self._is_ending:
                self._send(request_id, reply)
        finally:
            if reply.descriptor is not None and reply.is_descriptor_given:
                os.close(reply.descriptor)

    def _send(self, request_id: int, reply: Reply) -> None:
        try:
            data = pack_message(request_id, reply.message)
        except ValueError as error:
            refused = Refused(what="the answer", given=str(error), is_mistake=False)
            data = pack_message(request_id, refused)
        self._answers.send(data, reply.descriptor)
        if reply.is_last and not self.is_closed:
            self._is_ending = True
            self._context.loop.remove_reader(self._socket)
            self._end_when_sent()

    def _end_when_sent(self) -> None:
        if self._is_ending and self._answers.is_empty:
            self.close("refused")

    def _end_unread(self, reason: str) -> None:
        self.close(reason, logging.WARNING)

    # Bounds ---------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        delay_s = self._context.bounds.message_s
        self._timer = self._context.loop.call_later(delay_s, self._end_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_late(self) -> None:
        self._timer = None
        self.close("a message was not complete in time", logging.WARNING)

    def _account_begun(self, begun_bytes: int) -> bool:
        """Note that so much of a message is kept; whether it may be."""
        self._give(self._begun_bytes)
        self._begun_bytes = begun_bytes if self._try_take(begun_bytes) else 0
        return self._begun_bytes == begun_bytes

    def _try_take(self, length_bytes: int) -> bool:
        if not self._own.try_take(length_bytes):
            return False
        if not self._context.total.try_take(length_bytes):
            self._own.give(length_bytes)
            return False
        return True

    def _give(self, length_bytes: int) -> None:
        self._own.give(length_bytes)
        self._context.total.give(length_bytes)
