"""A load has one end, whoever comes to it first, and its blocks are let go of once, not before."""

import threading
import time
from collections.abc import Sequence
from threading import Event, Thread
from types import SimpleNamespace
from typing import cast

import pytest

from engine.block_pool import BlockPool
from engine.section_copy import SectionCopy
from engine.sources import run_swap
from engine.sources.buffer_source import BufferSource
from engine.sources.load import ThreadedLoad
from engine.sources.run_swap import RunSwap
from engine.sources.threaded_source import LoadLimits
from engine.sources.work_threads import WorkThreads
from engine.store_faults import StoreFaults
from kvstore.client import ArenaRun
from kvstore.key import Namespace
from kvstore.layout import BlockLayout
from kvstore.policy import HitPlan
from tests.engine.memory_store import Fetched, MemoryStore
from tests.engine.stored_prompt import LAYOUT, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until

BLOCKS = 3
PLAN = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None)


class StoreThatWaits(MemoryStore):
    """Fetches nothing until it `may_go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = Event()

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> Fetched:
        assert self.may_go_on.wait(DEADLINE_S)
        return Fetched(0)


def test_thread_that_comes_to_a_load_as_it_is_given_up_leaves_its_end_to_the_engine() -> None:
    """Both once ended it, and a reference to a block was given back that was somebody else's."""
    store, prompt = StoreThatWaits(), StoredPrompt(BLOCKS)
    pool = prompt.pool(3 * BLOCKS)
    source = BufferSource(
        store,
        namespace=prompt.namespace,
        pool=pool,
        has_window_state=False,
        faults=StoreFaults(),
        limits=LoadLimits(loads_max=1),
        clock=time.monotonic,
    )
    loads = [source.look_up(prompt.tokens, prompt.keys) for _ in range(3)]
    for load in loads:
        block_ids = pool.allocate(BLOCKS)
        load.begin(PLAN, block_ids, 0)
        pool.release(block_ids)
    _, given_up, behind_it = loads
    engine = threading.current_thread()

    def let_the_thread_come_to_it() -> None:
        """The engine is in the middle of giving up: it has let go of the blocks, and not said
        so."""
        if threading.current_thread() is engine and not store.may_go_on.is_set():
            store.may_go_on.set()
            wait_until(lambda: behind_it.outcome is not None)

    pool.on_free = let_the_thread_come_to_it
    given_up.give_up()
    assert store.may_go_on.is_set()
    assert given_up.outcome is not None
    assert pool.free_blocks == pool.capacity_blocks
    assert source.close(DEADLINE_S)


class CopyThatHangs(SectionCopy):
    """As one of a process that was stopped in the middle of it."""

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        super().__init__(pool, layout)
        self.has_begun = Event()
        self.may_go_on = Event()

    def to_pool(self, part: memoryview, section: int, block_ids: Sequence[int]) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(DEADLINE_S)
        super().to_pool(part, section, block_ids)


class CountedThreads(WorkThreads):
    """Counts how often somebody has looked whether they live."""

    looks = 0

    @property
    def is_whole(self) -> bool:
        self.looks += 1
        return super().is_whole


class RunThatIsThere:
    blocks = BLOCKS
    layout = SimpleNamespace(layout=LAYOUT)

    def wait_ready(self, section: int, blocks: int, timeout_s: float) -> int:
        return blocks

    def section(self, section: int) -> memoryview:
        return memoryview(bytes(BLOCKS * LAYOUT.sections[section].bytes))

    def ready_blocks(self, section: int) -> int:
        return BLOCKS


def test_load_keeps_its_blocks_as_long_as_a_copy_into_them_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_swap, "LOOK_S", 0.001)
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
    load.begin(PLAN, pool.allocate(BLOCKS), 0)
    copy = CopyThatHangs(pool, LAYOUT)
    copying = CountedThreads("swap-in", count=1, clock=time.monotonic)
    swap = RunSwap(
        load, cast("ArenaRun", RunThatIsThere()), copy=copy, copying=copying, clock=time.monotonic
    )
    following = Thread(target=swap.follow, args=(time.monotonic() + DEADLINE_S,))
    following.start()
    assert copy.has_begun.wait(DEADLINE_S)
    looks = copying.looks
    wait_until(lambda: copying.looks > looks + 3)
    assert following.is_alive()
    copy.may_go_on.set()
    following.join(DEADLINE_S)
    assert swap.whole_blocks == BLOCKS
    assert copying.close(DEADLINE_S)
