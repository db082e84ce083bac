"""What every source keeps to, whatever is behind it: a store in memory, nodes, or an agent."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from engine.block_pool import BlockPool
from engine.prefix_source import LoadFellShort, LoadOutcome
from engine.sources.agent_source import AgentSource
from engine.sources.buffer_source import BufferSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import LoadLimits, ThreadedSource
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient, BlockingStoreClient
from kvstore.policy import MISS, HitPlan, plan_dense_hit, plan_hit
from tests.engine.memory_store import MemoryStore
from tests.engine.stored_prompt import LAYOUT, WINDOW, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.patience import OPERATION_S

BLOCKS = 12
LIMITS = LoadLimits(
    loads_max=2,
    match_deadline_s=OPERATION_S,
    fetch_deadline_s=OPERATION_S,
    section_wait_s=OPERATION_S,
)
Store = MemoryStore | BlockingStoreClient | BlockingAgentClient


@dataclass
class Place:
    """A store, and sources over it."""

    store: Store
    sources: list[ThreadedSource] = field(default_factory=list)

    def source(
        self, prompt: StoredPrompt, pool: BlockPool, *, has_window_state: bool = False
    ) -> ThreadedSource:
        faults = StoreFaults()
        source: ThreadedSource
        if isinstance(self.store, BlockingAgentClient):
            source = AgentSource(
                self.store,
                namespace=prompt.namespace,
                pool=pool,
                window_layout=WINDOW if has_window_state else None,
                faults=faults,
                limits=LIMITS,
                clock=time.monotonic,
            )
        else:
            source = BufferSource(
                self.store,
                namespace=prompt.namespace,
                pool=pool,
                has_window_state=has_window_state,
                faults=faults,
                limits=LIMITS,
                clock=time.monotonic,
            )
        self.sources.append(source)
        return source


@pytest.fixture(params=["memory", "nodes", "agent"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "memory":
        opened = Place(MemoryStore())
    elif request.param == "agent":
        opened = Place(request.getfixturevalue("client"))
    else:
        running: LocalCluster = request.getfixturevalue("cluster")
        opened = Place(BlockingStoreClient(running.cluster_path))
    yield opened
    for source in opened.sources:
        assert source.close(DEADLINE_S)
    if isinstance(opened.store, BlockingStoreClient):
        opened.store.close()


@pytest.fixture
def prompt() -> StoredPrompt:
    return StoredPrompt(BLOCKS)


def found_plan(load: ThreadedLoad) -> HitPlan:
    wait_until(lambda: load.found is not None)
    assert load.found is not None
    return load.found.plan


def outcome_of(load: ThreadedLoad) -> LoadOutcome:
    wait_until(lambda: load.outcome is not None)
    assert load.outcome is not None
    return load.outcome


def bytes_of(pool: BlockPool, block_ids: Sequence[int]) -> list[bytes]:
    return [bytes(pool.buffer(block_id)) for block_id in block_ids]


def whole(blocks: int) -> HitPlan:
    """A plan without window state for so many blocks."""
    return HitPlan(hit_tokens=blocks * 128, replay_tokens=0, window_anchor=None)


@pytest.mark.parametrize("stored_blocks", [0, 1, 7, BLOCKS])
@pytest.mark.parametrize("has_window_state", [False, True])
def test_look_up_finds_the_leading_blocks_that_are_stored_and_plans_by_the_hit_rule(
    place: Place, prompt: StoredPrompt, stored_blocks: int, has_window_state: bool
) -> None:
    del prompt.blocks[stored_blocks:]
    keys, prompt.keys = prompt.keys, prompt.keys[:stored_blocks]
    prompt.save(place.store)
    source = place.source(prompt, prompt.pool(1), has_window_state=has_window_state)
    load = source.look_up(prompt.tokens, keys)
    wait_until(lambda: load.found is not None)
    assert load.found is not None
    assert load.found.matched_blocks == stored_blocks
    tokens = len(prompt.tokens)
    expected = plan_hit(tokens, stored_blocks, ()) if has_window_state else None
    assert load.found.plan == (expected or plan_dense_hit(tokens, stored_blocks))


def test_prompt_without_a_full_block_is_a_miss_that_asks_nobody(place: Place) -> None:
    prompt = StoredPrompt(0)
    load = place.source(prompt, prompt.pool(1)).look_up(prompt.tokens, [])
    assert load.found is not None
    assert load.found.plan == MISS


def test_load_brings_the_blocks_and_keeps_references_until_then(
    place: Place, prompt: StoredPrompt
) -> None:
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS + 3)
    pool.allocate(2)
    source = place.source(prompt, pool)
    load = source.look_up(prompt.tokens, prompt.keys)
    block_ids = pool.allocate(BLOCKS)[::-1]
    load.begin(found_plan(load), block_ids, 0)
    outcome = outcome_of(load)
    assert (outcome.blocks, outcome.window, outcome.rejected_shards) == (BLOCKS, None, 0)
    assert load.is_startable
    for section in range(len(LAYOUT.sections)):
        load.wait_for_section(section)
    assert bytes_of(pool, block_ids) == prompt.blocks
    assert pool.free_blocks == 1
    pool.release(block_ids)
    assert pool.free_blocks == BLOCKS + 1


def test_pass_that_waits_for_each_section_finds_its_bytes_in_all_blocks(
    place: Place, prompt: StoredPrompt
) -> None:
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS)
    load = place.source(prompt, pool).look_up(prompt.tokens, prompt.keys)
    block_ids = pool.allocate(BLOCKS)
    load.begin(found_plan(load), block_ids, 0)
    wait_until(lambda: load.is_startable)
    at = 0
    for number, section in enumerate(LAYOUT.sections):
        load.wait_for_section(number)
        for block, block_id in enumerate(block_ids):
            part = pool.buffer(block_id)[at : at + section.bytes]
            assert part == prompt.section(block, number)
        at += section.bytes
    assert outcome_of(load).blocks == BLOCKS


def test_blocks_that_the_engine_has_are_not_written(place: Place, prompt: StoredPrompt) -> None:
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS)
    load = place.source(prompt, pool).look_up(prompt.tokens, prompt.keys)
    block_ids = pool.allocate(BLOCKS)
    load.begin(found_plan(load), block_ids, 5)
    assert outcome_of(load).blocks == BLOCKS
    nothing = bytes(LAYOUT.block_bytes)
    assert bytes_of(pool, block_ids) == [nothing] * 5 + prompt.blocks[5:]


def test_load_for_nothing_but_blocks_that_the_engine_has_ends_at_once(
    place: Place, prompt: StoredPrompt
) -> None:
    pool = prompt.pool(4)
    load = place.source(prompt, pool).look_up(prompt.tokens, prompt.keys)
    load.begin(whole(4), pool.allocate(4), 4)
    assert load.is_startable
    assert outcome_of(load).blocks == 4


def test_load_that_gets_less_than_was_planned_says_how_much_and_ends_the_pass(
    place: Place, prompt: StoredPrompt
) -> None:
    """As if blocks had been evicted between the match and the fetch."""
    keys, prompt.keys = prompt.keys, prompt.keys[:7]
    blocks = prompt.blocks[:7]
    prompt.blocks = blocks
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS)
    load = place.source(prompt, pool).look_up(prompt.tokens, keys)
    block_ids = pool.allocate(BLOCKS)
    load.begin(whole(BLOCKS), block_ids, 2)
    with pytest.raises(LoadFellShort):
        load.wait_for_section(0)
    assert outcome_of(load).blocks == 7
    assert not load.is_startable
    assert bytes_of(pool, block_ids[2:7]) == blocks[2:]
    pool.release(block_ids)
    assert pool.free_blocks == BLOCKS


@pytest.mark.parametrize("moment", ["matching", "matched", "begun", "startable", "ended"])
def test_load_given_up_at_any_moment_gives_its_blocks_back(
    place: Place, prompt: StoredPrompt, moment: str
) -> None:
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS)
    load = place.source(prompt, pool).look_up(prompt.tokens, prompt.keys)
    if moment != "matching":
        plan = found_plan(load)
    if moment in ("begun", "startable", "ended"):
        block_ids = pool.allocate(BLOCKS)
        load.begin(plan, block_ids, 0)
        pool.release(block_ids)
    if moment == "startable":
        wait_until(lambda: load.is_startable)
    if moment == "ended":
        outcome_of(load)
    load.give_up()
    load.give_up()
    outcome_of(load)
    assert pool.free_blocks == BLOCKS


def test_more_loads_than_may_run_at_once_wait_in_line_and_all_come(place: Place) -> None:
    prompts = [StoredPrompt(3) for _ in range(2 * LIMITS.loads_max + 1)]
    for prompt in prompts:
        prompt.namespace = prompts[0].namespace
        prompt.keys = prompt.namespace.block_keys(prompt.tokens)
        prompt.save(place.store)
    pool = prompts[0].pool(3 * len(prompts))
    source = place.source(prompts[0], pool)
    loads = [source.look_up(prompt.tokens, prompt.keys) for prompt in prompts]
    ids = [pool.allocate(3) for _ in prompts]
    for load, block_ids in zip(loads, ids, strict=True):
        load.begin(found_plan(load), block_ids, 0)
    for load, block_ids, prompt in zip(loads, ids, prompts, strict=True):
        assert outcome_of(load).blocks == 3
        assert bytes_of(pool, block_ids) == prompt.blocks


def test_engine_that_sleeps_is_woken_for_every_step_of_a_load(
    place: Place, prompt: StoredPrompt
) -> None:
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS)
    source = place.source(prompt, pool)
    wakes = threading.Semaphore(0)
    source.on_change = wakes.release

    def sleep_until_found() -> None:
        while load.found is None:
            assert wakes.acquire(timeout=DEADLINE_S)

    load = source.look_up(prompt.tokens, prompt.keys)
    sleep_until_found()
    load.begin(found_plan(load), pool.allocate(BLOCKS), 0)
    while not load.is_startable:
        assert wakes.acquire(timeout=DEADLINE_S)
    while load.outcome is None:
        assert wakes.acquire(timeout=DEADLINE_S)
    assert load.outcome.blocks == BLOCKS


def test_closed_source_has_given_up_its_loads_and_knows_of_nothing(
    place: Place, prompt: StoredPrompt
) -> None:
    prompt.save(place.store)
    pool = prompt.pool(BLOCKS)
    source = place.source(prompt, pool)
    loads = [source.look_up(prompt.tokens, prompt.keys) for _ in range(2)]
    for load in loads:
        found_plan(load)
    loads[0].begin(whole(BLOCKS), block_ids := pool.allocate(BLOCKS), 0)
    assert source.close(DEADLINE_S)
    assert loads[0].outcome is not None
    loads[1].begin(whole(BLOCKS), block_ids, 0)
    assert outcome_of(loads[1]).blocks == 0
    pool.release(block_ids)
    assert pool.free_blocks == BLOCKS
    later = source.look_up(prompt.tokens, prompt.keys)
    assert later.found is not None
    assert later.found.plan == MISS
