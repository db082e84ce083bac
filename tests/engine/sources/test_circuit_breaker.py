"""A store that answers nothing costs a deadline once, and not one for each request."""

import time
from collections.abc import Sequence
from threading import Event, Lock

from engine.sources.buffer_source import BufferSource
from engine.sources.circuit_breaker import CircuitBreaker
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import MATCH_THREADS, LoadLimits
from engine.store_faults import StoreFaults
from kvstore.key import Namespace
from kvstore.policy import HitPlan
from tests.engine.llm_engine.engine_bench import Clock
from tests.engine.memory_store import Fetched, MemoryStore
from tests.engine.stored_prompt import StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until

BLOCKS = 2
LATE_S = 0.2
LOADS_MAX = 2
NEVER_S = 3600.0
PLAN = HitPlan(hit_tokens=BLOCKS * 128, replay_tokens=0, window_anchor=None)


def test_nobody_asks_for_a_while_after_a_deadline_and_then_one_does() -> None:
    clock = Clock()
    breaker = CircuitBreaker(rest_s=2.0, clock=clock)
    assert breaker.may_ask()
    assert breaker.may_ask()
    breaker.note(is_late=True)
    clock.now_s += 1.9
    assert not breaker.may_ask()
    clock.now_s += 0.2
    assert [breaker.may_ask() for _ in range(3)] == [True, False, False]
    breaker.note(is_late=True)
    assert not breaker.may_ask()
    clock.now_s += 2.1
    assert breaker.may_ask()
    breaker.note(is_late=False)
    assert [breaker.may_ask() for _ in range(3)] == [True, True, True]


def test_of_one_who_went_away_nothing_is_known_and_another_one_asks() -> None:
    clock = Clock()
    breaker = CircuitBreaker(rest_s=2.0, clock=clock)
    breaker.note(is_late=None)
    assert breaker.may_ask()
    breaker.note(is_late=True)
    clock.now_s += 2.1
    for _ in range(2):
        assert [breaker.may_ask() for _ in range(2)] == [True, False]
        breaker.note(is_late=None)


class SilentStore(MemoryStore):
    """Answers nothing until its callers' deadline, as long as it `is_silent`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = True
        self._lock = Lock()

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        with self._lock:
            found = super().match(namespace, keys)
        return 0 if self._wait() else found

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        first_block: int = 0,
        deadline_s: float = 2.0,
    ) -> Fetched:
        with self._lock:
            found = super().fetch(namespace, keys, buffers, first_block=first_block)
        return Fetched(0) if self._wait() else found

    def _wait(self) -> bool:
        if self.is_silent:
            Event().wait(LATE_S)
        return self.is_silent


class Scene:
    def __init__(self, rest_s: float) -> None:
        self.store = SilentStore()
        self.prompt = StoredPrompt(BLOCKS)
        self.prompt.save(self.store)
        self.store.calls.clear()
        self.pool = self.prompt.pool(8 * BLOCKS)
        self.source = BufferSource(
            self.store,
            namespace=self.prompt.namespace,
            pool=self.pool,
            has_window_state=False,
            faults=StoreFaults(),
            limits=LoadLimits(
                loads_max=LOADS_MAX,
                match_deadline_s=LATE_S,
                fetch_deadline_s=LATE_S,
                rest_s=rest_s,
            ),
            clock=time.monotonic,
        )

    def look_up(self) -> ThreadedLoad:
        return self.source.look_up(self.prompt.tokens, self.prompt.keys)

    def begin(self, load: ThreadedLoad) -> None:
        block_ids = self.pool.allocate(BLOCKS)
        load.begin(PLAN, block_ids, 0)
        self.pool.release(block_ids)

    def matched(self, load: ThreadedLoad) -> int:
        wait_until(lambda: load.found is not None)
        assert load.found is not None
        return load.found.matched_blocks

    def brought(self, load: ThreadedLoad) -> int:
        wait_until(lambda: load.outcome is not None)
        assert load.outcome is not None
        return load.outcome.blocks


def test_matches_in_line_behind_one_that_nobody_answered_have_missed_at_once() -> None:
    scene = Scene(rest_s=NEVER_S)
    loads = [scene.look_up() for _ in range(12)]
    assert [scene.matched(load) for load in loads] == [0] * 12
    # No more were asked than there are threads; that is all the time that passed.
    assert 1 <= len(scene.store.calls) <= MATCH_THREADS
    assert scene.matched(scene.look_up()) == 0
    assert len(scene.store.calls) <= MATCH_THREADS
    assert scene.source.close(DEADLINE_S)


def test_loads_in_line_behind_one_that_brought_nothing_have_ended_at_once() -> None:
    scene = Scene(rest_s=NEVER_S)
    scene.store.is_silent = False
    loads = [scene.look_up() for _ in range(8)]
    assert [scene.matched(load) for load in loads] == [BLOCKS] * 8
    scene.store.is_silent = True
    scene.store.calls.clear()
    for load in loads:
        scene.begin(load)
    assert [scene.brought(load) for load in loads] == [0] * 8
    assert 1 <= len(scene.store.calls) <= LOADS_MAX
    assert scene.pool.free_blocks == scene.pool.capacity_blocks
    assert scene.source.close(DEADLINE_S)


def test_store_that_answers_again_is_asked_again() -> None:
    scene = Scene(rest_s=0.0)
    assert scene.matched(scene.look_up()) == 0
    scene.store.is_silent = False
    loads = [scene.look_up() for _ in range(3)]
    matched = [scene.matched(load) for load in loads]
    assert matched[0] == BLOCKS
    load = scene.look_up()
    assert scene.matched(load) == BLOCKS
    scene.begin(load)
    assert scene.brought(load) == BLOCKS
    assert scene.source.close(DEADLINE_S)
