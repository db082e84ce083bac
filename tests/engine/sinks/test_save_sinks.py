"""What every sink keeps to, whatever is behind it: a store in memory, nodes, or an agent."""

import time
from collections.abc import Iterator, Sequence

import pytest

from engine.errors import EngineClosed
from engine.save_receipt import SaveReceipt, SaveSummary
from engine.sinks.agent_sink import AgentSink
from engine.sinks.buffer_sink import BufferSink
from engine.sinks.threaded_sink import SinkLimits, ThreadedSink
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient, BlockingStoreClient
from tests.engine.memory_store import MemoryStore
from tests.engine.stored_prompt import LAYOUT, WINDOW, StoredPrompt
from tests.engine.waiting import DEADLINE_S

BLOCKS = 12
LIMITS = SinkLimits(queue_blocks=BLOCKS, lease_blocks_max=5, save_deadline_s=30.0)
Store = MemoryStore | BlockingStoreClient | BlockingAgentClient


class Saving:
    """A prompt, a pool, and a sink over a store."""

    def __init__(self, store: Store, *, has_window_state: bool = False) -> None:
        self.store = store
        self.prompt = StoredPrompt(BLOCKS)
        self.pool = self.prompt.pool(BLOCKS)
        self.faults = StoreFaults()
        self.sink = self._open(WINDOW if has_window_state else None)

    def _open(self, window: object) -> ThreadedSink:
        namespace, pool, faults = self.prompt.namespace, self.pool, self.faults
        if isinstance(self.store, BlockingAgentClient):
            return AgentSink(
                self.store,
                namespace=namespace,
                pool=pool,
                window_layout=WINDOW if window else None,
                faults=faults,
                limits=LIMITS,
                clock=time.monotonic,
            )
        return BufferSink(
            self.store,
            namespace=namespace,
            pool=pool,
            faults=faults,
            limits=LIMITS,
            clock=time.monotonic,
        )

    def save(self, first_block: int, blocks: int) -> SaveReceipt:
        """Blocks as a request would leave them: written, handed over, and let go."""
        block_ids = self.pool.allocate(blocks)[::-1]
        end = first_block + blocks
        for block_id, data in zip(block_ids, self.prompt.blocks[first_block:end], strict=True):
            self.pool.buffer(block_id)[:] = data
        receipt = SaveReceipt()
        self.sink.save_blocks(self.prompt.keys[:end], block_ids, ttl_class="chat", receipt=receipt)
        self.pool.release(block_ids)
        return receipt

    def stored(self, keys: Sequence[bytes]) -> list[bytes]:
        """The leading blocks that the store gives back."""
        buffers = [bytearray(LAYOUT.block_bytes) for _ in keys]
        fetched = self.store.fetch(
            self.prompt.namespace, keys, [memoryview(buffer) for buffer in buffers]
        )
        return [bytes(buffer) for buffer in buffers[: fetched.blocks]]


@pytest.fixture(params=["memory", "nodes", "agent"])
def saving(request: pytest.FixtureRequest) -> Iterator[Saving]:
    if request.param == "memory":
        opened = Saving(MemoryStore())
    elif request.param == "agent":
        opened = Saving(request.getfixturevalue("client"))
    else:
        running: LocalCluster = request.getfixturevalue("cluster")
        opened = Saving(BlockingStoreClient(running.cluster_path))
    yield opened
    assert opened.sink.close(DEADLINE_S)
    if isinstance(opened.store, BlockingStoreClient):
        opened.store.close()


def test_sink_saves_the_bytes_under_their_keys_and_gives_the_blocks_back(saving: Saving) -> None:
    receipts = [saving.save(0, 2), saving.save(2, 7), saving.save(9, 3)]
    assert saving.sink.flush(DEADLINE_S)
    assert [receipt.summary() for receipt in receipts] == [
        SaveSummary(stored=2),
        SaveSummary(stored=7),
        SaveSummary(stored=3),
    ]
    assert saving.stored(saving.prompt.keys) == saving.prompt.blocks
    assert saving.pool.free_blocks == BLOCKS
    assert saving.faults.count == 0


def test_sink_reports_blocks_that_the_store_has_as_known(saving: Saving) -> None:
    saving.save(0, 2)
    assert saving.sink.flush(DEADLINE_S)
    receipt = saving.save(0, 3)
    assert saving.sink.close(DEADLINE_S)
    assert receipt.summary() == SaveSummary(stored=1, known=2)


def test_sink_reads_blocks_before_they_can_be_written_again(saving: Saving) -> None:
    """The whole pool is used twice; what was to be saved first is what is saved."""
    receipt = saving.save(0, BLOCKS)
    saving.sink.make_room(BLOCKS, DEADLINE_S)
    for block_id in saving.pool.allocate(BLOCKS):
        saving.pool.buffer(block_id)[:] = bytes(LAYOUT.block_bytes)
    assert saving.sink.flush(DEADLINE_S)
    assert receipt.summary() == SaveSummary(stored=BLOCKS)
    assert saving.stored(saving.prompt.keys) == saving.prompt.blocks


def test_closed_sink_takes_nothing_more(saving: Saving) -> None:
    assert saving.sink.close(DEADLINE_S)
    assert saving.sink.close(DEADLINE_S)
    block_ids = saving.pool.allocate(1)
    with pytest.raises(EngineClosed):
        saving.sink.save_blocks(
            saving.prompt.keys[:1], block_ids, ttl_class="chat", receipt=SaveReceipt()
        )
    with pytest.raises(EngineClosed):
        saving.sink.save_window(saving.prompt.keys[0], saving.prompt.record)
    saving.pool.release(block_ids)
    assert saving.pool.free_blocks == BLOCKS


def test_sink_over_a_plain_store_drops_window_state_and_counts_it() -> None:
    saving = Saving(MemoryStore(), has_window_state=True)
    saving.sink.save_window(saving.prompt.keys[0], saving.prompt.record)
    assert saving.sink.close(DEADLINE_S)
    assert saving.sink.dropped_windows == 1
