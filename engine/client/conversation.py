"""One request at one worker: a connection, a message, and the answers to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ..errors import reason_of
from ..worker.address import WorkerAddress
from ..worker.frames import read_frame
from ..worker.messages import (
    Answer,
    AskStatus,
    MalformedMessage,
    Request,
    Resume,
    Status,
    Tokens,
    decode_answer,
    encode_frame,
)
from .answer import WorkerAbsent, WorkerLost


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientDeadlines:
    """How long a client waits, seconds: for a worker before it goes elsewhere, and for all of them
    before it gives up."""

    connect_s: float = 2.0
    first_token_s: float = 120.0
    """From the request until its first token: the time in the queue and the prefill."""
    between_tokens_s: float = 30.0
    """Also for a ticket, and for the first token after one."""
    patience_s: float = 60.0
    """While nobody goes on with the answer, because all are lost, busy or draining: from the first
    attempt in vain since it last grew. Time for a worker to be started again."""


async def converse(
    place: WorkerAddress, message: Request, deadlines: ClientDeadlines
) -> AsyncGenerator[Answer, None]:
    """The answers of a worker up to the last one. Closing the iterator ends the request there.

    Raises WorkerLost.
    """
    try:
        async with asyncio.timeout(deadlines.connect_s):
            reader, writer = await _connect(place)
    except TimeoutError:
        raise WorkerAbsent(f"no connection within {deadlines.connect_s:g} s") from None
    except OSError as error:
        raise WorkerAbsent(f"no connection: {reason_of(error)}") from error
    try:
        writer.write(encode_frame(message))
        is_new = not isinstance(message, Resume)
        while True:
            wait_s = deadlines.first_token_s if is_new else deadlines.between_tokens_s
            answer = await _read_answer(reader, wait_s)
            yield answer
            if not isinstance(answer, Tokens):
                return
            is_new = False
    finally:
        # Not `close`, which waits until a worker that stands still has read the request.
        writer.transport.abort()


async def ask_status(place: WorkerAddress, deadlines: ClientDeadlines) -> dict[str, Any]:
    """The status document of a worker. Raises WorkerLost."""
    async with aclosing(converse(place, AskStatus(), deadlines)) as answers:
        answer = await anext(answers)
    if not isinstance(answer, Status):
        raise WorkerLost(f"asked for its status, it said {type(answer).__name__}")
    return answer.document


async def _connect(place: WorkerAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if place.path is not None:
        return await asyncio.open_unix_connection(place.path)
    return await asyncio.open_connection(place.host, place.port)


async def _read_answer(reader: asyncio.StreamReader, wait_s: float) -> Answer:
    try:
        body = await read_frame(reader, deadline_s=wait_s)
        if body is None:
            raise WorkerLost("it closed the connection before the end of the answer")
        return decode_answer(body)
    except TimeoutError:
        raise WorkerLost(f"nothing from it for {wait_s:g} s") from None
    except MalformedMessage as error:
        raise WorkerLost(f"it said something else: {error}") from error
    except OSError as error:
        raise WorkerLost(f"connection lost: {reason_of(error)}") from error
