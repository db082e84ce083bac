"""A worker's socket with a desk behind it that says what a test wants."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from engine.client import ClientDeadlines
from engine.client.conversation import converse
from engine.request import Request
from engine.worker.address import WorkerAddress
from engine.worker.connection import ConnectionBounds
from engine.worker.messages import (
    Answer,
    AskStatus,
    Finished,
    Resume,
    Submit,
    Tokens,
    pack_tokens,
)
from engine.worker.server import WorkerServer
from engine.worker.submission import read_submission

DEADLINES = ClientDeadlines(connect_s=30, first_token_s=30, between_tokens_s=30, patience_s=30)
Script: TypeAlias = Callable[[Request | bytes], list[Answer]]


class ScriptedDesk:
    """Answers each request by a script, in its turn; remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.asked: list[Request | bytes] = []
        self.aborted: list[str] = []
        self.server: WorkerServer
        self._script = script

    def submit(self, request_id: str, message: Submit) -> None:
        self._answer(request_id, read_submission(message, request_id))

    def resume(self, request_id: str, ticket: bytes) -> None:
        self._answer(request_id, ticket)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def _answer(self, request_id: str, asked: Request | bytes) -> None:
        self.asked.append(asked)
        answers = self._script(asked)
        loop = asyncio.get_running_loop()
        loop.call_soon(self.server.deliver, [(request_id, answer) for answer in answers])


@asynccontextmanager
async def serving(
    folder: Path,
    name: str,
    script: Script,
    bounds: ConnectionBounds | None = None,
    *,
    model: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[ScriptedDesk, WorkerAddress]]:
    desk = ScriptedDesk(script)
    status = {"engine": name} | ({} if model is None else {"model": model})
    desk.server = WorkerServer(desk, describe=lambda: status, bounds=bounds, clock=clock)
    path = folder / f"{name}.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.setblocking(False)
    await desk.server.listen(listener)
    try:
        yield desk, WorkerAddress(path=path)
    finally:
        desk.server.close()
        await desk.server.wait_until_read(30)


def say(*answers: Answer) -> Script:
    return lambda asked: list(answers)


SUBMIT = Submit(prompt_ids=pack_tokens([1, 2]), max_tokens=4)
WHOLE = (Tokens(position=0, token_ids=(5, 6)), Finished(reason="length", report={"hit_tokens": 3}))


async def answers_of(place: WorkerAddress, message: Submit | Resume | AskStatus) -> list[Answer]:
    async with aclosing(converse(place, message, DEADLINES)) as answers:
        return [answer async for answer in answers]
