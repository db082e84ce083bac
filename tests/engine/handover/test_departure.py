"""Both runs of a sequence are offered, or none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from engine.block_pool import BlockPool
from engine.handover.departure import Departure, Dispatch, Parting
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark
from kvstore.client import ArenaRun, BlockingAgentClient, RunOffer
from kvstore.errors import AgentUnreachable
from kvstore.key import Namespace
from kvstore.layout import BlockLayout
from tests.engine.handover.bench import request_of
from tests.engine.stored_prompt import WINDOW, StoredPrompt


class RunInMemory:
    def __init__(self, layout: BlockLayout, blocks: int) -> None:
        self.blocks = blocks
        self.layout = SimpleNamespace(layout=layout)
        self.is_released = False
        self._sections = [bytearray(blocks * section.bytes) for section in layout.sections]

    def section(self, index: int) -> memoryview:
        return memoryview(self._sections[index])

    def release(self) -> None:
        self.is_released = True


class AgentThatGoes:
    """After its first offer; it can still be told that nobody wants that."""

    def __init__(self, happened: list[str] | None = None) -> None:
        self.leased: list[RunInMemory] = []
        self._happened = [] if happened is None else happened
        self.offered: list[RunOffer] = []

    def lease_run(self, namespace: Namespace, blocks: int, *, deadline_s: float) -> RunInMemory:
        self._happened.append("lease")
        self.leased.append(RunInMemory(namespace.layout, blocks))
        return self.leased[-1]

    def offer_run(self, run: ArenaRun, *, ttl_s: float) -> RunOffer:
        if self.offered:
            raise AgentUnreachable("agent.sock", "it has gone")
        self.offered.append(cast("RunOffer", SimpleNamespace(ticket=bytes(16), host="")))
        return self.offered[-1]

    def withdraw_offer(self, offer: RunOffer) -> None:
        self.offered.remove(offer)


def departure_by(agent: AgentThatGoes, prompt: StoredPrompt, pool: BlockPool) -> Departure:
    namespace = prompt.namespace
    return Departure(
        Dispatch(
            agent=cast("BlockingAgentClient", agent),
            mover=MemcpyMover(pool, namespace.layout),
            namespace=namespace,
            state_namespace=replace(namespace, layout=WINDOW),
            lease_deadline_s=1.0,
            offer_ttl_s=30.0,
        )
    )


def test_runs_are_leased_when_what_is_copied_is_computed() -> None:
    """Room in the arena is not idle for a pass."""
    happened: list[str] = []
    prompt = StoredPrompt(2)
    pool, agent = prompt.pool(2), AgentThatGoes(happened)

    def end_pass() -> bool:
        happened.append("computed")
        return True

    mark = cast("ComputeMark", SimpleNamespace(query=end_pass))
    block_ids = pool.allocate(2)
    departure = departure_by(agent, prompt, pool)
    departure.copy_early(3, block_ids, mark)
    assert happened == ["computed", "lease", "lease"]
    departure.release()


def test_blocks_are_not_left_on_offer_when_the_state_cannot_be_offered() -> None:
    prompt, agent = StoredPrompt(1), AgentThatGoes()
    namespace = prompt.namespace
    departure = departure_by(agent, prompt, prompt.pool(1))
    parting = Parting(
        request=request_of(3),
        token_ids=[1, 2, 3, 4],
        computed_tokens=3,
        replay_first=None,
        complete_ids=[],
        open_block=bytes(namespace.layout.block_bytes),
        state=bytes(WINDOW.block_bytes),
        marks=b"marks",
        moves=0,
    )
    with pytest.raises(AgentUnreachable):
        departure.complete(parting)
    assert agent.offered == []
    departure.release()
    assert [run.is_released for run in agent.leased] == [True, True]
