"""How long a pass waits for sections: together so long, and anew in the next pass."""

from threading import Semaphore, Thread

import pytest

from engine.prefix_source import LoadFellShort
from engine.sources.load import ThreadedLoad
from kvstore.policy import HitPlan
from tests.engine.stored_prompt import LAYOUT, StoredPrompt
from tests.engine.waiting import DEADLINE_S

PLAN = HitPlan(hit_tokens=128, replay_tokens=0, window_anchor=None)


class SteppingClock:
    """Goes on by all that a pass may wait whenever it is read."""

    def __init__(self) -> None:
        self.readings = Semaphore(0)
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += DEADLINE_S
        self.readings.release()
        return self._now_s


def waits_and_gets(load: ThreadedLoad, clock: SteppingClock, section: int) -> None:
    """Wait for a section that comes when the pass has begun to wait."""
    clock.readings = Semaphore(0)

    def publish() -> None:
        assert clock.readings.acquire(timeout=DEADLINE_S)
        load.publish_sections(section + 1)

    publisher = Thread(target=publish)
    publisher.start()
    load.wait_for_section(section)
    publisher.join(DEADLINE_S)


def test_pass_waits_so_long_for_all_sections_together_and_the_next_one_as_long() -> None:
    prompt, clock = StoredPrompt(1), SteppingClock()
    pool = prompt.pool(1)
    load = ThreadedLoad(
        prompt.tokens,
        prompt.keys,
        sections=len(LAYOUT.sections),
        pool=pool,
        section_wait_s=DEADLINE_S,
        bring=lambda load: load.take(),
        on_change=lambda: None,
        clock=clock,
    )
    load.begin(PLAN, pool.allocate(1), 0)
    waits_and_gets(load, clock, 0)
    clock.readings = Semaphore(0)
    with pytest.raises(LoadFellShort):  # the first section has taken all the time
        load.wait_for_section(1)
    assert not clock.readings.acquire(blocking=False), "it has waited"
    load.wait_for_section(0)
    waits_and_gets(load, clock, 1)
    load.finish()
