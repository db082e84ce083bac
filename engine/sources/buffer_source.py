"""Prefixes out of any store that fetches into buffers: whole blocks, straight into the pool.

The sections of a block come together, so no pass begins before all of them are there. A plain store
keeps no window state: a model that has some replays.
"""

from collections.abc import Callable

from kvstore.key import Namespace
from kvstore.policy import HitPlan, plan_dense_hit, plan_hit

from ..block_pool import BlockPool
from ..block_store import BlockStore, FetchOutcome
from ..store_faults import STORE_ERRORS, StoreFaults
from .load import ThreadedLoad
from .threaded_source import LoadLimits, ThreadedSource

DEFAULT_LIMITS = LoadLimits()


class BufferSource(ThreadedSource):
    """A `PrefixSource` over a `BlockStore`. The store belongs to the caller. Raises InvalidRequest
    for a pool that is not in the memory of the host."""

    def __init__(
        self,
        store: BlockStore,
        *,
        namespace: Namespace,
        pool: BlockPool,
        has_window_state: bool,
        faults: StoreFaults,
        limits: LoadLimits = DEFAULT_LIMITS,
        clock: Callable[[], float],
    ) -> None:
        pool.require_host("fetches without an agent")
        super().__init__(namespace=namespace, pool=pool, faults=faults, limits=limits, clock=clock)
        self._store = store
        self._has_window_state = has_window_state

    def _match(self, load: ThreadedLoad) -> tuple[int, HitPlan]:
        matched_blocks = self._store.match(self._namespace, load.keys)
        if self._has_window_state:
            return matched_blocks, plan_hit(len(load.prompt_ids), matched_blocks, ())
        return matched_blocks, plan_dense_hit(len(load.prompt_ids), matched_blocks)

    def _bring(self, load: ThreadedLoad) -> None:
        start_s = self._clock()
        outcome = self._fetch(load) if load.order.block_ids else None
        end_s = self._clock()
        blocks = 0 if outcome is None else outcome.blocks
        load.note("fetch", None, start_s, end_s)
        if blocks == len(load.order.block_ids):
            load.publish_sections(len(self._namespace.layout.sections))
        load.finish(
            blocks,
            rejected_shards=0 if outcome is None else outcome.rejected_shards,
            fetch_s=end_s - load.order.begun_at_s,
        )

    def _fetch(self, load: ThreadedLoad) -> FetchOutcome | None:
        order = load.order
        buffers = [self._pool.buffer(block_id) for block_id in order.block_ids]
        try:
            with self._within(load, self._limits.fetch_deadline_s) as deadline_s:
                outcome = self._store.fetch(
                    self._namespace,
                    load.keys[: order.plan.stored_blocks],
                    buffers,
                    first_block=order.first_block,
                    deadline_s=deadline_s,
                )
        except STORE_ERRORS as error:
            self._faults.note("fetch", error)
            return None
        assert 0 <= outcome.blocks <= len(buffers), (outcome.blocks, len(buffers))
        return outcome
