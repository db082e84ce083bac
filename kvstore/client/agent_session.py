"""One connection to the agent of this host: requests out, answers and descriptors in.

Knows framing, request ids and deadlines; what a request means is `agent_client`'s business, and
connecting again `agent_link`'s. The protocol is docs/formats/agent-socket.md.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ..agent_messages import (
    HEAD,
    MESSAGE_BYTES_MAX,
    Answer,
    Message,
    Refused,
    ReleaseRun,
    Request,
    RunLeased,
    Welcome,
    answer_decoder,
    pack_message,
)
from ..errors import AgentError, AgentRefused, AgentUnreachable

ANSWER_MARGIN_S = 1.0
"""An agent that works answers within the deadline it was given; one that is silent for this much
longer has stopped, and the connection is given up."""
WAITING_MAX = 700
"""Requests without an answer. The agent takes 1,024 of one session; the rest is for giving runs
back, of which a session has 256 at most."""
RELEASE_DEADLINE_S = 10.0
UNSENT_BYTES_MAX = 32 << 20
"""All requests that may wait, with the longest key chains that are usual."""
READ_BYTES = 256 << 10
READS_BEFORE_SILENCE = 32
DESCRIPTORS_PER_READ = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_PER_READ * array.array("i").itemsize)

AnswerT = TypeVar("AnswerT", bound=Message)


@dataclass(slots=True)
class Received:
    """An answer; `descriptor` came beside it and is the receiver's to close."""

    answer: Answer
    descriptor: int | None


@dataclass(slots=True)
class _Waiting:
    future: asyncio.Future[Received]
    timer: asyncio.TimerHandle


class AgentSession:
    """A connected socket. Belongs to the event loop it was made in.

    `on_end` is called once, when the connection is gone, after every waiting request has failed.
    """

    def __init__(
        self,
        connected: socket.socket,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[AgentError], None],
    ) -> None:
        self.path = path
        self.failure: AgentError | None = None
        self.has_hung_up = False
        """The agent's end is gone; nothing that was said wrong has ended the session."""
        self._socket = connected
        self._loop = loop
        self._on_end = on_end
        self._last_id = 0
        self._waiting: dict[int, _Waiting] = {}
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        loop.add_reader(connected.fileno(), self._read)

    @property
    def waiting(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    async def ask(self, request: Request, kind: type[AnswerT], deadline_s: float) -> AnswerT:
        """The answer to a request that brings no descriptor. Raises AgentError."""
        received = await self.send(request, deadline_s)
        return self.expect(received, kind)

    async def receive(self, request: Request, deadline_s: float) -> Received:
        """The answer to a request that may bring a descriptor. Raises AgentError. If this is
        cancelled, what comes is given back, also an answer that is here already."""
        answer = self.send(request, deadline_s)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._give_back(answer.result())
            raise

    def send(self, request: Request, deadline_s: float) -> asyncio.Future[Received]:
        """Send a request at once; its answer comes within `deadline_s` and a margin, or
        AgentUnreachable ends the session. The answer to a future that was cancelled is given
        back."""
        if self.failure is not None:
            raise self._gone()
        if len(self._waiting) >= WAITING_MAX and not isinstance(request, ReleaseRun):
            raise AgentRefused(self.path, f"{WAITING_MAX} requests wait already")
        self._last_id = self._last_id % 0xFFFF_FFFF + 1
        request_id = self._last_id
        message = pack_message(request_id, request)
        future: asyncio.Future[Received] = self._loop.create_future()
        timer = self._loop.call_later(
            deadline_s + ANSWER_MARGIN_S, self._on_silence, request_id, deadline_s
        )
        self._waiting[request_id] = _Waiting(future, timer)
        self._send_bytes(message)
        return future

    async def share(self, answer: asyncio.Future[Received], deadline_s: float) -> Received:
        """An answer that others wait for too, who are not disturbed if this is given up. Raises
        AgentUnreachable if it is not there within `deadline_s` and the margin."""
        try:
            async with asyncio.timeout(deadline_s + ANSWER_MARGIN_S):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            detail = f"no answer within {deadline_s:.3g} s and {ANSWER_MARGIN_S:g} s more"
            raise AgentUnreachable(self.path, detail) from error

    def expect(self, received: Received, kind: type[AnswerT]) -> AnswerT:
        """The answer, if it is of the kind; else AgentRefused, or AgentUnreachable for nonsense."""
        answer = received.answer
        if isinstance(answer, kind):
            return answer
        if received.descriptor is not None:
            os.close(received.descriptor)
        if isinstance(answer, Refused):
            raise AgentRefused(self.path, _describe_refusal(answer))
        given, expected = type(answer).__name__, kind.__name__
        raise self.end_of_nonsense(f"answered {given} where {expected} was expected")

    def end_of_nonsense(self, what: str) -> AgentUnreachable:
        """An agent that says such a thing cannot be believed in anything else: the connection ends,
        with this error."""
        error = AgentUnreachable(self.path, what)
        self.close(error)
        return AgentUnreachable(self.path, what)

    def close(self, error: AgentError) -> None:
        """End the connection; whatever waits fails with `error`. May be called again."""
        if self.failure is not None:
            return
        self.failure = error
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._unsent.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.timer.cancel()
            if not one.future.done():
                one.future.set_exception(self._gone())
        self._on_end(error)

    def _gone(self) -> AgentError:
        """The failure anew: an exception that is raised twice would gather tracebacks."""
        assert self.failure is not None
        return type(self.failure)(self.failure.socket_path, self.failure.detail)

    # Out ----------------------------------------------------------------------------------------

    def _send_bytes(self, message: bytes) -> None:
        view = memoryview(message)
        if not self._unsent:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail(error)
                return
            if not view:
                return
            self._loop.add_writer(self._socket.fileno(), self._write)
        self._unsent.append(view)
        self._unsent_bytes += len(view)
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self.close(AgentUnreachable(self.path, "it does not take what is sent to it"))

    def _write(self) -> None:
        while self._unsent:
            view = self._unsent[0]
            try:
                sent = self._socket.send(view)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(error)
                return
            self._unsent_bytes -= sent
            if sent < len(view):
                self._unsent[0] = view[sent:]
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())

    # In -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what has come. Called by the loop, and once more before silence is believed."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > len(self._waiting):
            self.close(AgentUnreachable(self.path, "more descriptors than were asked for"))
        elif not data:
            self.has_hung_up = True
            self.close(AgentUnreachable(self.path, "it has ended, or closed the connection"))
        else:
            self._received += data
            self._take_messages()

    def _take_messages(self) -> None:
        at = 0
        while self.failure is None and len(self._received) - at >= HEAD.size:
            length, request_id = HEAD.unpack_from(self._received, at)
            if length > MESSAGE_BYTES_MAX:
                self.close(AgentUnreachable(self.path, f"sent a message of {length} bytes"))
                return
            end = at + HEAD.size + length
            if len(self._received) < end:
                break
            body = bytes(memoryview(self._received)[at + HEAD.size : end])
            at = end
            try:
                answer = answer_decoder.decode(body)
            except msgspec.MsgspecError as error:
                self.close(AgentUnreachable(self.path, f"sent a message of no known form: {error}"))
                return
            self._take_answer(request_id, answer)
        del self._received[:at]

    def _take_answer(self, request_id: int, answer: Answer) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            self.close(AgentUnreachable(self.path, f"answered request {request_id}, not asked"))
            return
        waiting.timer.cancel()
        descriptor = None
        if _brings_descriptor(answer):
            if not self._descriptors:
                self.close(AgentUnreachable(self.path, "a descriptor is missing"))
                if not waiting.future.done():
                    waiting.future.set_exception(self._gone())
                return
            descriptor = self._descriptors.popleft()
        received = Received(answer, descriptor)
        if waiting.future.done():
            self._give_back(received)
        else:
            waiting.future.set_result(received)

    def _give_back(self, received: Received) -> None:
        """Nobody waits for this answer any more."""
        if received.descriptor is not None:
            os.close(received.descriptor)
        if isinstance(received.answer, RunLeased) and received.answer.blocks:
            self.release_run(received.answer.run)

    def release_run(self, run: int) -> None:
        """Give a run back, if the session is still there; its end would do it too."""
        if self.failure is None:
            self.send(ReleaseRun(run), RELEASE_DEADLINE_S).add_done_callback(_forget_outcome)

    def _on_silence(self, request_id: int, deadline_s: float) -> None:
        # If this process itself stood still, the answer may lie in the socket.
        for _ in range(READS_BEFORE_SILENCE):
            if self.failure is None and request_id in self._waiting:
                self._read()
        if request_id in self._waiting:
            detail = f"no answer within {deadline_s:.3g} s and {ANSWER_MARGIN_S:g} s more"
            self.close(AgentUnreachable(self.path, detail))

    def _fail(self, error: OSError) -> None:
        self.has_hung_up = True
        self.close(AgentUnreachable(self.path, error.strerror or str(error)))


def _brings_descriptor(answer: Answer) -> bool:
    if isinstance(answer, Welcome):
        return answer.arena_bytes > 0
    return isinstance(answer, RunLeased) and answer.blocks > 0


def _describe_refusal(answer: Refused) -> str:
    if not answer.given and not answer.expected:
        return answer.what
    return f"{answer.what}: given {answer.given}, expected {answer.expected}"


def _forget_outcome(future: asyncio.Future[Received]) -> None:
    """An error of a release is known to all who still use the session."""
    if not future.cancelled():
        future.exception()
