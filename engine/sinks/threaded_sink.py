"""What all sinks have alike: a thread, and a bounded line of what is to be saved, oldest first out.

The engine waits for saves at its own end, and for a moment where the blocks that a request needs
are still to be saved (`make_room`); never otherwise. A block waiting here keeps its place in the
pool through a reference.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread

from kvstore.key import Namespace

from ..block_pool import BlockPool
from ..errors import EngineClosed
from ..kv.mover import ComputeMark
from ..save_receipt import SaveReceipt
from ..store_faults import StoreFaults
from ..window_record import WindowRecord

log = logging.getLogger(__name__)

END_S = 10.0
"""For a thread that has nothing to do to find out that it is to end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaveJob:
    """Consecutive complete blocks of one prompt; `keys` is its chain up to the last of them. They
    may still be computed until `after`."""

    keys: Sequence[bytes]
    block_ids: tuple[int, ...]
    ttl_class: str
    receipt: SaveReceipt = field(repr=False)
    after: ComputeMark = None

    @property
    def first_block(self) -> int:
        return len(self.keys) - len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowJob:
    """Window state at the end of the block that has the key."""

    key: bytes
    record: WindowRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkLimits:
    """What a sink may take, in number and in time."""

    queue_blocks: int = 64
    """Blocks that wait; those of the save that is running come on top."""

    queue_windows: int = 16
    """Window records that wait; each is some megabytes of the engine's device."""

    lease_blocks_max: int = 64
    """Blocks that are handed over in one run."""

    lease_deadline_s: float = 1.0
    save_deadline_s: float = 10.0

    runs_max: int = 8
    """Runs that are handed over and not saved yet, before further ones wait."""


class ThreadedSink(ABC):
    """A `SaveSink` whose `_save` and `_save_window` may block. Window state goes first: it is
    little, and without it the next turn computes more."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        pool: BlockPool,
        faults: StoreFaults,
        limits: SinkLimits,
        clock: Callable[[], float],
    ) -> None:
        self._namespace = namespace
        self._pool = pool
        self._faults = faults
        self._limits = limits
        self._clock = clock
        self._jobs: deque[SaveJob] = deque()
        self._windows: deque[WindowJob] = deque()
        self._dropped_windows = 0
        self._changed = Condition()
        self._is_saving = False
        self._is_closed = False
        # A daemon: a store that never answers must not keep a process from ending.
        self._thread = Thread(target=self._run, name="save-sink", daemon=True)
        self._thread.start()

    def _mark_compute(self) -> ComputeMark:
        """What the engine's thread has given to compute so far: a mover's, if one reads blocks."""
        return None

    @abstractmethod
    def _save(self, job: SaveJob) -> None:
        """Read the blocks and see to it that their receipt is settled. Raises nothing."""

    @abstractmethod
    def _save_window(self, job: WindowJob) -> None:
        """Keep a record if that can be done. Raises nothing."""

    def _is_settled(self) -> bool:
        """Nothing that was read is under way. Called with the lock held."""
        return True

    @property
    def dropped_windows(self) -> int:
        """Window records that no store has kept: too many waited, or it had no room, or none
        for such things."""
        return self._dropped_windows

    def save_blocks(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        ttl_class: str,
        receipt: SaveReceipt,
    ) -> None:
        """See SaveSink. Raises EngineClosed after `close`."""
        assert 0 < len(block_ids) <= len(keys)
        job = SaveJob(
            keys=keys,
            block_ids=tuple(block_ids),
            ttl_class=ttl_class,
            receipt=receipt,
            after=self._mark_compute(),
        )
        with self._changed:
            self._check("save")
            self._pool.retain(job.block_ids)
            receipt.expect(len(job.block_ids))
            self._jobs.append(job)
            while len(self._jobs) > 1 and self._waiting_blocks() > self._limits.queue_blocks:
                self._drop(self._jobs[0])
            self._changed.notify_all()

    def save_window(self, key: bytes, record: WindowRecord) -> None:
        """See SaveSink. Raises EngineClosed after `close`."""
        with self._changed:
            self._check("save window state")
            self._windows.append(WindowJob(key=key, record=record))
            if len(self._windows) > self._limits.queue_windows:
                self._windows.popleft()
                self._dropped_windows += 1
            self._changed.notify_all()

    def make_room(self, blocks: int, deadline_s: float) -> None:
        """See SaveSink. A save that is running keeps its blocks."""
        end_s = self._clock() + deadline_s
        with self._changed:
            while self._pool.free_blocks < blocks and (self._jobs or self._is_saving):
                if not self._wait_until(end_s):
                    break
            for job in self._plan_drops(blocks - self._pool.free_blocks):
                self._drop(job)

    def flush(self, deadline_s: float) -> bool:
        """See SaveSink."""
        end_s = self._clock() + deadline_s
        with self._changed:
            while self._jobs or self._windows or self._is_saving or not self._is_settled():
                if not self._wait_until(end_s):
                    return False
        return True

    def close(self, deadline_s: float) -> bool:
        """See SaveSink."""
        is_flushed = self.flush(deadline_s)
        with self._changed:
            while self._jobs:
                self._drop(self._jobs[0])
            self._dropped_windows += len(self._windows)
            self._windows.clear()
            self._is_closed = True
            self._changed.notify_all()
            is_idle = not self._is_saving
        self._thread.join(END_S if is_idle else 0.0)
        if self._thread.is_alive():
            log.error(
                "the saving thread is left behind: a save has not ended, and keeps its blocks"
            )
        return is_flushed

    def _check(self, operation: str) -> None:
        if self._is_closed:
            raise EngineClosed(operation)
        assert self._thread.is_alive(), "the saving thread has died; its traceback is on stderr"

    def _note_dropped_window(self) -> None:
        with self._changed:
            self._dropped_windows += 1

    def _wait_until(self, end_s: float) -> bool:
        """Wait for a change, with the lock held; False if there is no use in waiting longer."""
        left_s = end_s - self._clock()
        if left_s <= 0 or not self._thread.is_alive():
            return False
        self._changed.wait(left_s)
        return True

    def _plan_drops(self, missing_blocks: int) -> list[SaveJob]:
        """The oldest saves that free so many blocks together; none if all of them do not. One whose
        blocks a sequence has too is kept: to give it up would free nothing."""
        drops: list[SaveJob] = []
        for job in self._jobs:
            if missing_blocks <= 0:
                break
            freed_blocks = self._pool.count_last(job.block_ids)
            if freed_blocks:
                missing_blocks -= freed_blocks
                drops.append(job)
        return drops if missing_blocks <= 0 else []

    def _waiting_blocks(self) -> int:
        return sum(len(job.block_ids) for job in self._jobs)

    def _drop(self, job: SaveJob) -> None:
        self._jobs.remove(job)
        self._pool.release(job.block_ids)
        job.receipt.settle(dropped=len(job.block_ids))

    def _take(self) -> SaveJob | WindowJob | None:
        """The next job, or None at the end."""
        with self._changed:
            while not self._jobs and not self._windows and not self._is_closed:
                self._changed.wait()
            if not self._jobs and not self._windows:
                return None
            self._is_saving = True
            return self._windows.popleft() if self._windows else self._jobs.popleft()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            try:
                if isinstance(job, SaveJob):
                    self._save_and_release(job)
                else:
                    self._save_window(job)
            finally:
                with self._changed:
                    self._is_saving = False
                    self._changed.notify_all()
            del job  # a record must not live until the next one comes

    def _save_and_release(self, job: SaveJob) -> None:
        try:
            self._save(job)
        finally:
            self._pool.release(job.block_ids)
