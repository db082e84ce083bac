"""What a source over an agent does beyond the contract: window state, short runs, what it notes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from engine.block_pool import BlockPool
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ComputeMark, SectionMover, Transfer
from engine.prefix_source import LoadFellShort, LoadOutcome
from engine.sources.agent_source import AgentSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient, BlockLayout
from kvstore.policy import HitPlan, plan_hit
from tests.engine.stored_prompt import LAYOUT, WINDOW, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.kvstore.agent.agent_process import AgentProcess
from tests.patience import OPERATION_S

BLOCKS = 12
ANCHOR = (BLOCKS - 1) * 128
"""Where window state is used of a prompt of so many blocks and 40 tokens."""
PATIENT = LoadLimits(
    match_deadline_s=OPERATION_S, fetch_deadline_s=OPERATION_S, section_wait_s=OPERATION_S
)


class Loading:
    """One prompt, the pool it is loaded into, and the load."""

    def __init__(self, prompt: StoredPrompt, pool: BlockPool, source: AgentSource) -> None:
        self.prompt = prompt
        self.pool = pool
        self.source = source
        self.load: ThreadedLoad = source.look_up(prompt.tokens, prompt.keys)

    def begin(self, plan: HitPlan | None = None, first_block: int = 0) -> None:
        """As the match has planned, or as given."""
        wait_until(lambda: self.load.found is not None)
        assert self.load.found is not None
        plan = plan or self.load.found.plan
        self.block_ids = self.pool.allocate(plan.stored_blocks)
        self.load.begin(plan, self.block_ids, first_block)

    def end(self) -> LoadOutcome:
        wait_until(lambda: self.load.outcome is not None)
        assert self.load.outcome is not None
        return self.load.outcome

    def check(self, blocks: int) -> None:
        """So many leading blocks are those of the prompt, and all references add up."""
        for block_id, expected in zip(self.block_ids[:blocks], self.prompt.blocks, strict=False):
            assert self.pool.buffer(block_id) == expected
        self.pool.release(self.block_ids)
        assert self.pool.free_blocks == self.pool.capacity_blocks


LookUp = Callable[..., Loading]


@pytest.fixture
def look_up() -> Iterator[LookUp]:
    """Open a source and ask it for a prompt."""
    opened: list[AgentSource] = []

    def look_up_one(
        client: BlockingAgentClient,
        prompt: StoredPrompt,
        *,
        limits: LoadLimits = PATIENT,
        has_window_state: bool = False,
        faults: StoreFaults | None = None,
        pool: BlockPool | None = None,
        mover: SectionMover | None = None,
    ) -> Loading:
        pool = pool or prompt.pool(len(prompt.keys))
        source = AgentSource(
            client,
            namespace=prompt.namespace,
            pool=pool,
            window_layout=WINDOW if has_window_state else None,
            faults=faults or StoreFaults(),
            limits=limits,
            clock=time.monotonic,
            mover=mover,
        )
        opened.append(source)
        return Loading(prompt, pool, source)

    yield look_up_one
    for source in opened:
        assert source.close(DEADLINE_S)


def bytes_of_window(outcome: LoadOutcome) -> bytes:
    assert outcome.window is not None
    return bytes(outcome.window)


def put_window(client: BlockingAgentClient, prompt: StoredPrompt, anchor: int) -> None:
    client.open_namespace(prompt.namespace, window_layout=WINDOW)
    key = prompt.keys[anchor // 128 - 1]
    assert client.put_window(prompt.namespace, key, prompt.window)


def test_load_brings_the_window_state_at_the_anchor_of_its_plan(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    put_window(client, prompt, ANCHOR)
    loading = look_up(client, prompt, has_window_state=True)
    loading.begin()
    assert loading.load.order.plan.window_anchor == ANCHOR
    outcome = loading.end()
    assert bytes_of_window(outcome) == prompt.window
    assert loading.load.window == outcome.window
    assert outcome.blocks == BLOCKS - 1
    assert loading.load.is_startable
    loading.check(BLOCKS - 1)


def test_load_is_not_startable_without_its_window_state_and_brings_the_blocks_all_the_same(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    loading = look_up(client, prompt, has_window_state=True)
    # As if the record had gone between the match and the fetch.
    loading.begin(plan_hit(len(prompt.tokens), BLOCKS, {ANCHOR}))
    outcome = loading.end()
    assert (outcome.blocks, outcome.window) == (BLOCKS - 1, None)
    assert not loading.load.is_startable
    loading.check(BLOCKS - 1)


def test_load_of_window_state_alone_needs_no_run(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    put_window(client, prompt, ANCHOR)
    loading = look_up(client, prompt, has_window_state=True)
    loading.begin(plan_hit(len(prompt.tokens), BLOCKS, {ANCHOR}), BLOCKS - 1)
    outcome = loading.end()
    assert bytes_of_window(outcome) == prompt.window
    assert [event.step for event in outcome.events] == ["match", "window"]
    loading.check(0)


def test_outcome_tells_when_each_section_was_there_and_when_it_was_copied(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    loading = look_up(client, prompt)
    loading.begin()
    outcome = loading.end()
    sections = range(len(LAYOUT.sections))
    steps = {(event.step, event.section): event for event in outcome.events}
    assert len(steps) == len(outcome.events)
    assert set(steps) == {("match", None), ("lease", None)} | {
        (step, section) for step in ("fetch", "copy") for section in sections
    }
    for section in sections:
        fetched, copied = steps["fetch", section], steps["copy", section]
        assert fetched.start_s <= copied.start_s <= copied.end_s
        assert fetched.end_s <= outcome.events[-1].end_s
    copies = [steps["copy", section] for section in sections]
    assert outcome.swap_in_s == pytest.approx(sum(copy.end_s - copy.start_s for copy in copies))
    loading.check(BLOCKS)


def test_arena_with_room_for_fewer_blocks_is_a_shorter_hit(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    assert client.arena is not None
    all_of_it = len(client.arena) // LAYOUT.block_bytes
    hog = client.lease_run(prompt.namespace, all_of_it - 8)
    assert hog is not None
    with hog:
        # A lease waits for half of it for more room than there is.
        limits = LoadLimits(
            match_deadline_s=OPERATION_S, fetch_deadline_s=6.0, section_wait_s=OPERATION_S
        )
        loading = look_up(client, prompt, limits=limits)
        loading.begin()
        with pytest.raises(LoadFellShort):
            loading.load.wait_for_section(0)
        blocks = loading.end().blocks
    assert 0 < blocks < BLOCKS
    loading.check(blocks)


def test_full_arena_is_no_hit_and_no_fault(client: BlockingAgentClient, look_up: LookUp) -> None:
    prompt, faults = StoredPrompt(BLOCKS), StoreFaults()
    prompt.save(client)
    assert client.arena is not None
    hogs = []
    while hog := client.lease_run(
        prompt.namespace, len(client.arena) // LAYOUT.block_bytes, deadline_s=0.05
    ):
        hogs.append(hog)
    limits = LoadLimits(fetch_deadline_s=0.2)
    loading = look_up(client, prompt, limits=limits, faults=faults)
    loading.begin()
    assert loading.end().blocks == 0
    assert faults.count == 0
    for hog in hogs:
        hog.release()
    loading.check(0)


def test_prompt_of_more_blocks_than_one_lease_may_have_is_a_shorter_hit(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    limits = LoadLimits(
        lease_blocks_max=5, match_deadline_s=OPERATION_S, fetch_deadline_s=OPERATION_S
    )
    loading = look_up(client, prompt, limits=limits)
    loading.begin()
    assert loading.end().blocks == 5
    loading.check(5)


def flip_on_disk(folder: Path, shard: bytes) -> int:
    """Change one byte of a shard wherever it lies in the folder's files; how often it did."""
    flipped = 0
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        at = path.read_bytes().find(shard)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 5)
                file.write(bytes([shard[5] ^ 1]))
            flipped += 1
    return flipped


def test_damaged_shard_is_rejected_counted_and_made_up_for(
    client: BlockingAgentClient, cluster: LocalCluster, look_up: LookUp
) -> None:
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    shard = prompt.blocks[3][:64]  # of two data shards the first is the block's first half
    folders = [cluster.target_folder(name) for name in cluster.node_names]
    assert sum(flip_on_disk(folder, shard) for folder in folders) == 1

    def load() -> int:
        loading = look_up(client, prompt)
        loading.begin()
        outcome = loading.end()
        assert outcome.blocks == BLOCKS
        loading.check(BLOCKS)
        return outcome.rejected_shards

    # Of a node that is late nothing is wanted, and so nothing found wrong.
    rejected: list[int] = []
    while not any(rejected):
        rejected.append(load())
    assert rejected[-1] == 1


class WaitingMover(MemcpyMover):
    """Copies a section when it may: the first at once."""

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        super().__init__(pool, layout)
        self._allowed = threading.Semaphore(1)

    def allow_one_more(self) -> None:
        self._allowed.release()

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        assert self._allowed.acquire(timeout=DEADLINE_S)
        return super().to_pool(part, section, block_ids, after=after)


def test_layers_computed_while_later_sections_come_read_what_the_store_has(
    client: BlockingAgentClient, look_up: LookUp
) -> None:
    """A pass that follows at once, in a thread of its own, as an engine does. No section comes
    before the one ahead of it was read."""
    prompt = StoredPrompt(BLOCKS)
    prompt.save(client)
    pool = prompt.pool(BLOCKS)
    mover = WaitingMover(pool, LAYOUT)
    loading = look_up(client, prompt, pool=pool, mover=mover)
    seen: list[list[list[bytes]]] = []

    def read_pool() -> list[list[bytes]]:
        """Of each section, what stands there of each block."""
        ends = list(accumulate(section.bytes for section in LAYOUT.sections))
        buffers = [bytes(pool.buffer(block_id)) for block_id in loading.block_ids]
        return [[one[first:end] for one in buffers] for first, end in pairwise([0, *ends])]

    def follow() -> None:
        wait_until(lambda: loading.load.is_startable)
        for number in range(len(LAYOUT.sections)):
            loading.load.wait_for_section(number)
            seen.append(read_pool())
            mover.allow_one_more()

    loading.begin()
    reader = threading.Thread(target=follow)
    reader.start()
    reader.join(DEADLINE_S)
    stored = [[prompt.section(b, s) for b in range(BLOCKS)] for s in range(len(LAYOUT.sections))]
    nothing = [[bytes(section.bytes)] * BLOCKS for section in LAYOUT.sections]
    assert len(seen) == len(stored) > 1
    for number, found in enumerate(seen, start=1):
        assert found == stored[:number] + nothing[number:]
    loading.end()
    loading.check(BLOCKS)


def test_source_opened_before_its_agent_hits_when_it_is_there(
    agent: AgentProcess, own_client: BlockingAgentClient, look_up: LookUp
) -> None:
    prompt, faults = StoredPrompt(BLOCKS), StoreFaults()
    prompt.save(own_client)
    agent.kill()
    wait_until(lambda: not own_client.is_connected)
    missed = look_up(own_client, prompt, has_window_state=True, faults=faults)
    wait_until(lambda: missed.load.found is not None)
    assert missed.load.found is not None
    assert missed.load.found.matched_blocks == 0
    assert faults.count == 1
    agent.start()
    wait_until(lambda: own_client.is_connected)
    put_window(own_client, prompt, ANCHOR)
    loading = Loading(prompt, missed.pool, missed.source)
    loading.begin()
    assert bytes_of_window(loading.end()) == prompt.window
    loading.check(BLOCKS - 1)
