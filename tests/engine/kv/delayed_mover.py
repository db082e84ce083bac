"""A mover as a GPU's: it starts a transfer and returns; a thread copies, later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Semaphore, Thread

import torch

from engine.block_pool import BlockPool
from engine.errors import TransferFailed
from engine.kv.block_list import BlockList
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import ENDED, ComputeMark, Transfer, check_copy, check_part
from kvstore.layout import BlockLayout
from tests.engine.waiting import DEADLINE_S


class DelayedTransfer:
    """Copies when it is told to, and fails instead if it was told that."""

    def __init__(self, copy: Callable[[], object], may_run: Semaphore) -> None:
        self.fails = False
        self.orders = 0
        """How often a pass was made to wait for it."""
        self._copy = copy
        self._may_run = may_run
        self._is_over = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._may_run.acquire(timeout=DEADLINE_S)
        if not self.fails:
            self._copy()
        self._is_over.set()

    @property
    def has_ended(self) -> bool:
        if self._is_over.is_set() and self.fails:
            raise TransferFailed("the copy has failed")
        return self._is_over.is_set()

    def wait(self) -> None:
        assert self._is_over.wait(DEADLINE_S)
        assert self.has_ended

    def order_compute(self) -> None:
        """A GPU would wait by itself; a test says when the copy is made."""
        self.orders += 1


class DelayedMover(MemcpyMover):
    """`go_on` lets so many of the transfers that were started, or will be, be made."""

    name = "delayed"

    def __init__(self, pool: BlockPool, layout: BlockLayout) -> None:
        super().__init__(pool, layout)
        self._layout, self._capacity = layout, pool.capacity_blocks
        self.started: list[DelayedTransfer] = []
        self._may_run = Semaphore(0)

    def go_on(self, transfers: int = 1_000) -> None:
        self._may_run.release(transfers)

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        copy, blocks = super().to_pool, self._check(part, section, block_ids)
        return self._start(lambda: copy(part, section, blocks)) if blocks else ENDED

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        copy, blocks = super().from_pool, self._check(part, section, block_ids)
        return self._start(lambda: copy(part, section, blocks)) if blocks else ENDED

    def copy_in(
        self, part: memoryview, target: torch.Tensor, *, after: ComputeMark = None
    ) -> Transfer:
        check_copy(part, target, torch.device("cpu"))
        copy = super().copy_in
        return self._start(lambda: copy(part, target)) if part.nbytes else ENDED

    def copy_out(
        self, source: torch.Tensor, part: memoryview, *, after: ComputeMark = None
    ) -> Transfer:
        check_copy(part, source, torch.device("cpu"))
        copy = super().copy_out
        return self._start(lambda: copy(source, part)) if part.nbytes else ENDED

    def _check(self, part: memoryview, section: int, block_ids: Sequence[int]) -> BlockList:
        return check_part(part, self._layout.sections[section].bytes, block_ids, self._capacity)

    def _start(self, copy: Callable[[], object]) -> DelayedTransfer:
        transfer = DelayedTransfer(copy, self._may_run)
        self.started.append(transfer)
        return transfer
