"""Follows a run as it fills, and has each section moved into the pool as soon as it is there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Semaphore

from kvstore.client import ArenaRun

from ..errors import TransferFailed
from ..kv.block_list import BlockList
from ..kv.mover import SectionMover, Transfer, wait_to_end
from ..kv.rebuild import Rebuilder
from ..store_faults import STORE_ERRORS
from ..work_threads import WorkThreads
from .load import ThreadedLoad

LOOK_S = 1.0
"""Between two looks whether the copying thread lives, while its copies are waited for."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Some blocks get their section by a transfer that was started, and had not ended."""

    section: int
    transfer: Transfer


class RunSwap:
    """One load's way from a run, which is being fetched into, to the blocks of its order.

    `follow` belongs to the thread that brings the load; copies are made, or transfers started, in
    another one, in the order in which the sections come.
    """

    def __init__(
        self,
        load: ThreadedLoad,
        run: ArenaRun,
        *,
        mover: SectionMover,
        copying: WorkThreads,
        clock: Callable[[], float],
        rebuilder: Rebuilder | None = None,
    ) -> None:
        """`rebuilder`: brings what the fetch has left to its reader to rebuild, if it did."""
        self.copy_s = 0.0
        """Time that the copies took, or the start of the transfers."""
        self.filled_at_s = clock()
        """When the last byte had come that was waited for."""
        self._load = load
        self._run = run
        self._mover = mover
        self._copying = copying
        self._rebuilder = rebuilder
        self._clock = clock
        self._sections = run.layout.layout.sections
        self._blocks = BlockList(load.order.block_ids)
        self._copied = [0] * len(self._sections)
        """Leading blocks of which the section is known to be in the pool."""
        self._begun = [0] * len(self._sections)
        """Leading blocks whose section is there when all that is under way has ended."""
        self._rebuilds: dict[int, Sequence[Transfer]] = {}
        """What brings the blocks that had lost something, whole, by their place in the run."""
        self._under_way: list[_UnderWay] = []
        self._failure: TransferFailed | None = None
        self._is_lost = False
        self._submitted = 0
        self._ended = Semaphore(0)

    @property
    def whole_blocks(self) -> int:
        """Leading blocks that are in the pool with every section."""
        return min(self._copied)

    def follow(self, end_at_s: float) -> None:
        """Return when what came until `end_at_s` is in the pool and nothing writes there any more,
        nor reads the run. Raises STORE_ERRORS, then too, if the run was lost or released, and
        TransferFailed."""
        try:
            blocks = self._run.blocks
            for section in range(len(self._sections)):
                blocks = self._follow_section(section, blocks, end_at_s)
        finally:
            self.filled_at_s = self._clock()
            try:
                self._wait_for_copies()
            finally:
                self._wait_for_transfers()
        self._confirm()

    def _wait_for_copies(self) -> None:
        """However long that takes, as of a process that was stopped meanwhile: blocks that are let
        go of before would be written to when they are somebody else's. A copy waits for nobody."""
        for _ in range(self._submitted):
            has_lived = True
            while not self._ended.acquire(timeout=LOOK_S):
                assert has_lived, "the copying thread has died; its traceback is on stderr"
                has_lived = self._copying.is_whole

    def _wait_for_transfers(self) -> None:
        """However long that takes, too."""
        try:
            wait_to_end(*(one.transfer for one in self._under_way))
        except TransferFailed as error:
            self._failure = error

    def _confirm(self) -> None:
        """What was published before its transfer had ended is in the pool, or it is said that
        nobody knows."""
        if self._failure is not None:
            # First: of a run that was lost meanwhile the bytes were another's, and are no fault of
            # the transfer, nor of a node.
            self._run.ready_blocks(0)
            raise self._failure
        for one in self._under_way:
            # It was not lost before the last transfer had ended, so none has read of another's.
            self._run.ready_blocks(one.section)
            self._copied[one.section] = self._begun[one.section]
        if self._under_way and self.whole_blocks == len(self._blocks):
            self._load.confirm_sections()

    def _follow_section(self, section: int, blocks: int, end_at_s: float) -> int:
        """Wait for a section of `blocks` blocks; the number of those that have it in the end."""
        start_s = self._clock()
        step_blocks = max(1, self._mover.step_bytes // self._sections[section].bytes)
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
        try:
            before = len(self._under_way)
            for transfer in self._start(section, first, end):
                self._under_way.append(_UnderWay(section, transfer))
            # From here on whatever fails, all of them are waited for.
            begun = self._under_way[before:]
            self._under_way[before:] = [one for one in begun if not one.transfer.has_ended]
            # Of a run that was lost meanwhile nobody knows whose bytes these are.
            self._run.ready_blocks(section)
        except STORE_ERRORS:  # raised in the following thread too, which tells of it
            self._is_lost = True
            return
        except TransferFailed as error:
            self._is_lost, self._failure = True, error
            return
        self._begun[section] = end
        end_s = self._clock()
        self.copy_s += end_s - start_s
        moving = [one.transfer for one in self._under_way if one.section == section]
        if not moving:
            self._copied[section] = end
        self._load.note("copy", section, start_s, end_s)
        if end == len(self._blocks):
            self._load.publish_sections(section + 1, moving)

    def _start(self, section: int, first: int, end: int) -> Iterator[Transfer]:
        """What brings a section of these blocks, one after the other as they begin; of those that
        have lost something all sections come at once, when the first of them is asked for."""
        lost = self._start_rebuilds(first, end)
        yield from {id(one): one for at in lost for one in self._rebuilds[at]}.values()
        part_bytes = self._sections[section].bytes
        memory = self._run.section(section)
        for start, stop in cut_between(first, end, lost):
            part = memory[start * part_bytes : stop * part_bytes]
            blocks = self._blocks.cut(start, stop)
            after = self._load.order.after
            yield self._mover.to_pool(part, section, blocks, after=after)

    def _start_rebuilds(self, first: int, end: int) -> list[int]:
        """The places of the blocks among these that have lost something; they are on their way."""
        if self._rebuilder is None:
            return []
        losses = self._run.losses(first, end)
        new = [loss for loss in losses if loss.block not in self._rebuilds]
        if new:
            places = [loss.block for loss in new]
            order, keys = self._load.order, self._load.keys
            transfers = self._rebuilder.bring(
                self._run,
                [keys[order.first_block + place] for place in places],
                new,
                BlockList([self._blocks[place] for place in places]),
                after=order.after,
            )
            self._rebuilds.update(dict.fromkeys(places, transfers))
        return [loss.block for loss in losses]


def cut_between(first: int, end: int, left_out: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges that are left of [first, end) without the places that are left out, which are
    ascending."""
    ranges, start = [], first
    for place in [*left_out, end]:
        if start < place:
            ranges.append((start, place))
        start = place + 1
    return ranges
