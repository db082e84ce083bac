"""The worker's socket, with a desk behind it that says what a test wants."""

import asyncio
import logging
import re
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import pytest

from engine.client.answer import WorkerLost
from engine.request import Request
from engine.worker import server as server_module
from engine.worker.connection import ConnectionBounds, UnsentAge
from engine.worker.messages import (
    AskStatus,
    Failed,
    Refused,
    Resume,
    Status,
    Submit,
    Tokens,
    Waiting,
    decode_answer,
    encode_frame,
    pack_tokens,
)
from tests.engine.worker.scripted_worker import SUBMIT, WHOLE, answers_of, say, serving


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


async def test_request_that_the_engine_does_not_take_is_refused_and_does_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, "b", say()) as (desk, place):
        refusal = Refused(reason="too many", cause="busy")
        for name, message in (("submit", SUBMIT), ("resume", Resume(ticket=b"t"))):
            monkeypatch.setattr(desk, name, lambda *_: refusal)
            assert await answers_of(place, message) == [refusal]
        assert desk.server.requests == 0
        assert desk.aborted == []


async def test_word_to_a_client_that_waits_is_not_the_last_one(folder: Path) -> None:
    waits = [Waiting(state="queued", ahead=2), Waiting(state="begun")]
    async with serving(folder, "b", say(*waits, *WHOLE)) as (_, place):
        assert await answers_of(place, SUBMIT) == [*waits, *WHOLE]


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


async def test_client_that_is_behind_for_too_long_is_let_go_however_little_it_leaves(
    folder: Path,
) -> None:
    now_s = 1000.0
    bounds = ConnectionBounds(unsent_bytes_max=1 << 30, unsent_s=5.0)
    async with serving(folder, "b", say(), bounds, clock=lambda: now_s) as (desk, place):
        _, writer = await asyncio.open_unix_connection(place.path, limit=16)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(encode_frame(SUBMIT))
        while not desk.asked:
            await asyncio.sleep(0.001)
        answers = (Tokens(position=n, token_ids=(1,) * 20_000) for n in count())
        # More than any socket holds.
        desk.server.deliver([("r1", next(answers)) for _ in range(200)])
        now_s += 4.9
        desk.server.deliver([("r1", next(answers))])
        assert desk.aborted == []
        now_s += 0.2
        desk.server.deliver([("r1", next(answers))])
        assert desk.aborted == ["r1"]
        assert desk.server.requests == 0
        writer.close()


async def test_client_that_reads_is_kept_however_seldom_an_answer_comes(folder: Path) -> None:
    now_s = 1000.0
    bounds = ConnectionBounds(unsent_s=5.0)
    async with serving(folder, "b", say(), bounds, clock=lambda: now_s) as (desk, place):
        reader, writer = await asyncio.open_unix_connection(place.path)
        writer.write(encode_frame(SUBMIT))
        while not desk.asked:
            await asyncio.sleep(0.001)
        for position in range(4):
            now_s += 100.0
            answer = Tokens(position=position, token_ids=(1,) * 200_000)
            desk.server.deliver([("r1", answer)])
            frame = encode_frame(answer)
            assert await reader.readexactly(len(frame)) == frame
        assert desk.aborted == []
        writer.close()


@pytest.mark.parametrize(
    ("written", "unsent", "age_s"),
    [
        ([], [0, 0], 0.0),
        ([10, 10], [10, 20], 10.0),
        # What was there at the last look is sent, and more came: it is behind by that look.
        ([10, 10], [10, 5], 0.0),
        ([10, 10, 10], [10, 15, 21], 20.0),
    ],
)
def test_age_of_what_is_not_sent(written: list[int], unsent: list[int], age_s: float) -> None:
    now_s = 0.0
    age = UnsentAge(lambda: now_s)
    measured = 0.0
    for count_bytes, left_bytes in zip_longest(written, unsent, fillvalue=0):
        age.note_written(count_bytes)
        measured = age.measure_s(left_bytes)
        now_s += 10.0
    assert measured == age_s


@pytest.mark.parametrize("has_last_answer", [False, True])
async def test_worker_that_ends_waits_for_no_client_that_does_not_read(
    folder: Path, has_last_answer: bool
) -> None:
    bounds = ConnectionBounds(unsent_bytes_max=1 << 30, last_answer_s=1000)
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    before = asyncio.all_tasks()
    async with serving(folder, "b", say(), bounds) as (desk, place):
        _, writer = await asyncio.open_unix_connection(place.path)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(encode_frame(SUBMIT))
        while not desk.asked:
            await asyncio.sleep(0.001)
        more = Tokens(position=0, token_ids=(1,) * 100_000)
        desk.server.deliver([("r1", more)] * 40)
        if has_last_answer:
            desk.server.deliver([("r1", Failed(reason="drained"))])
            await desk.server.wait_until_read(0.01)
        # As the end of the loop does it.
        for task in asyncio.all_tasks() - before:
            task.cancel()
        await desk.server.wait_until_read(30)
        assert desk.server.status()["connections"]["open"] == 0, "it waits until its client reads"
        writer.close()
    assert faults == []


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


async def test_worker_that_ends_waits_for_no_client_that_asked_nothing(folder: Path) -> None:
    async with serving(folder, "b", say(), ConnectionBounds(request_s=1000)) as (desk, place):
        _, writer = await asyncio.open_unix_connection(place.path)
        while not desk.server.status()["connections"]["open"]:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):
            await desk.server.wait_until_read(1000)
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
        assert desk.aborted == ["r1"]
        assert desk.server.requests == 0
        writer.close()


LONG = Submit(prompt_ids=pack_tokens([1] * 1_000_000), max_tokens=4)


async def test_long_messages_that_are_only_announced_keep_none_from_being_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LARGE_MESSAGES_MAX", 1)
    async with serving(folder, "b", say(*WHOLE), ConnectionBounds(request_s=1000)) as (desk, place):
        idle = []
        for _ in range(3):
            _, writer = await asyncio.open_unix_connection(place.path)
            writer.write((70_000).to_bytes(4, "little") + b"x")
            idle.append(writer)
        while desk.server.status()["connections"]["open"] < len(idle):
            await asyncio.sleep(0.001)
        assert await answers_of(place, LONG) == list(WHOLE)
        for writer in idle:
            writer.close()


async def test_long_message_that_is_not_read_is_refused_as_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LARGE_MESSAGES_MAX", 0)
    bounds = ConnectionBounds(request_s=30, large_wait_s=0.01)
    async with serving(folder, "b", say(*WHOLE), bounds) as (desk, place):
        (refused,) = await answers_of(place, LONG)
        assert isinstance(refused, Refused)
        assert refused.cause == "busy"
        assert desk.asked == []
        assert await answers_of(place, SUBMIT) == list(WHOLE)


async def test_client_of_a_refused_long_message_reads_the_answer_after_it_has_sent_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LARGE_MESSAGES_MAX", 0)
    async with serving(folder, "b", say(), ConnectionBounds(large_wait_s=0.01)) as (_, place):
        reader, writer = await asyncio.open_unix_connection(place.path)
        writer.write(encode_frame(LONG))
        await writer.drain()
        refused = decode_answer((await reader.read())[4:])
        assert isinstance(refused, Refused)
        assert refused.cause == "busy"
        writer.close()


async def test_long_message_that_comes_to_a_halt_is_refused_as_busy(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "engine.worker.connection")
    frame = encode_frame(LONG)
    async with serving(folder, "b", say(), ConnectionBounds(large_stall_s=0.01)) as (desk, place):
        reader, writer = await asyncio.open_unix_connection(place.path)
        writer.write(frame[:-1])
        refused = decode_answer((await reader.read())[4:])
        assert isinstance(refused, Refused)
        assert refused.cause == "busy"
        assert re.fullmatch(rf"sent only \d+ of {len(frame) - 4} bytes", refused.reason)
        assert desk.asked == []
        assert caplog.messages == [f"a long message is refused: {refused.reason}"]
        writer.close()
