"""Whole messages out of a stream, with bounds and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .messages import HEAD, MalformedMessage, decode_length

SMALL_BYTES = 64 << 10
"""As much as a stream keeps in any case."""


class LargeFramesBusy(Exception):
    """A large frame waited for its turn as long as it may; the rest of it was not read."""


class LargeFrames:
    """Bounds how many frames beyond SMALL_BYTES are read at one time; more wait, `wait_s` each.

    `stall_s`: within so long each further piece of SMALL_BYTES must come, or the turn is over: who
    sends no more keeps the others waiting for no longer than that.
    """

    def __init__(self, at_once: int, *, wait_s: float, stall_s: float) -> None:
        self.stall_s = stall_s
        self._turns = asyncio.Semaphore(at_once)
        self._wait_s = wait_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """In it a frame is read to its end. Raises LargeFramesBusy."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise LargeFramesBusy(
                f"more messages beyond {SMALL_BYTES} bytes are sent than are read at one time"
            ) from None
        try:
            yield
        finally:
            self._turns.release()


async def read_frame(
    reader: asyncio.StreamReader, *, deadline_s: float, large: LargeFrames | None = None
) -> bytes | None:
    """The content of the next frame, None at the end of the stream between frames.

    A frame waits for its turn in `large` once its first SMALL_BYTES are here: who only announces
    one holds nothing that others need. `deadline_s` is for what comes before that wait, and again
    for what comes after it. Raises MalformedMessage, also for a stream that ends inside a frame;
    TimeoutError after `deadline_s`, or for a turn that is over; LargeFramesBusy; OSError of the
    connection.
    """
    try:
        async with asyncio.timeout(deadline_s):
            head = await reader.read(1)
            if not head:
                return None
            length = decode_length(head + await reader.readexactly(HEAD.size - len(head)))
            if large is None or length <= SMALL_BYTES:
                return await reader.readexactly(length)
            first = await reader.readexactly(SMALL_BYTES)
        async with large.turn(), asyncio.timeout(deadline_s):
            return first + await _read_pieces(reader, length - SMALL_BYTES, large.stall_s)
    except asyncio.IncompleteReadError:
        raise MalformedMessage("the stream ends inside a message") from None


async def _read_pieces(reader: asyncio.StreamReader, length: int, piece_s: float) -> bytes:
    """So many bytes. Raises TimeoutError, asyncio.IncompleteReadError."""
    found = bytearray()
    while len(found) < length:
        async with asyncio.timeout(piece_s):
            found += await reader.readexactly(min(length - len(found), SMALL_BYTES))
    return bytes(found)
