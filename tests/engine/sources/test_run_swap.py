"""What was copied out of a run that is lost meanwhile counts for nothing."""

import time
from types import SimpleNamespace
from typing import cast

import pytest

from engine.section_copy import SectionCopy
from engine.sources.load import ThreadedLoad
from engine.sources.run_swap import RunSwap
from engine.sources.work_threads import WorkThreads
from kvstore.client import ArenaRun
from kvstore.errors import AgentUnreachable
from kvstore.policy import HitPlan
from tests.engine.stored_prompt import LAYOUT, StoredPrompt
from tests.engine.waiting import DEADLINE_S

BLOCKS = 3


class RunThatIsLost:
    """Everything is there, until the agent goes in the middle of the copy of section `last`."""

    blocks = BLOCKS
    layout = SimpleNamespace(layout=LAYOUT)

    def __init__(self, last: int) -> None:
        self._last = last
        self._copied_from = -1

    def wait_ready(self, section: int, blocks: int, timeout_s: float) -> int:
        return blocks

    def section(self, section: int) -> memoryview:
        self._copied_from = section
        return memoryview(bytes(BLOCKS * LAYOUT.sections[section].bytes))

    def ready_blocks(self, section: int) -> int:
        if self._copied_from >= self._last:
            raise AgentUnreachable("agent.sock", "it has gone")
        return BLOCKS


@pytest.mark.parametrize("last", [0, 1])
def test_section_of_a_run_that_was_lost_while_it_was_copied_is_not_published(last: int) -> None:
    prompt = StoredPrompt(BLOCKS)
    pool = prompt.pool(BLOCKS)
    load = ThreadedLoad(
        prompt.tokens,
        prompt.keys,
        sections=len(LAYOUT.sections),
        pool=pool,
        section_wait_s=0.0,
        bring=lambda load: load.take(),
        on_change=lambda: None,
        clock=time.monotonic,
    )
    load.begin(
        HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None),
        pool.allocate(BLOCKS),
        0,
    )
    copying = WorkThreads("swap-in", count=1, clock=time.monotonic)
    swap = RunSwap(
        load,
        cast("ArenaRun", RunThatIsLost(last)),
        copy=SectionCopy(pool, LAYOUT),
        copying=copying,
        clock=time.monotonic,
    )
    swap.follow(time.monotonic() + DEADLINE_S)
    assert load.is_startable is (last > 0)
    assert swap.whole_blocks == 0
    load.finish(swap.whole_blocks)
    assert load.outcome is not None
    assert load.outcome.blocks == 0
    assert copying.close(DEADLINE_S)
