"""Keeps what was computed: complete blocks and window state, for this engine and for the store.

Nothing here waits; what cannot be kept is computed again by whoever wants it.
"""

import logging

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import window_anchor_after_prefill

from .errors import DeviceFull
from .job import Job
from .model_runner import ModelRunner
from .prefix_index import PrefixIndex
from .save_sink import SaveSink
from .window_record import WindowRecord
from .window_snapshots import WindowSnapshots

log = logging.getLogger(__name__)


class Keeper:
    """Looks after one engine's sequences, after each pass over them and at their end."""

    def __init__(
        self,
        runner: ModelRunner,
        index: PrefixIndex,
        snapshots: WindowSnapshots,
        sink: SaveSink | None,
    ) -> None:
        self._runner = runner
        self._index = index
        self._snapshots = snapshots
        self._sink = sink
        self.dropped_windows = 0
        """Window states for which the device had no memory. May be read from any thread."""

    def after_pass(self, job: Job) -> None:
        """A pass has advanced a sequence: whatever became complete is shared and saved."""
        complete = job.sequence.complete_blocks
        if complete > job.indexed_blocks:
            self._index_blocks(job, complete)
        if complete > max(job.saved_blocks, job.plan.stored_blocks):
            self._save_blocks(job, complete)
        if complete > job.window_blocks and self._runner.window_layout is not None:
            self._copy_window(job)

    def at_end(self, job: Job) -> None:
        """The answer is over, or goes on elsewhere: keep its newest window states."""
        for key, record in job.windows:
            self._keep_window(job, key, record)
            if self._sink is not None:
                self._sink.save_window(key, record)
        job.windows.clear()

    def _index_blocks(self, job: Job, complete: int) -> None:
        sequence, keys = job.sequence, job.keys()
        # What a bounded replay leads to is not what a cold run gives: it is not shared.
        end = complete if sequence.replay_first is None else job.plan.stored_blocks
        for block in range(job.indexed_blocks, min(end, complete)):
            self._index.add(keys[block], sequence.block_ids[block], is_cold=job.is_cold)
        job.indexed_blocks = complete

    def _save_blocks(self, job: Job, complete: int) -> None:
        first = max(job.saved_blocks, job.plan.stored_blocks)
        if self._sink is not None:
            self._sink.save_blocks(
                job.keys()[:complete],
                job.sequence.block_ids[first:complete],
                ttl_class=job.request.ttl_class,
                receipt=job.receipt,
            )
        job.saved_blocks = complete

    def _copy_window(self, job: Job) -> None:
        sequence = job.sequence
        anchor = self._runner.window_anchor(sequence)
        job.window_blocks = sequence.complete_blocks
        is_answer = anchor is not None and anchor >= sequence.prompt_tokens
        if anchor is None or not (is_answer or anchor in job.borders):
            return
        try:
            record = self._runner.copy_window(sequence, anchor)
        except DeviceFull as error:
            self._note_dropped_window(error)
            return
        key = job.keys()[anchor // BLOCK_TOKENS - 1]
        if is_answer:
            job.windows.append((key, record))
            return
        self._keep_window(job, key, record)
        if self._sink is not None and anchor == window_anchor_after_prefill(sequence.prompt_tokens):
            self._sink.save_window(key, record)

    def _note_dropped_window(self, error: DeviceFull) -> None:
        # Only the first one is told: there is one for each block of each answer.
        if self.dropped_windows == 0:
            log.error("window state is not kept, later hits replay tokens for it: %s", error)
        self.dropped_windows += 1

    def _keep_window(self, job: Job, key: bytes, record: WindowRecord) -> None:
        if job.sequence.replay_first is None:
            self._snapshots.put(key, record, is_cold=job.is_cold)
