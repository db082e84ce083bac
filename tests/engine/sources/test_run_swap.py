"""Copies are waited for, and count for nothing if the run was lost meanwhile."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import cast

import pytest

from engine.block_pool import BlockPool
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark, SectionMover, Transfer
from engine.sources import run_swap
from engine.sources.load import ThreadedLoad
from engine.sources.run_swap import RunSwap
from engine.work_threads import WorkThreads
from kvstore.client import ArenaRun
from kvstore.errors import AgentUnreachable
from kvstore.layout import BlockLayout
from kvstore.policy import HitPlan
from tests.engine.stored_prompt import LAYOUT, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until

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


class Swap:
    """A load of three blocks, and its way out of a run."""

    def __init__(
        self,
        run: object,
        copying: WorkThreads,
        make_mover: Callable[[BlockPool, BlockLayout], SectionMover] = MemcpyMover,
    ) -> None:
        prompt = StoredPrompt(BLOCKS)
        pool = prompt.pool(BLOCKS)
        self.load = ThreadedLoad(
            prompt.tokens,
            prompt.keys,
            sections=len(LAYOUT.sections),
            pool=pool,
            section_wait_s=0.0,
            bring=lambda load: load.take(),
            on_change=lambda: None,
            clock=time.monotonic,
        )
        plan = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None)
        self.load.begin(plan, pool.allocate(BLOCKS), 0)
        self.swap = RunSwap(
            self.load,
            cast("ArenaRun", run),
            mover=make_mover(pool, LAYOUT),
            copying=copying,
            clock=time.monotonic,
        )

    def follow(self) -> None:
        self.swap.follow(time.monotonic() + DEADLINE_S)


@pytest.mark.parametrize("last", [0, 1])
def test_section_of_a_run_that_was_lost_while_it_was_copied_is_not_published(last: int) -> None:
    copying = WorkThreads("swap-in", count=1, clock=time.monotonic)
    one = Swap(RunThatIsLost(last), copying)
    one.follow()
    assert one.load.is_startable is (last > 0)
    assert one.swap.whole_blocks == 0
    one.load.finish(one.swap.whole_blocks)
    assert one.load.outcome is not None
    assert one.load.outcome.blocks == 0
    assert copying.close(DEADLINE_S)


class CopyThatHangs(MemcpyMover):
    """As one of a process that was stopped in the middle of it."""

    def __init__(
        self, has_begun: Event, may_go_on: Event, pool: BlockPool, layout: BlockLayout
    ) -> None:
        super().__init__(pool, layout)
        self._has_begun = has_begun
        self._may_go_on = may_go_on

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        self._has_begun.set()
        assert self._may_go_on.wait(DEADLINE_S)
        return super().to_pool(part, section, block_ids, after=after)


class CountedThreads(WorkThreads):
    """Counts how often somebody has looked whether they live."""

    looks = 0

    @property
    def is_whole(self) -> bool:
        self.looks += 1
        return super().is_whole


def test_load_keeps_its_blocks_as_long_as_a_copy_into_them_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_swap, "LOOK_S", 0.001)
    has_begun, may_go_on = Event(), Event()
    copying = CountedThreads("swap-in", count=1, clock=time.monotonic)
    one = Swap(
        RunThatIsLost(len(LAYOUT.sections)), copying, partial(CopyThatHangs, has_begun, may_go_on)
    )
    following = Thread(target=one.follow)
    following.start()
    assert has_begun.wait(DEADLINE_S)
    looks = copying.looks
    wait_until(lambda: copying.looks > looks + 3)
    assert following.is_alive()
    may_go_on.set()
    following.join(DEADLINE_S)
    assert one.swap.whole_blocks == BLOCKS
    assert copying.close(DEADLINE_S)
