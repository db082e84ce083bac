"""Whole messages out of a stream, with bounds and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from .messages import HEAD, MalformedMessage, decode_length

SMALL_BYTES = 64 << 10
"""As much as a stream keeps in any case."""
STOOD_STILL_S = 0.1
"""A loop that turns looks at its timers sooner than so long after they are due."""


class LargeFramesBusy(Exception):
    """A large frame waited for its turn as long as it may; the rest of it was not read."""


class FrameStalled(Exception):
    """The rest of a large frame did not come in time; what came of it is thrown away."""


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
    for what comes after it. What has come counts also when this process stood still meanwhile.
    Raises MalformedMessage, also for a stream that ends inside a frame; TimeoutError after
    `deadline_s`; LargeFramesBusy, FrameStalled, only with `large`; OSError of the connection.
    """
    clock = asyncio.get_running_loop().time
    due_s = clock() + deadline_s
    head, found = bytearray(), bytearray()
    try:
        await _read_until(reader, head, HEAD.size, due_s)
        length = decode_length(bytes(head))
        is_large = large is not None and length > SMALL_BYTES
        await _read_until(reader, found, SMALL_BYTES if is_large else length, due_s)
        if large is not None and is_large:
            async with large.turn():
                await _read_pieces(reader, found, length, clock() + deadline_s, large.stall_s)
    except EOFError:
        if not head:
            return None
        raise MalformedMessage("the stream ends inside a message") from None
    return bytes(found)


async def _read_pieces(
    reader: asyncio.StreamReader, found: bytearray, length: int, due_s: float, stall_s: float
) -> None:
    """As `_read_until`, and each piece must come within `stall_s`. Raises FrameStalled, EOFError.

    Time in which this process stood still is not the client's, which may have had to wait for it.
    """
    clock = asyncio.get_running_loop().time
    while len(found) < length:
        piece_end = min(len(found) + SMALL_BYTES, length)
        piece_due_s = min(clock() + stall_s, due_s)
        with suppress(TimeoutError):
            await _read_until(reader, found, piece_end, piece_due_s)
        late_s = max(0.0, clock() - piece_due_s)
        if len(found) < piece_end and late_s < STOOD_STILL_S:
            raise FrameStalled(f"sent only {len(found)} of {length} bytes")
        due_s += late_s


async def _read_until(
    reader: asyncio.StreamReader, found: bytearray, length: int, due_s: float
) -> None:
    """Append to `found` until it has so many bytes. `due_s` is of the loop's clock.

    Raises EOFError at the end of the stream, TimeoutError if the bytes have not come by `due_s`.
    """
    try:
        async with asyncio.timeout_at(due_s):
            await _read_on(reader, found, length)
    except TimeoutError:
        # Perhaps they have, and it is the loop that did not turn.
        await _turn_loop()
        async with asyncio.timeout(0):
            await _read_on(reader, found, length)


async def _read_on(reader: asyncio.StreamReader, found: bytearray, length: int) -> None:
    while len(found) < length:
        some = await reader.read(length - len(found))
        if not some:
            raise EOFError
        found += some


async def _turn_loop() -> None:
    """Whatever has come until now is in its stream then."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()
