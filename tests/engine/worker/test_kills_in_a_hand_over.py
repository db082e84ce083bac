"""Either side of a hand-over is killed at each of its steps: its client sees one stream, and what
the dead worker had leased, offered or taken is free again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine.client import AnswerReport, EngineClient, EnginePlaces
from engine.sampling import Sampling
from kvstore.client import AgentClient
from tests.engine.worker.conftest import Alone
from tests.engine.worker.forked_worker import Fault
from tests.engine.worker.worker_process import (
    END_S,
    PATIENT,
    TICKETS_TRIED_MAX,
    Site,
    WorkerProcess,
    generate_with_report,
)

SEEDED = Sampling(temperature=0.9, top_k=50, seed=23)
TOKENS = 12

torture = pytest.mark.torture
"""Further cases of a test whose path others take."""


@contextmanager
def doomed_worker(like: WorkerProcess, name: str, fault: Fault) -> Iterator[WorkerProcess]:
    """One more worker of the role, which a fault will kill."""
    doomed = replace(like, name=name, fault=fault)
    doomed.start()
    try:
        doomed.wait_until_ready()
        yield doomed
        assert doomed.wait() == -signal.SIGKILL
    finally:
        if doomed.is_running:
            doomed.kill()


async def stream_until_killed(
    doomed: WorkerProcess, places: EnginePlaces, alone: Alone
) -> AnswerReport:
    """Of the first answer that outlived the worker."""
    client = EngineClient(places, deadlines=PATIENT)
    draw = random.Random(doomed.fault)
    for _ in range(TICKETS_TRIED_MAX):
        # An agent that is short of time gives no ticket, and nothing is handed over then.
        prompt = [draw.randrange(3, 380) for _ in range(draw.randrange(130, 300))]
        found, report = await generate_with_report(client, prompt, TOKENS, SEEDED)
        assert found == alone(prompt, TOKENS, SEEDED)
        if not doomed.is_running:
            return report
    raise AssertionError("nothing was ever handed over")


@pytest.mark.parametrize(
    "fault",
    [
        "killed when it has leased",
        pytest.param("killed when it has copied", marks=torture),
        "killed between its offers",
        pytest.param("killed when it has offered", marks=torture),
        pytest.param("killed when its ticket is sent", marks=torture),
    ],
)
async def test_stream_goes_on_when_its_sender_is_killed(
    site: Site, alone: Alone, fault: Fault
) -> None:
    with doomed_worker(site["p01"], "p00", fault) as doomed:
        places = site.places("p02", "d01")
        places = replace(places, prefill=(doomed.address, *places.prefill))
        report = await stream_until_killed(doomed, places, alone)
        if fault != "killed when its ticket is sent":
            assert any("p00.sock" in text for text in report.tried)
    await check_nothing_is_left(site["d01"])


@pytest.mark.parametrize(
    "fault",
    [
        # The run that it had not taken waits for as long as it is on offer.
        pytest.param("killed between its takes", marks=[torture, pytest.mark.timeout(120)]),
        "killed when it has taken",
        "killed as it attaches",
    ],
)
async def test_stream_goes_on_when_its_receiver_is_killed(
    site: Site, alone: Alone, fault: Fault
) -> None:
    """After a run has become its own, and before the sequence has: nobody else has it any more."""
    with doomed_worker(site["d01"], "d00", fault) as doomed:
        places = site.places("p01", "d02")
        places = replace(places, decode=(doomed.address, *places.decode))
        report = await stream_until_killed(doomed, places, alone)
        assert any("d00.sock" in text for text in report.tried)
    await check_nothing_is_left(site["p01"])


async def check_nothing_is_left(other_side: WorkerProcess) -> None:
    """Neither in the engine at the other side, nor in the agent that it went by."""
    assert other_side.agent is not None
    async with asyncio.timeout(END_S):
        while True:
            engine = (await other_side.status())["engine"]
            if engine["free_blocks"] == engine["pool_blocks"] and engine["held"] == 0:
                break
            await asyncio.sleep(0.02)
        async with AgentClient.connect(other_side.agent, name="looks") as agent:
            while True:
                told = await agent.status()
                if told["offers"]["open"] == 0 and told["arena"]["runs"] == 0:
                    break
                await asyncio.sleep(0.02)
