"""A decode worker is killed while it takes a sequence over: after the runs have become its own, and
before the sequence has. Nobody else has them any more, so the request is run again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.client import AnswerPart, EngineClient
from engine.sampling import Sampling
from kvstore.client import AgentClient
from tests.engine.worker.conftest import Alone
from tests.engine.worker.forked_worker import Fault
from tests.engine.worker.worker_process import END_S, PATIENT, TICKETS_TRIED_MAX, Site

SEEDED = Sampling(temperature=0.9, top_k=50, seed=23)
TOKENS = 12


async def wait_until_agent_says(
    agent: AgentClient, is_so: Callable[[dict[str, Any]], bool]
) -> None:
    async with asyncio.timeout(END_S):
        while not is_so(await agent.status()):
            await asyncio.sleep(0.02)


async def whole_stream(client: EngineClient, prompt: list[int]) -> tuple[list[int], AnswerPart]:
    """All tokens, of which none is missing and none comes twice, and the last part."""
    found: list[int] = []
    async for part in client.generate(prompt, max_tokens=TOKENS, sampling=SEEDED):
        assert part.position == len(found)
        found += part.token_ids
    return found, part


@pytest.mark.parametrize("fault", ["killed as it takes", "killed as it attaches"])
async def test_stream_goes_on_when_its_receiver_is_killed_with_the_sequence_in_its_hands(
    site: Site, alone: Alone, fault: Fault
) -> None:
    doomed = replace(site["d01"], name="d00", fault=fault)
    doomed.start()
    try:
        doomed.wait_until_ready()
        places = site.places("p01", "d02")
        places = replace(places, decode=(doomed.address, *places.decode))
        client = EngineClient(places, deadlines=PATIENT)
        draw = random.Random(fault)
        for _ in range(TICKETS_TRIED_MAX):
            # An agent that is short of time gives no ticket, and nobody takes anything over then.
            prompt = [draw.randrange(3, 380) for _ in range(draw.randrange(130, 300))]
            found, last = await whole_stream(client, prompt)
            assert found == alone(prompt, TOKENS, SEEDED)
            if not doomed.is_running:
                break
        assert doomed.wait() == -signal.SIGKILL
        assert last.report is not None
        assert any("d00.sock" in text for text in last.report.tried)
    finally:
        if doomed.is_running:
            doomed.kill()
    await check_nothing_is_left(site)


async def check_nothing_is_left(site: Site) -> None:
    """Neither in the engine that sent it, nor in the agent that it went by."""
    sender = site["p01"]
    assert sender.agent is not None
    async with asyncio.timeout(END_S):
        while True:
            engine = (await sender.status())["engine"]
            if engine["free_blocks"] == engine["pool_blocks"] and engine["held"] == 0:
                break
            await asyncio.sleep(0.02)
    async with AgentClient.connect(sender.agent, name="looks") as agent:
        await wait_until_agent_says(
            agent, lambda told: told["offers"]["open"] == 0 and told["arena"]["runs"] == 0
        )
