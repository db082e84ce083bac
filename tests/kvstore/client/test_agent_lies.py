"""An agent that says what cannot be is believed in nothing: its connection ends."""

import asyncio

import pytest

from kvstore.agent_messages import (
    Match,
    Matched,
    MatchPrompt,
    PromptMatched,
    StoreEnded,
    StoreRun,
)
from kvstore.client import AgentClient
from kvstore.errors import AgentUnreachable
from tests.kvstore.client.agent_meeting import KEYS, NAMESPACE, begin, meet
from tests.kvstore.client.scripted_agent import ScriptedAgent


async def test_more_blocks_than_were_asked_for_end_the_connection(
    client: AgentClient, agent: ScriptedAgent
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, KEYS))
    await end.open_namespace()
    request_id, _ = await end.read(Match)
    await end.answer(request_id, Matched(4))
    with pytest.raises(AgentUnreachable, match="4 blocks of 3 are there"):
        await asked
    assert not client.is_connected


def matched(
    blocks: int, hit_tokens: int, replay_tokens: int, window_anchor: int | None
) -> PromptMatched:
    return PromptMatched(
        matched_blocks=blocks,
        hit_tokens=hit_tokens,
        replay_tokens=replay_tokens,
        window_anchor=window_anchor,
        window_host="",
        match_s=0.0,
        lookup_s=0.0,
    )


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (matched(4, 128, 0, 128), "4 blocks of 3 are there"),
        (matched(3, 100, 0, None), "a hit of 100 tokens and 0 to replay"),
        (matched(3, 128, 64, None), "a hit of 128 tokens and 64 to replay"),
        (matched(2, 256, 128, None), "384 tokens of 2 blocks"),
        (matched(3, 256, 0, 77), "window state at 77 for a hit of 256 tokens"),
        (matched(3, 0, 0, 0), "window state at 0 for a hit of 0 tokens"),
    ],
)
async def test_hit_that_cannot_be_ends_the_connection(
    client: AgentClient, agent: ScriptedAgent, told: PromptMatched, message: str
) -> None:
    end = await meet(client, agent)
    asked = asyncio.create_task(client.match(NAMESPACE, list(range(400)), is_dense=False))
    await end.open_namespace()
    request_id, _ = await end.read(MatchPrompt)
    await end.answer(request_id, told)
    with pytest.raises(AgentUnreachable, match=f"matched a prompt: {message}"):
        await asked
    assert not client.is_connected


@pytest.mark.parametrize("told", [{"stored": 2}, {"stored": 2, "known": 1, "failed": 1}, {}])
async def test_save_of_which_the_numbers_do_not_add_up_ends_the_connection(
    client: AgentClient, agent: ScriptedAgent, told: dict[str, int]
) -> None:
    """Its blocks would be pending for ever in the books of an engine, or be counted twice."""
    end = await meet(client, agent)
    mine, _ = await begin(client, end)
    save = client.save_run(NAMESPACE, KEYS, mine)
    request_id, _ = await end.read(StoreRun)
    await end.answer(request_id, StoreEnded(**told))
    with pytest.raises(AgentUnreachable, match=f"what became of {sum(told.values())} blocks of 3"):
        await save
    assert not client.is_connected
