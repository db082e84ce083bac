"""Prefixes out of the agent of the host: leased runs that fill section by section, and one thread
that moves each section into the pool as soon as the run has it.

    prefix-match    match
    prefix-load     lease, begin to fetch, wait for section 0, 1, ...
    prefix-window                          window state
    swap-in                                  copy 0, 1, ...
    engine                                      pass over layers 0, 1, ...
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Event

from kvstore.client import ArenaRun, BlockingAgentClient, FetchResult, RunOperation
from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS, BlockLayout
from kvstore.policy import HitPlan

from ..block_pool import BlockPool
from ..errors import RebuiltWrong, TransferFailed
from ..kv.memcpy_mover import MemcpyMover
from ..kv.mover import SectionMover
from ..kv.rebuild import Rebuilder
from ..kv.rebuild_choice import find_rebuilder
from ..store_faults import STORE_ERRORS, StoreFaults
from ..work_threads import WorkThreads
from .load import ThreadedLoad
from .run_swap import RunSwap
from .threaded_source import LoadLimits, ThreadedSource

log = logging.getLogger(__name__)

DEFAULT_LIMITS = LoadLimits()

SHARE = 0.5
"""Part of a load's time that it may wait for room in the arena; the rest is for the blocks. And
part of that rest that it may wait for window state beside them."""

LEAST_DEADLINE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Brought:
    blocks: int = 0
    rejected_shards: int = 0
    fetch_s: float = 0.0
    swap_in_s: float = 0.0


class AgentSource(ThreadedSource):
    """A `PrefixSource` over the agent of this host. Client and mover belong to the caller.

    A full arena, a short fetch and any AgentError are a shorter hit.
    """

    def __init__(
        self,
        client: BlockingAgentClient,
        *,
        namespace: Namespace,
        pool: BlockPool,
        window_layout: BlockLayout | None,
        faults: StoreFaults,
        limits: LoadLimits = DEFAULT_LIMITS,
        clock: Callable[[], float],
        mover: SectionMover | None = None,
        rebuilder: Rebuilder | None = None,
    ) -> None:
        """`window_layout`: of stored window state, None for a model without. `mover`: for the pool,
        None for one of the host, where a memcpy is all there is to it. `rebuilder`: for lost
        shards; None has it measured whether there is to be one (`find_rebuilder`)."""
        self._client = client
        self._window_layout = window_layout
        self._mover = MemcpyMover(pool, namespace.layout) if mover is None else mover
        # The client knows the layout from now on; why the agent does not, later calls will tell.
        with suppress(*STORE_ERRORS):
            client.open_namespace(namespace, window_layout=window_layout)
        self._rebuilder = rebuilder or find_rebuilder(
            client, namespace, pool, self._mover, clock=clock
        )
        self._copying = WorkThreads("swap-in", count=1, clock=clock)
        self._window_fetching = WorkThreads("prefix-window", count=limits.loads_max, clock=clock)
        super().__init__(
            namespace=namespace,
            pool=pool,
            faults=faults,
            limits=limits,
            clock=clock,
            mark_compute=self._mover.mark_compute,
        )

    def close(self, deadline_s: float) -> bool:
        """See PrefixSource."""
        end_s = self._clock() + deadline_s
        has_ended = super().close(deadline_s)
        for threads in (self._window_fetching, self._copying):
            has_ended = threads.close(max(0.0, end_s - self._clock())) and has_ended
        return has_ended

    def _match(self, load: ThreadedLoad) -> tuple[int, HitPlan]:
        found = self._client.match(
            self._namespace,
            load.prompt_ids,
            is_dense=self._window_layout is None,
            deadline_s=self._limits.match_deadline_s,
        )
        return found.matched_blocks, found.plan

    def _bring(self, load: ThreadedLoad) -> None:
        end_at_s = self._clock() + self._limits.fetch_deadline_s
        brought = _Brought()
        try:
            run = self._lease(load, end_at_s) if load.order.block_ids else None
            if run is not None:
                with run:
                    brought = self._bring_by(run, load, end_at_s)
            elif not load.order.block_ids:
                self._end_window(load, self._begin_window(load, end_at_s))
        except STORE_ERRORS as error:
            self._note(load, "fetch", error)
        load.finish(
            brought.blocks,
            rejected_shards=brought.rejected_shards,
            fetch_s=brought.fetch_s,
            swap_in_s=brought.swap_in_s,
        )

    def _lease(self, load: ThreadedLoad, end_at_s: float) -> ArenaRun | None:
        start_s = self._clock()
        blocks = min(len(load.order.block_ids), self._limits.lease_blocks_max)
        with self._within(load, self._share(end_at_s)) as deadline_s:
            run = self._client.lease_run(
                self._namespace,
                blocks,
                has_parity_room=self._rebuilder is not None,
                deadline_s=deadline_s,
            )
        load.note("lease", None, start_s, self._clock())
        return run

    def _bring_by(self, run: ArenaRun, load: ThreadedLoad, end_at_s: float) -> _Brought:
        """Fetch into the run and copy out of it; what was copied counts, whatever failed then."""
        order = load.order
        load.on_give_up(run.release)
        rebuilder, code = self._rebuilder, run.layout.code
        # The agent may have come back with a map of another code.
        if rebuilder is not None and (code is None or not rebuilder.takes(code.k, code.m)):
            rebuilder = None
        fetch = self._client.fetch_run(
            self._namespace,
            load.keys[: order.first_block + run.blocks],
            run,
            first_block=order.first_block,
            rebuild="agent" if rebuilder is None else "reader",
            deadline_s=self._left_s(end_at_s),
        )
        # Beside the sections: neither waits for the other.
        window = self._begin_window(load, end_at_s)
        swap = RunSwap(
            load,
            run,
            mover=self._mover,
            copying=self._copying,
            clock=self._clock,
            rebuilder=rebuilder,
        )
        try:
            with self._within(load, self._left_s(end_at_s)):
                swap.follow(end_at_s)
        except (*STORE_ERRORS, TransferFailed) as error:
            self._note(load, "fetch", error)
            if isinstance(error, RebuiltWrong) and not load.is_given_up:
                log.warning("lost shards are rebuilt by the agent from now on: %s", error)
                # The agent can leave out each shard in turn, until the block is right.
                self._rebuilder = None
        finally:
            self._end_window(load, window)
        return _Brought(
            blocks=swap.whole_blocks,
            rejected_shards=self._count_rejected(load, fetch, end_at_s),
            fetch_s=swap.filled_at_s - order.begun_at_s,
            swap_in_s=swap.copy_s,
        )

    def _begin_window(self, load: ThreadedLoad, end_at_s: float) -> Future[None] | None:
        # One that is given up may be so because the threads end.
        if load.order.plan.window_anchor is None or load.is_given_up:
            return None
        return self._window_fetching.call(self._bring_window, load, end_at_s)

    def _end_window(self, load: ThreadedLoad, window: Future[None] | None) -> None:
        """Return when it has come, or will not come any more."""
        if window is not None:
            try:
                window.result()
            except STORE_ERRORS as error:
                self._note(load, "window", error)

    def _bring_window(self, load: ThreadedLoad, end_at_s: float) -> None:
        """Raises STORE_ERRORS."""
        anchor = load.order.plan.window_anchor
        assert anchor is not None
        assert self._window_layout is not None
        start_s = self._clock()
        record = bytearray(self._window_layout.block_bytes)
        key = load.keys[anchor // BLOCK_TOKENS - 1]
        with self._within(load, self._share(end_at_s)) as deadline_s:
            found = self._client.fetch_window(self._namespace, key, record, deadline_s=deadline_s)
        load.note("window", None, start_s, self._clock())
        if found.is_found:
            load.publish_window(memoryview(record))

    def _count_rejected(
        self, load: ThreadedLoad, fetch: RunOperation[FetchResult], end_at_s: float
    ) -> int:
        """The agent's own word comes a moment after the last byte, or never."""
        has_ended = Event()
        fetch.when_done(has_ended.set)
        if load.is_given_up or not has_ended.wait(max(0.0, end_at_s - self._clock())):
            return 0
        try:
            return fetch.join().rejected_shards
        except STORE_ERRORS as error:
            self._note(load, "fetch", error)
            return 0

    def _note(self, load: ThreadedLoad, operation: str, error: Exception) -> None:
        """Whoever gave the load up has released its run, which is no fault of the store. An agent
        that is lost is one fault of a load, whatever of it fails for that."""
        if not load.is_given_up and not load.is_fault_noted:
            self._faults.note(operation, error)
            load.is_fault_noted = True

    def _left_s(self, end_at_s: float) -> float:
        return max(end_at_s - self._clock(), LEAST_DEADLINE_S)

    def _share(self, end_at_s: float) -> float:
        return max(LEAST_DEADLINE_S, (end_at_s - self._clock()) * SHARE)
