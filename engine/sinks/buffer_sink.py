"""Saves blocks out of the pool into any store that takes buffers, with no copy between.

A plain store keeps no window state: what is given to `save_window` is dropped, and counted.
"""

from collections.abc import Callable

from kvstore.key import Namespace

from ..block_pool import BlockPool
from ..block_store import BlockStore
from ..store_faults import STORE_ERRORS, StoreFaults
from .threaded_sink import SaveJob, SinkLimits, ThreadedSink, WindowJob

DEFAULT_LIMITS = SinkLimits()


class BufferSink(ThreadedSink):
    """A `SaveSink` over a `BlockStore`, which belongs to the caller. A block is read until its save
    is through, so it stays in the pool as long. Raises InvalidRequest for a pool that is not in the
    memory of the host."""

    def __init__(
        self,
        store: BlockStore,
        *,
        namespace: Namespace,
        pool: BlockPool,
        faults: StoreFaults,
        limits: SinkLimits = DEFAULT_LIMITS,
        clock: Callable[[], float],
    ) -> None:
        pool.require_host("saves without an agent")
        self._store = store
        super().__init__(namespace=namespace, pool=pool, faults=faults, limits=limits, clock=clock)

    def _save(self, job: SaveJob) -> None:
        buffers = [self._pool.buffer(block_id) for block_id in job.block_ids]
        try:
            outcome = self._store.save(
                self._namespace,
                job.keys,
                buffers,
                first_block=job.first_block,
                ttl_class=job.ttl_class,
            )
        except STORE_ERRORS as error:
            self._faults.note("save", error)
            job.receipt.settle(failed=len(buffers))
        else:
            told = outcome.stored + outcome.known + outcome.failed
            assert told == len(buffers), (outcome, len(buffers))
            job.receipt.settle(stored=outcome.stored, known=outcome.known, failed=outcome.failed)

    def _save_window(self, job: WindowJob) -> None:
        self._note_dropped_window()
