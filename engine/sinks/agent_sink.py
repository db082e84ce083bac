"""Saves blocks and window state by the agent of the host: copied into leased runs, and handed over.

A block is in the pool only until it is copied; what then becomes of it the agent tells later, so
several runs are under way while the next one is filled.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from kvstore.client import ArenaRun, BlockingAgentClient, RunOperation, SaveResult
from kvstore.key import Namespace
from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import TransferFailed, count_of
from ..kv.memcpy_mover import MemcpyMover
from ..kv.mover import (
    ComputeMark,
    SectionMover,
    Transfer,
    move_out,
    wait_for_compute,
    wait_to_end,
)
from ..save_receipt import SaveReceipt
from ..store_faults import STORE_ERRORS, StoreFaults
from .threaded_sink import SaveJob, SinkLimits, ThreadedSink, WindowJob

DEFAULT_LIMITS = SinkLimits()


class AgentSink(ThreadedSink):
    """A `SaveSink` over the agent of this host. Client and mover belong to the caller.

    Blocks for which the arena has no room within the lease's deadline, and those that meet an
    AgentError or do not get out of the pool, are failed ones; window state is dropped then.
    """

    def __init__(
        self,
        client: BlockingAgentClient,
        *,
        namespace: Namespace,
        pool: BlockPool,
        window_layout: BlockLayout | None,
        faults: StoreFaults,
        limits: SinkLimits = DEFAULT_LIMITS,
        clock: Callable[[], float],
        mover: SectionMover | None = None,
    ) -> None:
        """`window_layout`: of the records that `save_window` gets, None for a model without.
        `mover`: for the pool, None for one of the host, where a memcpy is all there is to it."""
        self._client = client
        self._window_layout = window_layout
        self._mover = MemcpyMover(pool, namespace.layout) if mover is None else mover
        self._runs_under_way = 0
        # The client knows the layout from now on; why the agent does not, later calls will tell.
        with suppress(*STORE_ERRORS):
            client.open_namespace(namespace, window_layout=window_layout)
        super().__init__(namespace=namespace, pool=pool, faults=faults, limits=limits, clock=clock)

    def _mark_compute(self) -> ComputeMark:
        return self._mover.mark_compute()

    def _is_settled(self) -> bool:
        return self._runs_under_way == 0

    # Blocks -------------------------------------------------------------------------------------

    def _save(self, job: SaveJob) -> None:
        """Hand the blocks over, as many in a run as it has room for."""
        done = 0
        try:
            # Before a run is leased: room in the arena would else be idle for a pass, or written
            # to by a transfer that begins when it is somebody else's.
            wait_for_compute(job.after, f"a save of {count_of(len(job.block_ids), 'block')}")
            while done < len(job.block_ids):
                handed_over = self._save_some(job, done)
                if handed_over == 0:
                    break
                done += handed_over
        except (*STORE_ERRORS, TransferFailed) as error:
            self._faults.note("save", error)
        if done < len(job.block_ids):
            job.receipt.settle(failed=len(job.block_ids) - done)

    def _save_some(self, job: SaveJob, done: int) -> int:
        """Hand over some blocks behind the first `done`; how many, 0 if there is no room."""
        if not self._wait_for_runs():
            return 0
        wanted = min(len(job.block_ids) - done, self._limits.lease_blocks_max)
        run = self._client.lease_run(
            self._namespace, wanted, deadline_s=self._limits.lease_deadline_s
        )
        if run is None:
            return 0
        with run:
            block_ids = job.block_ids[done : done + run.blocks]
            sections = range(len(self._namespace.layout.sections))
            move_out(self._mover, [run.section(number) for number in sections], block_ids)
            first_block = job.first_block + done
            saving = self._client.save_run(
                self._namespace,
                job.keys[: first_block + run.blocks],
                run,
                first_block=first_block,
                ttl_class=job.ttl_class,
                deadline_s=self._limits.save_deadline_s,
            )
        with self._changed:
            self._runs_under_way += 1
        saving.when_done(partial(self._settle, job.receipt, len(block_ids), saving))
        return len(block_ids)

    def _wait_for_runs(self) -> bool:
        """Whether another run may be handed over, now or soon: each of them ends by its
        deadline."""
        end_s = self._clock() + self._limits.save_deadline_s
        with self._changed:
            while self._runs_under_way >= self._limits.runs_max:
                if not self._wait_until(end_s):
                    return False
        return True

    def _settle(self, receipt: SaveReceipt, blocks: int, saving: RunOperation[SaveResult]) -> None:
        """In the client's event loop: the agent has said what became of a run, or has gone."""
        try:
            result = saving.join()
        except STORE_ERRORS as error:
            self._faults.note("save", error)
            receipt.settle(failed=blocks)
        else:
            receipt.settle(stored=result.stored, known=result.known, failed=result.failed)
        with self._changed:
            self._runs_under_way -= 1
            self._changed.notify_all()

    # Window state -------------------------------------------------------------------------------

    def _save_window(self, job: WindowJob) -> None:
        assert self._window_layout is not None, "a model without window state"
        try:
            is_kept = self._put_window(job)
        except (*STORE_ERRORS, TransferFailed) as error:
            self._faults.note("put window", error)
            is_kept = False
        if not is_kept:
            self._note_dropped_window()

    def _put_window(self, job: WindowJob) -> bool:
        # Before a run is leased, as in `_save`.
        wait_for_compute(job.record.after, "a save of window state")
        run = self._client.lease_window(self._namespace, deadline_s=self._limits.lease_deadline_s)
        if run is None:
            return False
        with run:
            self._copy_record(run, job.record.memory)
            return self._client.put_window(
                self._namespace, job.key, run, deadline_s=self._limits.lease_deadline_s
            )

    def _copy_record(self, run: ArenaRun, record: torch.Tensor) -> None:
        """Copy a record, the sections of one block one after the other, into a run of one block.
        When this ends, by an error too, nothing writes to the run any more."""
        layout = run.layout.layout
        assert len(record) == layout.block_bytes, (len(record), run)
        transfers, at = list[Transfer](), 0
        try:
            for index, section in enumerate(layout.sections):
                part = record[at : at + section.bytes]
                transfers.append(self._mover.copy_out(part, run.section(index)))
                at += section.bytes
        finally:
            wait_to_end(*transfers)
