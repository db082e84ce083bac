"""One client's connection to a worker: a request comes, answers go, and its end is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from .frames import SMALL_BYTES, FrameStalled, LargeFrames, LargeFramesBusy, read_frame
from .messages import (
    Answer,
    MalformedMessage,
    Refused,
    Request,
    Tokens,
    Waiting,
    decode_request,
    encode_frame,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """What one client may cost."""

    request_s: float = 10.0
    """For its message to come; for one beyond SMALL_BYTES, for each of the two parts of it."""
    large_wait_s: float = 10.0
    """Between these, until fewer others are read; it is refused then."""
    large_stall_s: float = 2.0
    """In the second part, for each piece of SMALL_BYTES."""
    unsent_bytes_max: int = 256 << 10
    """Answers that it has not read when the next one comes; it is a slow reader then."""
    unsent_s: float = 30.0
    """How far behind it may be, however little that is."""
    last_answer_s: float = 10.0
    """For the last answer to be read."""


class Receptionist(Protocol):
    """Who takes the request of a connection."""

    def take(self, request: Request, connection: Connection) -> None:
        """Begin the request, or answer it."""

    def abandon(self, connection: Connection) -> None:
        """The client is gone, or is not to get more."""


class UnsentAge:
    """How long a client has been behind with what was written for it.

    It remembers where the stream ends, and, once all is sent up to there, where it ends then. So it
    needs no list of times, and what is not sent is at most twice as old as the bound.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._written_bytes = 0
        self._end_bytes = 0
        self._end_s = clock()

    def note_written(self, count: int) -> None:
        """So many bytes more are on their way."""
        self._written_bytes += count

    def measure_s(self, unsent_bytes: int) -> float:
        """Seconds since the stream had an end that is not sent yet; 0 if it is sent."""
        now_s = self._clock()
        if self._written_bytes - unsent_bytes >= self._end_bytes:
            self._end_bytes, self._end_s = self._written_bytes, now_s
        return now_s - self._end_s


class Connection:
    """Belongs to the event loop. `request_id` names its request in this worker."""

    def __init__(
        self,
        request_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bounds: ConnectionBounds,
        large: LargeFrames,
        clock: Callable[[], float],
    ) -> None:
        """`large`: how many long messages the worker reads at one time."""
        self.request_id = request_id
        self.has_asked = False
        """Its request has come."""
        self.has_ended = False
        """No answer is sent any more."""
        self._reader = reader
        self._writer = writer
        self._bounds = bounds
        self._large = large
        self._unsent = UnsentAge(clock)
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, receptionist: Receptionist) -> None:
        """Until the last answer was sent, or the client is gone."""
        try:
            request = await self._read_request()
            if request is None:
                return
            self.has_asked = True
            receptionist.take(request, self)
            await self._wait_for_end()
            if not self.has_ended:
                self.has_ended = True
                receptionist.abandon(self)
        except asyncio.CancelledError:
            # The worker ends at once: it does not wait until a client has read.
            self._writer.transport.abort()
            raise
        finally:
            await self._close()

    def answer(self, answer: Answer, receptionist: Receptionist) -> None:
        """Send an answer; nothing happens after the last one, or when the client is gone."""
        if self.has_ended:
            return
        if self._does_not_read():
            log.warning("request=%s: its client does not read its answer", self.request_id)
            self.has_ended = True
            receptionist.abandon(self)
            self._writer.transport.abort()
            return
        frame = encode_frame(answer)
        self._unsent.note_written(len(frame))
        self._writer.write(frame)
        if not isinstance(answer, Tokens | Waiting):
            self.has_ended = True
            self._answered.set_result(None)

    def _does_not_read(self) -> bool:
        """Asked when the next answer comes: as long as none does, its sequence costs no step."""
        unsent_bytes = self._writer.transport.get_write_buffer_size()
        is_late = self._unsent.measure_s(unsent_bytes) > self._bounds.unsent_s
        return is_late or unsent_bytes > self._bounds.unsent_bytes_max

    async def _wait_for_end(self) -> None:
        """Until the last answer was given, or the client does anything: it has nothing more to say
        but that it goes."""
        said = asyncio.ensure_future(self._reader.read(1))
        try:
            ends: list[asyncio.Future[Any]] = [said, self._answered]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            said.cancel()
            with suppress(OSError, asyncio.CancelledError):
                await said

    async def _read_request(self) -> Request | None:
        """The client's message; None if there is none that can be understood."""
        busy = None
        try:
            body = await read_frame(
                self._reader, deadline_s=self._bounds.request_s, large=self._large
            )
            return None if body is None else decode_request(body)
        except MalformedMessage as error:
            log.warning("malformed message: %s", error)
            refusal = Refused(reason=f"malformed message: {error}", cause="invalid")
            self._writer.write(encode_frame(refusal))
        except (LargeFramesBusy, FrameStalled) as error:
            log.info("a long message is refused: %s", error)
            busy = Refused(reason=str(error), cause="busy")
        except (OSError, TimeoutError) as error:
            log.info("a client said nothing: %s", str(error) or "no message in time")
        # Not while the error is at hand, which keeps what was read.
        if busy is not None:
            await self._refuse_unread(busy)
        return None

    async def _refuse_unread(self, refusal: Refused) -> None:
        """Answer a client that still sends. A connection that is closed with something unread in it
        is reset, which can take the answer with it; so what comes is read, and nothing of it kept.
        """
        self._writer.write(encode_frame(refusal))
        with suppress(OSError):
            self._writer.write_eof()
            async with asyncio.timeout(self._bounds.last_answer_s):
                while await self._reader.read(SMALL_BYTES):
                    continue

    async def _close(self) -> None:
        self.has_ended = True
        self._writer.close()
        try:
            with suppress(OSError):
                async with asyncio.timeout(self._bounds.last_answer_s):
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()
