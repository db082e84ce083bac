"""A client and a scripted agent that meet: what tests of both begin with."""

import asyncio

from kvstore.client import AgentClient, ArenaRun
from tests.kvstore.blocks import RandomBlocks
from tests.kvstore.client.scripted_agent import AgentEnd, ScriptedAgent, ScriptedRun
from tests.patience import PATIENCE_S

BLOCKS = RandomBlocks(3, block_bytes=2048, seed=11)
NAMESPACE, KEYS = BLOCKS.namespace, BLOCKS.keys


async def meet(client: AgentClient, agent: ScriptedAgent) -> AgentEnd:
    """The agent's end of a connection that is greeted."""
    end = await agent.accept_and_greet()
    await until(lambda: client.is_connected)
    return end


async def until(is_so: object) -> None:
    assert callable(is_so)
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.005)


async def begin(client: AgentClient, end: AgentEnd, run: int = 5) -> tuple[ArenaRun, ScriptedRun]:
    """A run of three blocks, on both sides."""
    leasing = asyncio.create_task(client.lease_run(NAMESPACE, 3))
    await end.open_namespace()
    theirs = await end.lease(NAMESPACE.layout, run=run)
    mine = await leasing
    assert mine is not None
    end.client_runs.append(mine)
    return mine, theirs
