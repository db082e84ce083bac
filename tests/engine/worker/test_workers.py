"""Prefill and decode workers, and a client that sees one stream whatever becomes of them."""

import asyncio
import os
import random
import signal
import stat
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.client import AnswerReport, ClientDeadlines, EngineClient
from engine.client.answer import WorkerLost
from engine.client.conversation import converse
from engine.errors import EnginesUnavailable, InvalidRequest
from engine.sampling import GREEDY, Sampling
from engine.worker.messages import (
    Finished,
    Refused,
    Resume,
    Tokens,
    decode_answer,
    encode_frame,
    pack_tokens,
)
from engine.worker.options import Role
from tests.engine.worker.conftest import Alone
from tests.engine.worker.forked_worker import Fault
from tests.engine.worker.worker_process import (
    PATIENT,
    Site,
    WorkerProcess,
    ask,
    ask_for_ticket,
    generate,
    generate_with_report,
    repeat_until_moved,
    submission,
    wait_until_status,
)

SEEDED = Sampling(temperature=0.9, top_k=50, seed=11)
IMPATIENT = ClientDeadlines(connect_s=5, first_token_s=5, between_tokens_s=3, patience_s=50)
"""For tests in which somebody stands still; whom it takes for lost by mistake costs only time."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed * 10_000 + length)
    return [source.randrange(3, 380) for _ in range(length)]


def client_of(site: Site, *names: str) -> EngineClient:
    return EngineClient(site.places(*names), deadlines=PATIENT)


# --- equal tokens


@pytest.mark.parametrize(
    ("length", "sampling"),
    [(1, SEEDED), (128, GREEDY), (133, SEEDED), (252, GREEDY), (300, SEEDED)],
)
async def test_prefill_hand_over_and_decode_are_one_engine(
    site: Site, alone: Alone, length: int, sampling: Sampling
) -> None:
    prompt, client = prompt_of(length), client_of(site, "p01", "d01")

    async def answer() -> AnswerReport:
        found, report = await generate_with_report(client, prompt, 8, sampling)
        assert found == alone(prompt, 8, sampling)
        return report

    await repeat_until_moved(answer, moves=1)


async def test_turn_after_an_answer_has_equal_tokens(site: Site, alone: Alone) -> None:
    prompt = prompt_of(300, seed=1)
    client = client_of(site, "p02", "d02")
    first = await generate(client, prompt, 6)
    turn = [*prompt, *first, *prompt_of(40, seed=2)]

    async def answer() -> AnswerReport:
        found, report = await generate_with_report(client, turn, 4)
        assert found == alone(turn, 4)
        return report

    await repeat_until_moved(answer, moves=1)


async def test_clients_at_one_time_get_their_own_answers(site: Site, alone: Alone) -> None:
    prompts = [prompt_of(length, seed=3) for length in (20, 150, 260, 40)]
    clients = [client_of(site), client_of(site)]
    answers = await asyncio.gather(
        *(generate(clients[i % 2], prompt, 5 + i, SEEDED) for i, prompt in enumerate(prompts))
    )
    assert answers == [alone(prompt, 5 + i, SEEDED) for i, prompt in enumerate(prompts)]


async def test_log_of_each_worker_says_what_became_of_its_part(site: Site) -> None:
    before = {name: site[name].log_path.read_text() for name in ("p01", "d01")}
    prompt = prompt_of(301, seed=4)
    _, ticket = await ask_for_ticket(site["p01"], submission(prompt, 8))
    await ask(site["d01"].address, Resume(ticket=ticket))
    said = {name: site[name].log_path.read_text().removeprefix(before[name]) for name in before}
    assert " ended=prefilled prompt_tokens=301 hit_tokens=0 " in said["p01"]
    assert " computed_tokens=301 answer_tokens=1 ttft_s=" in said["p01"]
    assert " ended=length prompt_tokens=301 hit_tokens=0 " in said["d01"]
    assert " computed_tokens=0 answer_tokens=8 ttft_s=0.000" in said["d01"]


async def test_answer_of_one_token_is_not_handed_over(site: Site, alone: Alone) -> None:
    prompt = prompt_of(30)
    answers = await ask(site["p01"].address, submission(prompt, 1))
    assert isinstance(answers[0], Tokens)
    assert answers[0].token_ids == tuple(alone(prompt, 1))
    assert isinstance(answers[1], Finished)
    assert answers[1].reason == "length"


async def test_answer_ends_with_its_stop_token(site: Site, alone: Alone) -> None:
    prompt = prompt_of(50)
    whole = alone(prompt, 10)
    stop = whole[4]
    parts = [
        part
        async for part in client_of(site, "p01", "d01").generate(
            prompt, max_tokens=10, stop_ids=frozenset({stop})
        )
    ]
    found = [token for part in parts for token in part.token_ids]
    assert found == whole[: whole.index(stop) + 1]
    assert parts[-1].finish_reason == "stop"


# --- refusals and garbage


@pytest.mark.parametrize(
    ("prompt", "reason"), [([1, 100_000], "token id"), ([5] * 200_000, "prompt tokens")]
)
async def test_request_that_no_engine_can_answer_is_refused(
    site: Site, prompt: list[int], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{reason}: given \d+, expected \d"):
        await generate(client_of(site), prompt, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\0\0\0\0",
        encode_frame(submission([1], 4))[:-3],
        encode_frame(Resume(ticket=b"none")),
        encode_frame(submission([1], 4))[4:],
    ],
)
async def test_garbage_is_refused_or_ends_and_harms_nobody(
    site: Site, alone: Alone, data: bytes
) -> None:
    worker = site["d01"]
    reader, writer = await asyncio.open_unix_connection(worker.address.path)
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(30):
        said = await reader.read()
    writer.close()
    if said:
        assert isinstance(decode_answer(said[4:]), Refused)
    prompt = prompt_of(30)
    assert await generate(client_of(site, "p01", "d01"), prompt, 4) == alone(prompt, 4)


async def test_damaged_ticket_is_refused_and_another_one_can_be_had(site: Site) -> None:
    _, ticket = await ask_for_ticket(site["p01"], submission(prompt_of(140), 9))
    damaged = bytearray(ticket)
    damaged[len(damaged) // 2] ^= 1
    (refused,) = await ask(site["d01"].address, Resume(ticket=bytes(damaged)))
    assert isinstance(refused, Refused)
    assert refused.cause == "ticket"
    whole = await ask(site["d01"].address, Resume(ticket=ticket))
    assert isinstance(whole[-1], Finished)
    (again,) = await ask(site["d02"].address, Resume(ticket=ticket))
    assert isinstance(again, Refused), "a ticket is good once"


async def test_requests_of_a_client_that_goes_away_end(site: Site) -> None:
    status = await site["d01"].status()
    free = status["engine"]["free_states"]
    async with aclosing(client_of(site, "p01", "d01").generate([7] * 60, max_tokens=2000)) as parts:
        async for part in parts:
            if part.position > 2:
                break
    for name in ("p01", "d01"):
        await wait_until_status(site[name], requests=0)
    async with asyncio.timeout(30):
        while (await site["d01"].status())["engine"]["free_states"] < free:
            await asyncio.sleep(0.01)


# --- lost workers


async def test_killed_workers_cost_no_token(site: Site, alone: Alone) -> None:
    prompt, found = prompt_of(240), list[int]()
    parts = client_of(site).generate(prompt, max_tokens=30, sampling=SEEDED)
    async for part in parts:
        assert part.position == len(found)
        found += part.token_ids
        if len(found) == 1:
            # The ticket is on its way, or not yet made: both are right.
            site["p01"].kill()
        if len(found) == 7:
            site["d01"].kill()
    assert found == alone(prompt, 30, SEEDED)


async def test_ticket_outlives_the_worker_that_made_it_and_is_good_once(
    site: Site, alone: Alone
) -> None:
    prompt = prompt_of(220)
    said, ticket = await ask_for_ticket(site["p01"], submission(prompt, 16))
    site["p01"].kill()
    resume = Resume(ticket=ticket)
    async with aclosing(converse(site["d01"].address, resume, PATIENT)) as answers:
        async for answer in answers:
            said.append(answer)
            if len(said) == 6:
                break
    site["d01"].kill()
    found = [token for one in said if isinstance(one, Tokens) for token in one.token_ids]
    assert found == alone(prompt, 16)[: len(found)]
    (refused,) = await ask(site["d02"].address, resume)
    assert isinstance(refused, Refused)
    assert refused.cause == "ticket"
    rerun = submission(prompt, 16)
    rerun.answered_ids = pack_tokens(found)
    rest = await ask(site["d02"].address, rerun)
    found += [token for one in rest if isinstance(one, Tokens) for token in one.token_ids]
    assert found == alone(prompt, 16)
    with pytest.raises(EnginesUnavailable, match=r"p01\.sock: no connection.*d01\.sock"):
        await generate(client_of(site, "p01", "d01"), [1, 2], 4)


async def test_stream_goes_on_when_its_only_decode_worker_is_started_again(
    site: Site, alone: Alone
) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 12:
            # Twice what its faults were bounded by when they were counted.
            site["d01"].start()
        await asyncio.sleep(min(pause_s, 0.05))

    prompt, found = prompt_of(200), list[int]()
    places = site.places("p01", "d01")
    client = EngineClient(places, deadlines=PATIENT, sleep=sleep)
    async for part in client.generate(prompt, max_tokens=30, sampling=SEEDED):
        assert part.position == len(found)
        found += part.token_ids
        if len(found) == 9:
            site["d01"].kill()
    assert found == alone(prompt, 30, SEEDED)
    assert len(pauses) >= 12
    site["d01"].wait_until_ready()


# --- drain


async def test_drained_worker_sends_its_sequences_on_at_any_token(site: Site, alone: Alone) -> None:
    prompt = prompt_of(120)
    client = client_of(site, "p01", "d01", "d02")

    async def answer() -> AnswerReport:
        site.mend()
        found: list[int] = []
        async for part in client.generate(prompt, max_tokens=36, sampling=SEEDED):
            assert part.position == len(found)
            found += part.token_ids
            if len(found) == 3:
                site["d01"].send(signal.SIGTERM)
            if len(found) == 14:
                assert site["d01"].wait() == 0
                site["d01"].start()
                site["d01"].wait_until_ready()
                site["d02"].send(signal.SIGTERM)
        assert found == alone(prompt, 36, SEEDED)
        assert part.report is not None
        assert site["d02"].wait() == 0
        return part.report

    await repeat_until_moved(answer, moves=3)
    assert " ended=moved prompt_tokens=120 " in site["d02"].log_path.read_text()


async def test_draining_worker_refuses_and_what_ends_in_time_is_not_moved(
    site: Site, alone: Alone
) -> None:
    worker = replace(site["d01"], name="d03", grace_s=1000.0)
    worker.start()
    try:
        worker.wait_until_ready()
        prompt, found = prompt_of(80), list[int]()
        endless = asyncio.ensure_future(ask(worker.address, submission(prompt, 4000)))
        async with aclosing(converse(worker.address, submission(prompt, 24), PATIENT)) as answers:
            async for answer in answers:
                if isinstance(answer, Tokens):
                    found += answer.token_ids
                if len(found) == 2:
                    worker.send(signal.SIGTERM)
                    await wait_until_status(worker, is_draining=True)
                    (refused,) = await ask(worker.address, submission(prompt, 4))
                    assert isinstance(refused, Refused)
                    assert refused.cause == "draining"
            assert isinstance(answer, Finished)
        assert found == alone(prompt, 24)
        assert worker.is_running
        worker.send(signal.SIGTERM)
        with pytest.raises(WorkerLost, match="closed the connection"):
            await endless
        assert worker.wait() == 0
    finally:
        if worker.is_running:
            worker.kill()


async def test_interrupted_worker_ends_at_once_and_costs_no_token(site: Site, alone: Alone) -> None:
    prompt, found = prompt_of(90), list[int]()
    async for part in client_of(site, "p01", "d01", "d02").generate(prompt, max_tokens=24):
        found += part.token_ids
        if len(found) == 4:
            site["d01"].send(signal.SIGINT)
    assert found == alone(prompt, 24)
    assert site["d01"].wait() == 0
    path = site["d01"].address.path
    assert path is not None
    assert not path.exists()


# --- faults of the engine itself


@pytest.mark.parametrize("fault", ["dies", "hangs"])
async def test_worker_does_not_outlive_its_engine(
    folder: Path, nano_path: Path, fault: Fault
) -> None:
    worker = WorkerProcess("b01", Role.BOTH, folder, nano_path, agent=None, fault=fault)
    worker.start()
    worker.wait_until_ready()
    asked = asyncio.ensure_future(ask(worker.address, submission([1, 2], 4)))
    async with asyncio.timeout(30):
        while f"the engine {fault}" not in worker.log_path.read_text():
            await asyncio.sleep(0.01)
    if fault == "hangs":
        await wait_until_status(worker, requests=1)
        worker.send(signal.SIGINT)
    with pytest.raises(WorkerLost, match="closed the connection"):
        await asked
    assert worker.wait() == 1
    said = {"dies": "AssertionError", "hangs": "the engine hangs in a step"}[fault]
    assert said in worker.log_path.read_text()


# --- standing still


@pytest.mark.parametrize("who", ["p01", "d01", "agent", "node"])
async def test_process_that_stands_still_costs_time_and_no_token(
    site: Site, alone: Alone, who: str
) -> None:
    prompt, found = prompt_of(260, seed=ord(who[0])), list[int]()
    pids = {"agent": site.agent_pid, "node": site.node_pid}
    pid = pids.get(who) or site[who].pid
    client = EngineClient(site.places(), deadlines=IMPATIENT, faults_max=100)
    if who == "p01":
        os.kill(pid, signal.SIGSTOP)
    async for part in client.generate(prompt, max_tokens=12, sampling=SEEDED):
        assert part.position == len(found)
        found += part.token_ids
        if len(found) == (5 if who == "d01" else 1):
            os.kill(pid, signal.SIGSTOP)
    assert found == alone(prompt, 12, SEEDED)
    again = prompt_of(100, seed=ord(who[0]))
    assert await generate(client, again, 3) == alone(again, 3)


async def test_socket_is_of_this_user_only(site: Site) -> None:
    path = site["p01"].address.path
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
