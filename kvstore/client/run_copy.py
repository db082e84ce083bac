"""Copies blocks between a caller's buffers, block after block, and a run, section after section.

For engines whose cache is not layer-major, or not to be touched by others. One that reads its run
in place needs none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arena.run_layout import RUN_BLOCKS_MAX, RunLayout
from ..layout import BlockLayout
from .arena_run import ArenaRun

ARENA_SHARES = 4
"""One round takes no more than this part of the arena, so that others need not wait for it whole;
the copy of a round is short against its fetch."""
ROUND_BYTES_MAX = 128 << 20
"""The event loop stands still while a round is copied: some 50 ms."""


def choose_round_blocks(layout: BlockLayout, blocks: int, arena_bytes: int) -> int:
    """How many of `blocks` to ask for in one round; at least 1. All rounds are about equal."""
    share_blocks = min(arena_bytes // ARENA_SHARES, ROUND_BYTES_MAX) // layout.block_bytes
    most = max(1, min(share_blocks, RUN_BLOCKS_MAX))
    rounds = -(-blocks // most)
    return -(-blocks // rounds)


class SectionCopy:
    """Copies what is ready of a run into `views`, one for each of its blocks; each byte once."""

    def __init__(self, run: ArenaRun, views: Sequence[memoryview]) -> None:
        self._run = run
        self._views = views
        self._starts = section_starts(run.layout)
        self._copied = [0] * len(self._starts)
        """Leading blocks of which the section is in the buffers."""

    @property
    def whole_blocks(self) -> int:
        """Leading blocks that are in the buffers with every section."""
        return min(self._copied)

    def copy_ready(self) -> None:
        """Copy what is ready now, of a fetch in block order. Raises AgentError if the run is lost.

        Each section of a batch comes with a wake-up of its own; there is nothing to do until the
        last one has come.
        """
        last = len(self._starts) - 1
        if self._run.ready_blocks(last) <= self._copied[last]:
            return
        for section in range(len(self._starts)):
            self._copy(section, self._run.ready_blocks(section))

    def copy_rest(self, blocks: int) -> None:
        """The first `blocks` blocks are whole, as the agent says: copy what is missing of them."""
        for section in range(len(self._starts)):
            self._copy(section, blocks)

    def _copy(self, section: int, blocks: int) -> None:
        first = self._copied[section]
        end = min(blocks, len(self._views))
        if end <= first:
            return
        size = self._run.layout.layout.sections[section].bytes
        start, source = self._starts[section], self._run.section(section)
        for block in range(first, end):
            self._views[block][start : start + size] = source[block * size : (block + 1) * size]
        self._copied[section] = end


def copy_into_run(views: Sequence[memoryview], run: ArenaRun) -> None:
    """Write blocks into the first places of a run."""
    for section, start in enumerate(section_starts(run.layout)):
        size = run.layout.layout.sections[section].bytes
        place = run.section(section)
        for block, view in enumerate(views):
            place[block * size : (block + 1) * size] = view[start : start + size]


def copy_out_of_run(run: ArenaRun, view: memoryview) -> None:
    """Copy the first block of a run."""
    SectionCopy(run, [view]).copy_rest(1)


def section_starts(layout: RunLayout) -> list[int]:
    """Where each section begins within a block."""
    starts, at = [], 0
    for section in layout.layout.sections:
        starts.append(at)
        at += section.bytes
    return starts
