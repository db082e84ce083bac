"""Follows a run as it fills, and has each section moved into the pool as soon as it is there."""

from collections.abc import Callable
from functools import partial
from threading import Semaphore

from kvstore.client import ArenaRun

from ..section_copy import SectionCopy
from ..store_faults import STORE_ERRORS
from .load import ThreadedLoad
from .work_threads import WorkThreads

STEP_BYTES = 4 << 20
"""A copy begins when so much more of a section is there, about a millisecond's work: less would
wake the threads more often, more would let the copying thread idle while a section comes."""

LOOK_S = 1.0
"""Between two looks whether the copying thread lives, while its copies are waited for."""


class RunSwap:
    """One load's way from a run, which is being fetched into, to the blocks of its order.

    `follow` belongs to the thread that brings the load; copies are made in another one, in the
    order in which the sections come.
    """

    def __init__(
        self,
        load: ThreadedLoad,
        run: ArenaRun,
        *,
        copy: SectionCopy,
        copying: WorkThreads,
        clock: Callable[[], float],
    ) -> None:
        self.copy_s = 0.0
        """Time that the copies took."""
        self.filled_at_s = clock()
        """When the last byte had come that was waited for."""
        self._load = load
        self._run = run
        self._copy = copy
        self._copying = copying
        self._clock = clock
        self._sections = run.layout.layout.sections
        self._copied = [0] * len(self._sections)
        """Leading blocks of which the section is in the pool."""
        self._is_lost = False
        self._submitted = 0
        self._ended = Semaphore(0)

    @property
    def whole_blocks(self) -> int:
        """Leading blocks that are in the pool with every section."""
        return min(self._copied)

    def follow(self, end_at_s: float) -> None:
        """Return when what came until `end_at_s` is in the pool and nothing writes there any more.
        Raises STORE_ERRORS, then too, if the run was lost or released."""
        try:
            blocks = self._run.blocks
            for section in range(len(self._sections)):
                blocks = self._follow_section(section, blocks, end_at_s)
        finally:
            self.filled_at_s = self._clock()
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """However long that takes, as of a process that was stopped meanwhile: blocks that are let
        go of before would be written to when they are somebody else's. A copy waits for nobody."""
        for _ in range(self._submitted):
            has_lived = True
            while not self._ended.acquire(timeout=LOOK_S):
                assert has_lived, "the copying thread has died; its traceback is on stderr"
                has_lived = self._copying.is_whole

    def _follow_section(self, section: int, blocks: int, end_at_s: float) -> int:
        """Wait for a section of `blocks` blocks; the number of those that have it in the end."""
        start_s = self._clock()
        step_blocks = max(1, STEP_BYTES // self._sections[section].bytes)
        ready = 0
        while ready < blocks:
            asked = min(ready + step_blocks, blocks)
            now_ready = self._run.wait_ready(section, asked, end_at_s - self._clock())
            now_ready = min(now_ready, blocks)
            if now_ready > ready:
                self._submit(section, ready, now_ready)
            ready = now_ready
            if ready < asked:  # that is all that comes
                blocks = ready
        self._load.note("fetch", section, start_s, self._clock())
        return blocks

    def _submit(self, section: int, first: int, end: int) -> None:
        if self._copying.submit(partial(self._copy_part, section, first, end)):
            self._submitted += 1

    def _copy_part(self, section: int, first: int, end: int) -> None:
        """In the copying thread: blocks first .. end - 1."""
        try:
            if not (self._load.is_given_up or self._is_lost):
                self._copy_ready(section, first, end)
        finally:
            self._ended.release()

    def _copy_ready(self, section: int, first: int, end: int) -> None:
        start_s = self._clock()
        part_bytes = self._sections[section].bytes
        block_ids = self._load.order.block_ids
        try:
            part = self._run.section(section)[first * part_bytes : end * part_bytes]
            self._copy.to_pool(part, section, block_ids[first:end])
            # Of a run that was lost meanwhile nobody knows whose bytes these are.
            self._run.ready_blocks(section)
        except STORE_ERRORS:  # raised in the following thread too, which tells of it
            self._is_lost = True
            return
        end_s = self._clock()
        self.copy_s += end_s - start_s
        self._copied[section] = end
        self._load.note("copy", section, start_s, end_s)
        if end == len(block_ids):
            self._load.publish_sections(section + 1)
