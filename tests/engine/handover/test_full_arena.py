"""An arena without room costs each sequence its ticket, and none of them the time of the others."""

from __future__ import annotations

from threading import Event
from typing import cast

import pytest

from engine.handover.sender import LEASE_DEADLINE_S, HandoverSender
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from kvstore.key import Namespace
from tests.engine.handover.bench import request_of
from tests.engine.handover.lone_engine import OpenEngine
from tests.engine.llm_engine.engine_bench import Clock
from tests.patience import PATIENCE_S

SEQUENCES = 16


class FullArena:
    """An agent that answers when the test lets it, and then, after all the time that it may take,
    has no room. That time passes on the test's clock."""

    def __init__(self, clock: Clock) -> None:
        self.may_answer = Event()
        self.asked = 0
        self._clock = clock

    def lease_run(self, namespace: Namespace, blocks: int, *, deadline_s: float) -> None:
        assert self.may_answer.wait(PATIENCE_S)
        self.asked += 1
        self._clock.now_s += deadline_s


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_last_of_many_that_leave_is_told_as_soon_as_the_first_that_there_is_no_room(
    open_engine: OpenEngine,
) -> None:
    """Its client has not taken the worker for lost by then."""
    engine, clock = open_engine(pool_blocks=SEQUENCES, slots=SEQUENCES), Clock()
    agent = FullArena(clock)
    sender = HandoverSender(
        cast("BlockingAgentClient", agent), engine.runner, faults=StoreFaults(), clock=clock
    )
    told_s: list[float] = []
    since_s = clock.now_s
    for number in range(SEQUENCES):
        sequence = engine.open(request_of(5 + number))
        sender.begin(sequence)
        engine.step(sequence)
        sender.finish(sequence, on_unsent=lambda _: told_s.append(clock.now_s - since_s))
        engine.release(sequence)
    agent.may_answer.set()
    assert sender.close(PATIENCE_S)
    assert agent.asked == 2 * SEQUENCES, "each for its early copy, and for the rest"
    assert len(told_s) == SEQUENCES
    assert max(told_s) < LEASE_DEADLINE_S + 0.1
    assert engine.free() == (SEQUENCES, engine.runner.free_states)
