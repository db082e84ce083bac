"""Both runs of a sequence are offered, or none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from engine.block_pool import BlockPool
from engine.handover.departure import LEASE_LEAST_S, Departure, Dispatch, Parting
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark
from kvstore.client import ArenaRun, BlockingAgentClient, RunOffer
from kvstore.errors import AgentUnreachable
from kvstore.key import Namespace
from tests.engine.handover.agent_in_memory import RunInMemory
from tests.engine.handover.bench import request_of
from tests.engine.llm_engine.engine_bench import Clock
from tests.engine.stored_prompt import WINDOW, StoredPrompt


class AgentThatGoes:
    """After its first offer; it can still be told that nobody wants that."""

    def __init__(self, clock: Clock, happened: list[str] | None = None) -> None:
        self.lease_takes_s = 0.0
        self.waits_s: list[float] = []
        """What each lease might have taken."""
        self._clock = clock
        self.leased: list[RunInMemory] = []
        self._happened = [] if happened is None else happened
        self.offered: list[RunOffer] = []

    def lease_run(self, namespace: Namespace, blocks: int, *, deadline_s: float) -> RunInMemory:
        self._happened.append("lease")
        self.waits_s.append(deadline_s)
        self._clock.now_s += self.lease_takes_s
        self.leased.append(RunInMemory(namespace, blocks))
        return self.leased[-1]

    def offer_run(self, run: ArenaRun, *, ttl_s: float) -> RunOffer:
        if self.offered:
            raise AgentUnreachable("agent.sock", "it has gone")
        self.offered.append(cast("RunOffer", SimpleNamespace(ticket=bytes(16), host="")))
        return self.offered[-1]

    def withdraw_offer(self, offer: RunOffer) -> None:
        self.offered.remove(offer)


def departure_by(
    agent: AgentThatGoes, prompt: StoredPrompt, pool: BlockPool, clock: Clock
) -> Departure:
    namespace = prompt.namespace
    return Departure(
        Dispatch(
            agent=cast("BlockingAgentClient", agent),
            mover=MemcpyMover(pool, namespace.layout),
            namespace=namespace,
            state_namespace=replace(namespace, layout=WINDOW),
            clock=clock,
            offer_ttl_s=30.0,
        )
    )


def parting_of(prompt: StoredPrompt) -> Parting:
    """A sequence without a complete block."""
    return Parting(
        request=request_of(3),
        token_ids=[1, 2, 3, 4],
        computed_tokens=3,
        replay_first=None,
        complete_ids=[],
        open_block=bytes(prompt.namespace.layout.block_bytes),
        state=bytes(WINDOW.block_bytes),
        marks=b"marks",
        moves=0,
    )


def test_runs_are_leased_when_what_is_copied_is_computed() -> None:
    """Room in the arena is not idle for a pass."""
    happened: list[str] = []
    prompt = StoredPrompt(2)
    pool, clock = prompt.pool(2), Clock()
    agent = AgentThatGoes(clock, happened)

    def end_pass() -> bool:
        happened.append("computed")
        return True

    mark = cast("ComputeMark", SimpleNamespace(query=end_pass))
    block_ids = pool.allocate(2)
    departure = departure_by(agent, prompt, pool, clock)
    departure.copy_early(3, block_ids, mark)
    assert happened == ["computed", "lease", "lease"]
    assert agent.waits_s == [LEASE_LEAST_S] * 2, "who is behind it in line would wait too"
    departure.release()


def test_blocks_are_not_left_on_offer_when_the_state_cannot_be_offered() -> None:
    prompt, clock = StoredPrompt(1), Clock()
    agent = AgentThatGoes(clock)
    departure = departure_by(agent, prompt, prompt.pool(1), clock)
    with pytest.raises(AgentUnreachable):
        departure.complete(parting_of(prompt), until_s=clock.now_s + 1)
    assert agent.offered == []
    departure.release()
    assert [run.is_released for run in agent.leased] == [True, True]


def test_both_runs_of_a_sequence_are_waited_for_together() -> None:
    prompt, clock = StoredPrompt(1), Clock()
    agent = AgentThatGoes(clock)
    agent.lease_takes_s = 0.75
    departure = departure_by(agent, prompt, prompt.pool(1), clock)
    with pytest.raises(AgentUnreachable):
        departure.complete(parting_of(prompt), until_s=clock.now_s + 1)
    assert agent.waits_s == [1, 0.25]
    departure.release()
