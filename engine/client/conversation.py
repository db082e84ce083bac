"""One request at one worker: a connection, a message, and the answers to it."""

from __future__ import annotations

import asyncio
import math
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
    Waiting,
    decode_answer,
    encode_frame,
)
from .answer import WorkerAbsent, WorkerLost, WorkerSilent


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientDeadlines:
    """How long a client waits, seconds: for a word of a worker before it goes elsewhere, and for
    all of them before it gives up. A worker that has a request says every 2 s that it does."""

    connect_s: float = 2.0
    """Also for an answer to the question which model a worker has."""
    first_token_s: float = 120.0
    """Without a word, until the first token."""
    between_tokens_s: float = 30.0
    """Without a word, from then on; also for a ticket, and for the first token after one."""
    waiting_s: float = 3600.0
    """Without a token, whatever workers say."""
    patience_s: float = 60.0
    """While nobody has the request, because all are lost, busy or draining: from the end of the
    first attempt in vain since the answer last grew, or waited at a worker. Time for one to be
    started again. When all were asked once, it bounds the attempts too."""


async def converse(
    place: WorkerAddress,
    message: Request,
    deadlines: ClientDeadlines,
    *,
    first_answer_s: float = math.inf,
) -> AsyncGenerator[Answer, None]:
    """The answers of a worker up to the last one. Closing the iterator ends the request there.
    `first_answer_s`: less time than the deadlines give, for the first of them.

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
            answer = await _read_answer(reader, min(wait_s, first_answer_s))
            yield answer
            if not isinstance(answer, Tokens | Waiting):
                return
            is_new &= isinstance(answer, Waiting)
            first_answer_s = math.inf
    finally:
        # Not `close`, which waits until a worker that stands still has read the request.
        writer.transport.abort()


async def ask_status(place: WorkerAddress, deadlines: ClientDeadlines) -> dict[str, Any]:
    """The status document of a worker, which has it at hand. Raises WorkerLost."""
    conversation = converse(place, AskStatus(), deadlines, first_answer_s=deadlines.connect_s)
    async with aclosing(conversation) as answers:
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
        raise WorkerSilent(f"nothing from it for {wait_s:g} s") from None
    except MalformedMessage as error:
        raise WorkerLost(f"it said something else: {error}") from error
    except OSError as error:
        raise WorkerLost(f"connection lost: {reason_of(error)}") from error
