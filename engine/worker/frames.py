"""Whole messages out of a stream, with bounds and a deadline."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from .messages import HEAD, MalformedMessage, decode_length

SMALL_BYTES = 64 << 10
"""As much as a stream keeps in any case."""


async def read_frame(
    reader: asyncio.StreamReader, *, deadline_s: float, large: asyncio.Semaphore | None = None
) -> bytes | None:
    """The content of the next frame, None at the end of the stream between frames.

    `large` bounds how many frames beyond SMALL_BYTES are held at one time. Raises MalformedMessage,
    also for a stream that ends inside a frame; TimeoutError after `deadline_s`; OSError of the
    connection.
    """
    async with asyncio.timeout(deadline_s):
        try:
            length = decode_length(await reader.readexactly(HEAD.size))
            async with nullcontext() if large is None or length <= SMALL_BYTES else large:
                return await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if not error.partial and error.expected == HEAD.size:
                return None
            raise MalformedMessage("the stream ends inside a message") from None
