"""The worker's socket and its client, against a desk that says what a test wants."""

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from engine.client import EngineClient
from engine.client_answer import WorkerLost
from engine.client_connection import ClientDeadlines, converse
from engine.client_places import EnginePlaces
from engine.errors import EnginesUnavailable, InvalidRequest
from engine.request import Request
from engine.worker import server as server_module
from engine.worker.address import WorkerAddress
from engine.worker.connection import ConnectionBounds
from engine.worker.messages import (
    Answer,
    AskStatus,
    Failed,
    Finished,
    HandedOver,
    Refused,
    Resume,
    Status,
    Submit,
    Tokens,
    encode_frame,
    pack_tokens,
)
from engine.worker.server import WorkerServer
from tests.kvstore.agent.agent_process import short_folder

DEADLINES = ClientDeadlines(connect_s=30, first_token_s=30, between_tokens_s=30, busy_s=30)
Script: TypeAlias = Callable[[Request | bytes], list[Answer]]


class ScriptedDesk:
    """Answers each request by a script, in its turn; remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.asked: list[Request | bytes] = []
        self.aborted: list[str] = []
        self.server: WorkerServer
        self._script = script

    def submit(self, request: Request) -> None:
        self._answer(request.request_id, request)

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
    folder: Path, name: str, script: Script, bounds: ConnectionBounds | None = None
) -> AsyncIterator[tuple[ScriptedDesk, WorkerAddress]]:
    desk = ScriptedDesk(script)
    desk.server = WorkerServer(desk, describe=lambda: {"engine": name}, bounds=bounds)
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


@pytest.fixture
def folder() -> Iterator[Path]:
    path = short_folder()
    yield path
    shutil.rmtree(path)


def say(*answers: Answer) -> Script:
    return lambda asked: list(answers)


SUBMIT = Submit(prompt_ids=pack_tokens([1, 2]), max_tokens=4)
WHOLE = (Tokens(position=0, token_ids=(5, 6)), Finished(reason="stop", report={"hit_tokens": 3}))


async def answers_of(place: WorkerAddress, message: Submit | Resume | AskStatus) -> list[Answer]:
    async with aclosing(converse(place, message, DEADLINES)) as answers:
        return [answer async for answer in answers]


async def tokens_of(client: EngineClient, max_tokens: int = 4) -> list[int]:
    parts = client.generate([1, 2], max_tokens=max_tokens)
    return [token async for part in parts for token in part.token_ids]


async def test_answers_come_in_order_and_the_connection_ends(folder: Path) -> None:
    async with serving(folder, "b", say(*WHOLE)) as (desk, place):
        assert await answers_of(place, SUBMIT) == list(WHOLE)
        assert await desk.server.wait_until_idle(30)
        assert desk.aborted == []
        (asked,) = desk.asked
        assert isinstance(asked, Request)
        assert (list(asked.prompt_ids), asked.max_tokens) == ([1, 2], 4)


async def test_status_tells_of_requests_and_connections(folder: Path) -> None:
    async with serving(folder, "b", say()) as (desk, place):
        waiting = asyncio.ensure_future(answers_of(place, SUBMIT))
        while not desk.asked:
            await asyncio.sleep(0.001)
        (status,) = await answers_of(place, AskStatus())
        assert isinstance(status, Status)
        assert status.document["requests"] == 1
        assert status.document["engine"] == "b"
        assert status.document["connections"]["open"] == 2
        waiting.cancel()
        assert await desk.server.wait_until_idle(30)
        assert desk.aborted == ["r1"]


async def test_draining_server_takes_nothing_new(folder: Path) -> None:
    async with serving(folder, "b", say(*WHOLE)) as (desk, place):
        desk.server.is_draining = True
        for message in (SUBMIT, Resume(ticket=b"t")):
            (refused,) = await answers_of(place, message)
            assert isinstance(refused, Refused)
            assert refused.cause == "draining"
        assert desk.asked == []


async def test_client_that_does_not_read_costs_a_bounded_amount_and_is_let_go(folder: Path) -> None:
    bounds = ConnectionBounds(unsent_bytes_max=10_000)
    async with serving(folder, "b", say(), bounds) as (desk, place):
        _, writer = await asyncio.open_unix_connection(place.path, limit=16)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(encode_frame(SUBMIT))
        while not desk.asked:
            await asyncio.sleep(0.001)
        sent = 0
        while not desk.aborted:
            desk.server.deliver([("r1", Tokens(position=sent, token_ids=(1,) * 2000))])
            sent += 1
            assert sent < 10_000, "more than any socket holds"
            await asyncio.sleep(0)
        assert desk.server.requests == 0
        assert desk.server.counts.abandoned == 1
        writer.close()


async def test_more_connections_than_the_bound_are_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 1)
    async with serving(folder, "b", say(*WHOLE)) as (desk, place):
        _, writer = await asyncio.open_unix_connection(place.path)
        while not desk.server.status()["connections"]["open"]:
            await asyncio.sleep(0.001)
        with pytest.raises(WorkerLost):
            await answers_of(place, SUBMIT)
        assert desk.server.counts.turned_away == 1
        writer.close()


async def test_client_that_says_nothing_is_let_go(folder: Path) -> None:
    async with serving(folder, "b", say(), ConnectionBounds(request_s=0.01)) as (_, place):
        reader, writer = await asyncio.open_unix_connection(place.path)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("more", [b"x", encode_frame(SUBMIT)])
async def test_client_that_says_more_ends_its_request(folder: Path, more: bytes) -> None:
    async with serving(folder, "b", say()) as (desk, place):
        _, writer = await asyncio.open_unix_connection(place.path)
        writer.write(encode_frame(SUBMIT) + more)
        while not desk.aborted:
            await asyncio.sleep(0.001)
        writer.close()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Submit(prompt_ids=b"abc", max_tokens=4), "token ids of 3 bytes"),
        (Submit(prompt_ids=b"", max_tokens=4, temperature=float("inf")), "temperature"),
    ],
)
async def test_request_with_wrong_values_is_refused(
    folder: Path, message: Submit, reason: str
) -> None:
    async with serving(folder, "b", say()) as (desk, place):
        (refused,) = await answers_of(place, message)
        assert isinstance(refused, Refused)
        assert reason in refused.reason
        assert refused.cause == "invalid"
        assert desk.asked == []


# --- the client against workers that say what a test wants


async def test_client_carries_the_ticket_and_the_reports(folder: Path) -> None:
    first = (Tokens(position=0, token_ids=(5,)), HandedOver(ticket=b"t", report={"hit_tokens": 1}))
    rest = (Tokens(position=1, token_ids=(6,)), Finished(reason="length", report={"n": 2}))
    async with (
        serving(folder, "p", say(*first)) as (_, prefill),
        serving(folder, "d", say(*rest)) as (desk, decode),
    ):
        client = EngineClient(EnginePlaces(prefill=(prefill,), decode=(decode,)))
        parts = [part async for part in client.generate([1], max_tokens=4)]
        assert [part.token_ids for part in parts] == [(5,), (6,), ()]
        assert parts[-1].finish_reason == "length"
        assert parts[-1].report is not None
        assert parts[-1].report.engines == ({"hit_tokens": 1}, {"n": 2})
        assert desk.asked == [b"t"]


async def test_client_waits_and_asks_again_when_workers_are_busy(folder: Path) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    def script(asked: Request | bytes) -> list[Answer]:
        return [Refused(reason="busy", cause="busy")] if len(pauses) < 4 else list(WHOLE)

    async with serving(folder, "b", script) as (_, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=sleep)
        assert await tokens_of(client) == [5, 6]
        assert pauses == [0.02, 0.04, 0.08, 0.16]


async def test_client_gives_up_when_workers_are_busy_for_too_long(folder: Path) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    async with serving(folder, "b", say(Refused(reason="busy", cause="busy"))) as (_, place):
        client = EngineClient(
            EnginePlaces(both=(place,)), sleep=sleep, deadlines=ClientDeadlines(busy_s=5)
        )
        with pytest.raises(EnginesUnavailable, match="busy"):
            await tokens_of(client)
        assert 5 < sum(pauses) < 7


async def test_client_gives_up_after_a_bounded_number_of_faults(folder: Path) -> None:
    async with serving(folder, "b", say(Failed(reason="no room"))) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), failures_max=3, sleep=_sleep_not)
        with pytest.raises(EnginesUnavailable, match=r"after 3 attempt\(s\)"):
            await tokens_of(client)
        assert len(desk.asked) == 3


async def test_client_runs_again_with_the_tokens_that_it_has_given_out(folder: Path) -> None:
    def script(asked: Request | bytes) -> list[Answer]:
        assert isinstance(asked, Request)
        if not asked.answered_ids:
            return [Tokens(position=0, token_ids=(5,), replay_first=128), Failed(reason="lost")]
        return [Tokens(position=1, token_ids=(6,)), Finished(reason="stop")]

    async with serving(folder, "b", script) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=_sleep_not)
        assert await tokens_of(client) == [5, 6]
        again = desk.asked[1]
        assert isinstance(again, Request)
        assert (again.answered_ids, again.replay_first) == ((5,), 128)


async def test_client_ends_an_answer_that_is_whole_when_its_worker_is_lost(folder: Path) -> None:
    script = say(Tokens(position=0, token_ids=(5, 6)), Failed(reason="lost"))
    async with serving(folder, "b", script) as (desk, place):
        client = EngineClient(EnginePlaces(both=(place,)), sleep=_sleep_not)
        assert await tokens_of(client, max_tokens=2) == [5, 6]
        assert len(desk.asked) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        Status(document={}),
        Tokens(position=3, token_ids=(1,)),
        Tokens(position=0, token_ids=(1,) * 9),
    ],
)
async def test_worker_that_makes_no_sense_is_left_for_another(folder: Path, wrong: Answer) -> None:
    async with (
        serving(folder, "a", say(wrong)) as (_, senseless),
        serving(folder, "b", say(*WHOLE)) as (_, sound),
    ):
        client = EngineClient(EnginePlaces(both=(senseless, sound)), sleep=_sleep_not)
        assert await tokens_of(client) == [5, 6]


async def test_what_no_worker_would_take_is_an_error_of_the_caller(folder: Path) -> None:
    async with serving(folder, "b", say(Refused(reason="too long", cause="invalid"))) as (_, place):
        client = EngineClient(EnginePlaces(both=(place,)))
        with pytest.raises(InvalidRequest, match="too long"):
            await tokens_of(client)
        for prompt, max_tokens in (([], 4), ([-1], 4), ([2**31], 4), ([1], 0)):
            with pytest.raises(InvalidRequest):
                await anext(client.generate(prompt, max_tokens=max_tokens))


async def _sleep_not(pause_s: float) -> None:
    """Time does not matter here."""
