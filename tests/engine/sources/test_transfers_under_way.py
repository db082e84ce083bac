"""Sections that are published while they are being moved: a pass is ordered behind them, and what
it made of them counts only when all of them are known to have come whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import cast

import pytest

from engine.errors import TransferFailed
from engine.kv import mover as mover_module
from engine.kv.mover import ComputeMark, Transfer
from engine.prefix_source import LoadFellShort
from engine.sources import load as load_module
from engine.sources.load import COMPUTE_WAIT_S, ThreadedLoad
from engine.sources.run_swap import RunSwap
from engine.work_threads import WorkThreads
from kvstore.client import ArenaRun
from kvstore.errors import AgentUnreachable
from kvstore.policy import HitPlan
from tests.engine.kv.delayed_mover import DelayedMover
from tests.engine.stored_prompt import LAYOUT, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until

BLOCKS = 3
SECTIONS = len(LAYOUT.sections)


class RunInMemory:
    """Everything is there. `is_lost`: the agent has gone."""

    blocks = BLOCKS
    layout = SimpleNamespace(layout=LAYOUT)

    def __init__(self, prompt: StoredPrompt) -> None:
        self.is_lost = False
        self._sections = [
            memoryview(b"".join(prompt.section(block, section) for block in range(BLOCKS)))
            for section in range(SECTIONS)
        ]

    def wait_ready(self, section: int, blocks: int, timeout_s: float) -> int:
        return self.ready_blocks(section)

    def section(self, section: int) -> memoryview:
        return self._sections[section]

    def ready_blocks(self, section: int) -> int:
        if self.is_lost:
            raise AgentUnreachable("agent.sock", "it has gone")
        return BLOCKS


class Swap:
    """A load that a thread follows; nothing is moved until the mover is told to go on."""

    def __init__(self) -> None:
        self.prompt = StoredPrompt(BLOCKS)
        self.pool = self.prompt.pool(BLOCKS)
        self.block_ids = self.pool.allocate(BLOCKS)
        self.mover = DelayedMover(self.pool, LAYOUT)
        self.run = RunInMemory(self.prompt)
        self.copying = WorkThreads("swap-in", count=1, clock=time.monotonic)
        self.error: Exception | None = None
        self.load = ThreadedLoad(
            self.prompt.tokens,
            self.prompt.keys,
            sections=SECTIONS,
            pool=self.pool,
            section_wait_s=DEADLINE_S,
            bring=lambda load: load.take(),
            on_change=lambda: None,
            clock=time.monotonic,
            mark_compute=self.mover.mark_compute,
        )
        plan = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None)
        self.load.begin(plan, self.block_ids, 0)
        self.pool.release(self.block_ids)  # the load has references of its own
        self._following = Thread(target=self._follow, daemon=True)
        self._following.start()
        wait_until(lambda: len(self.mover.started) == SECTIONS)

    def _follow(self) -> None:
        swap = RunSwap(
            self.load,
            cast("ArenaRun", self.run),
            mover=self.mover,
            copying=self.copying,
            clock=time.monotonic,
        )
        try:
            swap.follow(time.monotonic() + DEADLINE_S)
        except (AgentUnreachable, TransferFailed) as error:
            self.error = error
        self.load.finish(swap.whole_blocks)

    def end(self) -> int:
        """Whole blocks in the end."""
        self._following.join(DEADLINE_S)
        assert self.copying.close(DEADLINE_S)
        assert self.load.outcome is not None
        return self.load.outcome.blocks


def test_pass_is_ordered_behind_transfers_and_waits_for_none() -> None:
    one = Swap()
    for section in range(SECTIONS):
        one.load.wait_for_section(section)
    assert [transfer.orders for transfer in one.mover.started] == [1] * SECTIONS
    assert not any(transfer.has_ended for transfer in one.mover.started)
    one.mover.go_on()
    one.load.confirm()
    assert [bytes(one.pool.memory[block_id].numpy()) for block_id in one.block_ids] == (
        one.prompt.blocks
    )
    assert one.end() == BLOCKS


def test_blocks_are_kept_until_the_last_transfer_has_ended() -> None:
    one = Swap()
    one.mover.go_on(SECTIONS - 1)
    wait_until(lambda: sum(transfer.has_ended for transfer in one.mover.started) == SECTIONS - 1)
    assert one.load.outcome is None
    assert one.pool.free_blocks == 0
    one.mover.go_on()
    assert one.end() == BLOCKS
    assert one.pool.free_blocks == BLOCKS


def test_load_that_is_given_up_keeps_its_blocks_as_long() -> None:
    one = Swap()
    one.load.give_up()
    assert (one.load.outcome, one.pool.free_blocks) == (None, 0)
    one.mover.go_on()
    one.end()
    assert one.pool.free_blocks == BLOCKS


@pytest.mark.parametrize("number", range(SECTIONS))
def test_pass_over_a_transfer_that_failed_is_not_confirmed(number: int) -> None:
    one = Swap()
    one.load.wait_for_section(SECTIONS - 1)
    one.mover.started[number].fails = True
    one.mover.go_on()
    with pytest.raises(LoadFellShort):
        one.load.confirm()
    assert one.end() == 0
    assert isinstance(one.error, TransferFailed)


def test_pass_over_a_run_that_was_lost_under_way_is_not_confirmed() -> None:
    one = Swap()
    one.load.wait_for_section(SECTIONS - 1)
    one.run.is_lost = True
    one.mover.go_on()
    with pytest.raises(LoadFellShort):
        one.load.confirm()
    assert one.end() == 0
    assert isinstance(one.error, AgentUnreachable)
    assert one.pool.free_blocks == BLOCKS


class LongPass:
    """What a load stands behind, and a clock: the pass takes 100 s, as long as two looks at it, a
    look at the clock 4. When it is over the transfers are known to have ended by the next look."""

    def __init__(self, looks_needed: int = 2) -> None:
        self.load: ThreadedLoad | None = None
        self.is_over = False
        self.looks = 0
        self._looks_needed = looks_needed
        self._now_s = 0.0

    def query(self) -> bool:
        self._now_s += 50.0
        self.looks += 1
        self.is_over = self.looks >= self._looks_needed
        return self.is_over

    def clock(self) -> float:
        self._now_s += 4.0
        if self.is_over and self.load is not None:
            self.load.confirm_sections()
        return self._now_s


def published_behind(before: LongPass, later: LongPass | None = None) -> ThreadedLoad:
    """A load of which all sections were published, and are being moved behind a pass. `later`: what
    was computed when it is to be confirmed."""
    marks = iter([before, later])
    prompt = StoredPrompt(BLOCKS)
    pool = prompt.pool(BLOCKS)
    load = ThreadedLoad(
        prompt.tokens,
        prompt.keys,
        sections=SECTIONS,
        pool=pool,
        section_wait_s=0.0,
        bring=lambda load: load.take(),
        on_change=lambda: None,
        clock=(later or before).clock,
        mark_compute=lambda: cast("ComputeMark", next(marks)),
    )
    plan = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None)
    load.begin(plan, pool.allocate(BLOCKS), 0)
    load.publish_sections(SECTIONS, [cast("Transfer", object())])
    return load


def test_deadline_to_confirm_a_load_begins_when_what_it_stands_behind_is_computed() -> None:
    before = LongPass()
    before.load = published_behind(before)
    before.load.confirm()
    assert before.is_over


def test_load_behind_transfers_that_waited_for_a_later_pass_is_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another load, which came before it into the one order of the device."""
    monkeypatch.setattr(load_module, "CONFIRM_WAIT_S", 3.0)
    later = LongPass()
    later.load = published_behind(LongPass(looks_needed=1), later)
    later.load.confirm()
    assert later.is_over


def test_load_behind_a_pass_that_hangs_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread is not kept for ever."""
    waited_s: list[float] = []

    def look_once(is_over: Callable[[], bool], deadline_s: float, **_: object) -> bool:
        waited_s.append(deadline_s)
        return is_over()

    monkeypatch.setattr(mover_module, "poll", look_once)
    load = published_behind(LongPass(looks_needed=1_000))
    with pytest.raises(LoadFellShort):
        load.confirm()
    assert sum(waited_s) == COMPUTE_WAIT_S


def test_load_that_has_failed_is_not_confirmed_and_the_pass_before_it_not_waited_for() -> None:
    before = LongPass()
    load = published_behind(before)
    load.finish()
    with pytest.raises(LoadFellShort):
        load.confirm()
    assert before.looks == 0


def test_load_without_anything_under_way_is_confirmed_at_once() -> None:
    one = Swap()
    one.mover.go_on()
    assert one.end() == BLOCKS
    one.load.confirm()
