"""How long a client waits for a word of a worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from engine.client import ClientDeadlines
from engine.client.answer import WorkerSilent
from engine.client.conversation import converse
from engine.worker.messages import Answer, Finished, Resume, Submit, Tokens, Waiting
from tests.engine.worker.scripted_worker import SUBMIT, say, serving

DEADLINES = ClientDeadlines(connect_s=30, first_token_s=120, between_tokens_s=30)
TICKET = Resume(ticket=b"t")
TOKEN = Tokens(position=0, token_ids=(5,))
QUEUED = Waiting(state="queued", ahead=1)


class Talk:
    """A conversation in which time goes by between the words of the worker, and never else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self._now_s)

    @asynccontextmanager
    async def of(self, folder: Path, message: Submit | Resume) -> AsyncIterator[None]:
        async with (
            serving(folder, "b", say()) as (desk, place),
            aclosing(converse(place, message, DEADLINES)) as answers,
        ):
            self._desk, self._answers = desk, answers
            yield

    async def hear(self, after_s: float, *said: Answer) -> Answer:
        """What the client hears, `after_s` since the last word, when the worker says this."""
        heard = asyncio.ensure_future(anext(self._answers))
        while not self._desk.asked:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        self._now_s += after_s
        self._desk.server.deliver([("r1", answer) for answer in said])
        return await heard


@pytest.mark.parametrize(("message", "wait_s"), [(SUBMIT, 119.0), (TICKET, 29.0)])
async def test_word_that_a_request_waits_begins_the_wait_for_its_first_token_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, message: Submit | Resume, wait_s: float
) -> None:
    talk = Talk(monkeypatch)
    async with talk.of(folder, message):
        for _ in range(5):
            assert await talk.hear(wait_s, QUEUED) == QUEUED
        assert await talk.hear(wait_s, TOKEN) == TOKEN


async def test_word_that_a_request_was_preempted_begins_the_wait_for_its_next_token_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(monkeypatch)
    preempted = Waiting(state="preempted")
    async with talk.of(folder, SUBMIT):
        assert await talk.hear(119, TOKEN) == TOKEN
        for _ in range(5):
            assert await talk.hear(29, preempted) == preempted
        assert isinstance(await talk.hear(29, Finished(reason="length")), Finished)


@pytest.mark.parametrize(
    ("message", "heard", "wait_s"),
    [
        (SUBMIT, None, 120),
        (SUBMIT, QUEUED, 120),
        (SUBMIT, TOKEN, 30),
        (TICKET, None, 30),
        (TICKET, QUEUED, 30),
    ],
)
async def test_worker_that_says_nothing_is_left_after_the_same_time_whatever_it_said(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    message: Submit | Resume,
    heard: Answer | None,
    wait_s: float,
) -> None:
    talk = Talk(monkeypatch)
    async with talk.of(folder, message):
        if heard is not None:
            await talk.hear(0, heard)
        with pytest.raises(WorkerSilent, match=f"nothing from it for {wait_s} s"):
            await talk.hear(wait_s + 1)
