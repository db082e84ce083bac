"""Saving happens behind the caller, in order, within its bounds, and whatever the store does."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from engine.block_pool import BlockPool
from engine.block_store import BlockStore
from engine.errors import EngineClosed
from engine.layout import KVGeometry, block_layout
from engine.save_receipt import SaveReceipt, SaveSummary
from engine.sinks.buffer_sink import BufferSink
from engine.sinks.threaded_sink import SinkLimits
from engine.store_faults import StoreFaults
from engine.window_record import WindowRecord
from kvstore.key import Namespace
from tests.engine.memory_store import FailingStore, StuckStore

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=8)
NAMESPACE = Namespace(model="m", weights="w", tokenizer="t", layout=block_layout(GEOMETRY))
KEYS = NAMESPACE.block_keys(list(range(128 * 12)))
DEADLINE_S = 20.0
RECORD = WindowRecord(torch.zeros(6, dtype=torch.uint8))


class Saving:
    """A sink with its pool; `submit` takes blocks, fills them and queues them."""

    def __init__(self, store: BlockStore, queue_blocks: int = 4) -> None:
        self.pool = BlockPool(block_bytes=GEOMETRY.block_bytes, capacity_blocks=12)
        self.faults = StoreFaults()
        self.sink = BufferSink(
            store,
            namespace=NAMESPACE,
            pool=self.pool,
            faults=self.faults,
            limits=SinkLimits(queue_blocks=queue_blocks, queue_windows=2),
            clock=time.monotonic,
        )

    def submit(self, first_block: int, blocks: int, *, used: int = 0) -> SaveReceipt:
        """The caller keeps references to the first `used` of them."""
        block_ids = self.pool.allocate(blocks)
        for index, block_id in enumerate(block_ids):
            self.pool.buffer(block_id)[:] = bytes([first_block + index]) * GEOMETRY.block_bytes
        receipt = SaveReceipt()
        keys = KEYS[: first_block + blocks]
        self.sink.save_blocks(keys, block_ids, ttl_class="chat", receipt=receipt)
        self.used_ids = block_ids[:used]
        self.pool.release(block_ids[used:])
        return receipt


@pytest.fixture
def stuck() -> Iterator[StuckStore]:
    store = StuckStore()
    yield store
    store.release.set()


def test_sink_drops_the_oldest_waiting_job_when_the_queue_is_full(stuck: StuckStore) -> None:
    saving = Saving(stuck, queue_blocks=4)
    running = saving.submit(0, 1)
    assert stuck.entered.wait(DEADLINE_S)
    oldest, kept, newest = saving.submit(1, 3), saving.submit(4, 2), saving.submit(6, 2)
    assert oldest.summary() == SaveSummary(dropped=3)
    assert saving.pool.free_blocks == 12 - 1 - 4
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)
    assert [r.summary().stored for r in (running, oldest, kept, newest)] == [1, 0, 2, 2]
    assert saving.pool.free_blocks == 12


def test_sink_takes_a_job_larger_than_its_queue(stuck: StuckStore) -> None:
    saving = Saving(stuck, queue_blocks=2)
    saving.submit(0, 1)
    assert stuck.entered.wait(DEADLINE_S)
    large = saving.submit(1, 5)
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)
    assert large.summary().stored == 5


def test_sink_gives_up_waiting_blocks_when_closed_with_a_hanging_store(stuck: StuckStore) -> None:
    saving = Saving(stuck)
    running = saving.submit(0, 1)
    assert stuck.entered.wait(DEADLINE_S)
    waiting = saving.submit(1, 2)
    assert not saving.sink.flush(0.05)
    assert not saving.sink.close(0.05)
    assert running.summary() == SaveSummary(pending=1)
    assert waiting.summary() == SaveSummary(dropped=2)
    with pytest.raises(EngineClosed):
        saving.submit(3, 1)
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)
    assert running.summary() == SaveSummary(stored=1)


def test_sink_counts_every_error_of_the_store_and_logs_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saving = Saving(FailingStore("save"))
    with caplog.at_level(logging.WARNING):
        receipts = [saving.submit(index, 1) for index in range(3)]
        assert saving.sink.close(DEADLINE_S)
    assert [receipt.summary() for receipt in receipts] == [SaveSummary(failed=1)] * 3
    assert saving.faults.count == 3
    assert len(caplog.records) == 1
    assert "save failed" in caplog.text
    assert "n0: save was refused" in caplog.text
    assert saving.pool.free_blocks == 12


def test_sink_makes_room_by_the_oldest_waiting_jobs_and_no_more_than_needed(
    stuck: StuckStore,
) -> None:
    saving = Saving(stuck, queue_blocks=12)
    running = saving.submit(0, 2)
    assert stuck.entered.wait(DEADLINE_S)
    oldest, kept = saving.submit(2, 3), saving.submit(5, 3)
    saving.sink.make_room(5, deadline_s=0.05)
    assert saving.pool.free_blocks == 12 - 2 - 3
    assert (oldest.summary(), kept.summary()) == (SaveSummary(dropped=3), SaveSummary(pending=3))
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)
    assert (running.summary(), kept.summary()) == (SaveSummary(stored=2), SaveSummary(stored=3))


def test_sink_keeps_waiting_jobs_whose_blocks_are_used_elsewhere(stuck: StuckStore) -> None:
    saving = Saving(stuck, queue_blocks=12)
    saving.submit(0, 2)
    assert stuck.entered.wait(DEADLINE_S)
    used = saving.submit(2, 3, used=3)
    used_ids = saving.used_ids
    unused = saving.submit(5, 3)
    saving.sink.make_room(7, deadline_s=0.0)
    assert (used.summary(), unused.summary()) == (SaveSummary(pending=3), SaveSummary(dropped=3))
    saving.pool.release(used_ids)
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)
    assert used.summary() == SaveSummary(stored=3)


def test_sink_drops_nothing_when_all_of_it_together_makes_too_little_room(
    stuck: StuckStore,
) -> None:
    """Each would cost a later hit, and nobody could begin for it."""
    saving = Saving(stuck, queue_blocks=12)
    saving.submit(0, 2)
    assert stuck.entered.wait(DEADLINE_S)
    waiting = [saving.submit(2, 3), saving.submit(5, 3)]
    saving.sink.make_room(11, deadline_s=0.0)
    assert [receipt.summary() for receipt in waiting] == [SaveSummary(pending=3)] * 2
    saving.sink.make_room(10, deadline_s=0.0)
    assert [receipt.summary() for receipt in waiting] == [SaveSummary(dropped=3)] * 2
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)


def test_sink_drops_nothing_when_saves_make_room_in_time(stuck: StuckStore) -> None:
    saving = Saving(stuck, queue_blocks=12)
    receipts = [saving.submit(0, 4), saving.submit(4, 4), saving.submit(8, 4)]
    assert stuck.entered.wait(DEADLINE_S)
    threading.Timer(0.1, stuck.release.set).start()
    saving.sink.make_room(8, deadline_s=DEADLINE_S)
    assert saving.pool.free_blocks >= 8
    assert saving.sink.close(DEADLINE_S)
    assert [receipt.summary() for receipt in receipts] == [SaveSummary(stored=4)] * 3


def test_sink_drops_the_oldest_window_state_when_too_much_waits(stuck: StuckStore) -> None:
    saving = Saving(stuck)
    saving.submit(0, 1)
    assert stuck.entered.wait(DEADLINE_S)
    for key in KEYS[:5]:
        saving.sink.save_window(key, RECORD)
    assert saving.sink.dropped_windows == 3
    stuck.release.set()
    assert saving.sink.close(DEADLINE_S)
