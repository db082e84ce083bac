"""A load has one end, whoever comes to it first."""

import threading
import time
from collections.abc import Sequence
from threading import Event

import pytest

from engine.sources.buffer_source import BufferSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.key import Namespace
from kvstore.policy import HitPlan
from tests.engine.memory_store import Fetched, MemoryStore
from tests.engine.stored_prompt import StoredPrompt
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


def test_load_that_nobody_can_bring_gives_its_references_back() -> None:
    prompt = StoredPrompt(BLOCKS)
    pool = prompt.pool(BLOCKS)

    def bring(load: ThreadedLoad) -> bool:
        raise AssertionError("a thread of this group has died")

    load = ThreadedLoad(
        prompt.tokens,
        prompt.keys,
        sections=len(prompt.namespace.layout.sections),
        pool=pool,
        section_wait_s=0.01,
        bring=bring,
        on_change=lambda: None,
        clock=time.monotonic,
    )
    block_ids = pool.allocate(BLOCKS)
    with pytest.raises(AssertionError, match="has died"):
        load.begin(PLAN, block_ids, 0)
    pool.release(block_ids)
    assert pool.free_blocks == BLOCKS
    assert load.outcome is not None
    assert load.outcome.blocks == 0
