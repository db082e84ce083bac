"""Saves blocks behind a request's back: one thread, a bounded queue, the oldest dropped first.

The engine waits for saves at its own end, and for a moment where the blocks that a request needs
are still to be saved (`make_room`); never otherwise. A block waiting here keeps its place in the
pool through a reference.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread

from kvstore.key import Namespace

from .block_pool import BlockPool
from .block_store import BlockStore
from .errors import EngineClosed
from .store_faults import STORE_ERRORS, StoreFaults


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """Blocks of one request by what became of them.

    `dropped` never reached the store because the queue was full, a request needed the memory or
    the engine ended; `pending` were not through when this was read.
    """

    stored: int = 0
    known: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0


class SaveReceipt:
    """Follows the saves of one request; `summary` may be read at any time from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = dict.fromkeys(("stored", "known", "failed", "dropped", "pending"), 0)

    def summary(self) -> SaveSummary:
        with self._lock:
            return SaveSummary(**self._counts)

    def expect(self, blocks: int) -> None:
        with self._lock:
            self._counts["pending"] += blocks

    def settle(self, **blocks_by_outcome: int) -> None:
        """Move blocks from pending to their outcomes."""
        with self._lock:
            for outcome, blocks in blocks_by_outcome.items():
                self._counts[outcome] += blocks
                self._counts["pending"] -= blocks


@dataclass(slots=True, kw_only=True)
class SaveJob:
    """Consecutive complete blocks of one prompt; `keys` is its chain up to the last of them."""

    keys: list[bytes]
    block_ids: list[int]
    receipt: SaveReceipt = field(repr=False)

    @property
    def first_block(self) -> int:
        return len(self.keys) - len(self.block_ids)


class BlockSaver:
    """A thread that saves blocks in the order they were submitted.

    `queue_blocks` bounds the blocks that wait; those of the save that is running come on top.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        namespace: Namespace,
        pool: BlockPool,
        faults: StoreFaults,
        queue_blocks: int,
        ttl_class: str,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._pool = pool
        self._faults = faults
        self._queue_blocks = queue_blocks
        self._ttl_class = ttl_class
        self._clock = clock
        self._jobs: deque[SaveJob] = deque()
        self._changed = Condition()
        self._is_saving = False
        self._is_closed = False
        # A daemon: a store that never answers must not keep a process from ending.
        self._thread = Thread(target=self._run, name="block-saver", daemon=True)
        self._thread.start()

    def submit(self, job: SaveJob) -> None:
        """Queue a job; the caller keeps its own references. Raises EngineClosed after `close`."""
        assert 0 < len(job.block_ids) <= len(job.keys)
        with self._changed:
            if self._is_closed:
                raise EngineClosed("save")
            assert self._thread.is_alive(), "the saving thread has died; its traceback is on stderr"
            self._pool.retain(job.block_ids)
            job.receipt.expect(len(job.block_ids))
            self._jobs.append(job)
            while len(self._jobs) > 1 and self._waiting_blocks() > self._queue_blocks:
                self._drop_oldest()
            self._changed.notify_all()

    def make_room(self, blocks: int, deadline_s: float) -> None:
        """Try to have `blocks` free in the pool: let saves end, for at most `deadline_s`, then give
        up the oldest jobs that have not begun, no more of them than needed.

        Not enough may be free after that: a save that is running keeps its blocks.
        """
        end_s = self._clock() + deadline_s
        with self._changed:
            while self._pool.free_blocks < blocks and (self._jobs or self._is_saving):
                left_s = end_s - self._clock()
                if left_s <= 0 or not self._thread.is_alive():
                    break
                self._changed.wait(left_s)
            while self._pool.free_blocks < blocks and self._jobs:
                self._drop_oldest()

    def _drop_waiting(self) -> None:
        """Give up every job that has not begun."""
        with self._changed:
            while self._jobs:
                self._drop_oldest()

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer than `deadline_s`."""
        end_s = self._clock() + deadline_s
        with self._changed:
            while self._jobs or self._is_saving:
                left_s = end_s - self._clock()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, deadline_s: float) -> bool:
        """Flush, drop what is left and end the thread; False if blocks were dropped or a save hung.

        May be called again.
        """
        is_flushed = self.flush(deadline_s)
        self._drop_waiting()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_idle = not self._is_saving
        if is_idle:
            self._thread.join()
        return is_flushed

    def _waiting_blocks(self) -> int:
        return sum(len(job.block_ids) for job in self._jobs)

    def _drop_oldest(self) -> None:
        job = self._jobs.popleft()
        self._pool.release(job.block_ids)
        job.receipt.settle(dropped=len(job.block_ids))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_saving = True
            try:
                self._save(job)
            finally:
                self._pool.release(job.block_ids)
                with self._changed:
                    self._is_saving = False
                    self._changed.notify_all()

    def _save(self, job: SaveJob) -> None:
        buffers = [self._pool.buffer(block_id) for block_id in job.block_ids]
        try:
            outcome = self._store.save(
                self._namespace,
                job.keys,
                buffers,
                first_block=job.first_block,
                ttl_class=self._ttl_class,
            )
        except STORE_ERRORS as error:
            self._faults.note("save", error)
            job.receipt.settle(failed=len(buffers))
        else:
            job.receipt.settle(stored=outcome.stored, known=outcome.known, failed=outcome.failed)
