"""What all movers for a GPU have alike: streams, checks, and copies of bytes that lie together.

Each direction has its own lane of streams, and its own buffer, so that saves do not stand in the
way of swap-in. The lane's lock is held while work is queued, never while it runs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np
import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import DeviceLost, InvalidRequest
from ..upload import upload
from .block_list import BlockList
from .bounce import PinnedBounce
from .cuda_runtime import CudaRuntime
from .cuda_streams import current, is_over, make_stream, mark_current, record
from .cuda_transfer import EventTransfer, all_queued
from .device_errors import transfer_error
from .mover import (
    ENDED,
    ComputeMark,
    Transfer,
    check_copy,
    check_part,
    wait_at_close,
    wait_for_compute,
    wait_to_end,
)
from .pinned import PinnedMemory, PinnedRange, address_of

log = logging.getLogger(__name__)


class Lane:
    """Streams of one direction. Kernels go before a pass's: they are short, and it may wait for
    them."""

    def __init__(self, device: torch.device, bounce: PinnedBounce) -> None:
        self.lock = Lock()
        self.bounce = bounce
        self._marks: tuple[ComputeMark, ...] = ()
        self.copies = make_stream(device)
        self.kernels = make_stream(device, -1)
        # Made once, for whoever holds the lock: each would take as long as a call of CUDA.
        self.on_device = torch.cuda.device(device)
        self.with_kernels = current(self.kernels)

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Both of them."""
        return self.copies, self.kernels

    def stand_behind(self, mark: ComputeMark) -> tuple[ComputeMark, ...]:
        """What is queued now, and has to wait for `mark`, begins behind these: its streams have one
        order, so that it stands behind what they were told to wait for before, too. With the lock
        held. Raises RuntimeError if the device has failed."""
        if mark is not None and not any(one is mark for one in self._marks):
            waiting = (one for one in self._marks if one is not None and not is_over(one))
            self._marks = (*waiting, mark)
        return self._marks

    def ids_on_device(self, blocks: BlockList) -> torch.Tensor:
        """The ids, int32, for kernels of the current stream, which is `kernels` or one that waits
        for it. Uploaded once for a whole list and all its parts."""
        ids: torch.Tensor | None = blocks.on_device.get(self)
        if ids is None:
            host = torch.from_numpy(blocks.whole.array)
            ids = blocks.on_device[self] = upload(host, self.kernels.device)
        return cut_rows(ids, blocks.first, blocks.first + len(blocks))


def cut_rows(rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Rows first .. end - 1; the tensor itself, which costs nothing, if those are all."""
    return rows if first == 0 and end == len(rows) else rows[first:end]


@dataclass(frozen=True, slots=True)
class SectionPlace:
    """Where a section stands in every block of the pool."""

    offset: int
    width: int


@dataclass(frozen=True, slots=True)
class HostPart:
    """A section of consecutive blocks in page-locked memory."""

    address: int
    place: SectionPlace
    blocks: BlockList
    after: ComputeMark
    pinned: PinnedRange


@dataclass(frozen=True, slots=True)
class ContiguousCopy:
    """Bytes that lie together in page-locked memory and on the device."""

    host: int
    device: int
    size_bytes: int
    after: ComputeMark


class CudaMover(ABC):
    """A `SectionMover` for a pool on a GPU. Raises InvalidRequest for another one."""

    name: str
    step_bytes = 8 << 20
    """150 us of the bus, beside some 30 to start it."""

    def __init__(
        self,
        pool: BlockPool,
        layout: BlockLayout,
        *,
        pinned: PinnedMemory,
        runtime: CudaRuntime,
    ) -> None:
        """`pinned` belongs to the caller, and is to be closed after the mover."""
        assert pool.block_bytes == layout.block_bytes, (pool.block_bytes, layout)
        if pool.device.type != "cuda":
            raise InvalidRequest(self.name, given=f"a pool on {pool.device}", expected="on a GPU")
        self._pool = pool.memory
        self._pool_address = pool.memory.data_ptr()
        self._block_bytes = pool.block_bytes
        self._capacity_blocks = pool.capacity_blocks
        self._device = pool.memory.device
        self._pinned = pinned
        self._runtime = runtime
        self._places: list[SectionPlace] = []
        at = 0
        for section in layout.sections:
            self._places.append(SectionPlace(at, section.bytes))
            at += section.bytes
        self._in = Lane(self._device, PinnedBounce(pinned))
        self._out = Lane(self._device, PinnedBounce(pinned))

    @abstractmethod
    def _start_in(self, part: HostPart) -> torch.cuda.Event:
        """Queue the way into the pool; the event is its end. The lane's lock is held, and the
        device is the current one. Raises TransferFailed."""

    @abstractmethod
    def _start_out(self, part: HostPart) -> torch.cuda.Event:
        """Queue the way out of the pool; else as `_start_in`."""

    def mark_compute(self) -> ComputeMark:
        """See SectionMover."""
        return mark_current(self._device)

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """See SectionMover."""
        return self._move(self._in, self._start_in, part, section, block_ids, after)

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """See SectionMover."""
        return self._move(self._out, self._start_out, part, section, block_ids, after)

    def copy_in(
        self, part: memoryview, target: torch.Tensor, *, after: ComputeMark = None
    ) -> Transfer:
        """See SectionMover."""
        return self._copy_together(self._in, part, target, after)

    def copy_out(
        self, source: torch.Tensor, part: memoryview, *, after: ComputeMark = None
    ) -> Transfer:
        """See SectionMover."""
        return self._copy_together(self._out, part, source, after)

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """All that it queues work in: a measurement holds them back, to begin when it says."""
        return self._in.streams + self._out.streams

    def close(self) -> None:
        """See SectionMover."""
        try:
            queued = all_queued(self._device, *self.streams)
        except DeviceLost as error:
            log.error("mover %s, at its end: %s", self.name, error)
            queued = []
        if wait_at_close(queued, self.name, self):
            self._in.bounce.close()
            self._out.bounce.close()

    def _move(
        self,
        lane: Lane,
        start: Callable[[HostPart], torch.cuda.Event],
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        after: ComputeMark,
    ) -> Transfer:
        place = self._places[section]
        blocks = check_part(part, place.width, block_ids, self._capacity_blocks)
        if not len(blocks):
            return ENDED
        address = address_of(part)
        with self._pinned.use(address, part.nbytes) as pinned:
            if pinned is not None:
                host = HostPart(address, place, blocks, after, pinned)
                return self._start(lane, partial(start, host), after, part, host)

        def start_piece(piece: memoryview, pinned: PinnedRange, first: int, end: int) -> Transfer:
            some = blocks.cut(first, end)
            host = HostPart(address_of(piece), place, some, after, pinned)
            return self._start(lane, partial(start, host), after, piece, host)

        self._wait_before_bounce(after)
        lane.bounce.move(part, place.width, start_piece, is_in=lane is self._in)
        return ENDED

    def _wait_before_bounce(self, after: ComputeMark) -> None:
        """A part that has to wait for a pass does not keep the buffer from others meanwhile. Raises
        DeviceLost, TransferStuck: then nothing was begun."""
        wait_for_compute(after, f"a transfer on {self._device}")

    def _start(
        self,
        lane: Lane,
        start: Callable[[], torch.cuda.Event],
        after: ComputeMark,
        *keeps: object,
    ) -> Transfer:
        queued: list[EventTransfer] = []
        behind: tuple[ComputeMark, ...] = ()
        try:
            with lane.lock:
                try:
                    behind = lane.stand_behind(after)
                    with lane.on_device:
                        event = start()
                except BaseException:
                    # Of this call, and before another one queues more.
                    queued = all_queued(self._device, *lane.streams, behind=behind)
                    raise
        except BaseException as error:
            # What is queued of it would go on, in memory that its owner gives back. It may stand
            # behind a pass, so not with the lock held.
            wait_to_end(*queued)
            # An OSError is a kernel's that could not be compiled.
            if not isinstance(error, RuntimeError | ValueError | OSError):
                raise
            raise transfer_error(f"{self.name} on {self._device}", error) from error
        return EventTransfer(event, self._device, *keeps, behind=behind)

    def _copy_together(
        self, lane: Lane, part: memoryview, memory: torch.Tensor, after: ComputeMark
    ) -> Transfer:
        check_copy(part, memory, self._device)
        if not part.nbytes:
            return ENDED
        address = address_of(part)
        with self._pinned.use(address, part.nbytes) as pinned:
            if pinned is not None:
                what = ContiguousCopy(address, memory.data_ptr(), part.nbytes, after)
                copy = partial(self._queue_copy, lane, what)
                return self._start(lane, copy, after, part, memory)

        def start_piece(piece: memoryview, pinned: PinnedRange, first: int, end: int) -> Transfer:
            there = memory.data_ptr() + first
            some = ContiguousCopy(address_of(piece), there, end - first, after)
            copy = partial(self._queue_copy, lane, some)
            return self._start(lane, copy, after, piece, memory, pinned)

        self._wait_before_bounce(after)
        lane.bounce.move(part, 1, start_piece, is_in=lane is self._in)
        return ENDED

    def _queue_copy(self, lane: Lane, what: ContiguousCopy) -> torch.cuda.Event:
        """Queue one DMA."""
        if what.after is not None:
            lane.copies.wait_event(what.after)
        ends = (what.device, what.host) if lane is self._in else (what.host, what.device)
        self._runtime.copy(*ends, what.size_bytes, lane.copies.cuda_stream)
        return record(lane.copies)

    # For those that name single blocks ------------------------------------------------------------

    def _addresses(self, part: HostPart) -> tuple[np.ndarray, np.ndarray]:
        """Of each block's section in the host and in the pool, uint64."""
        count = len(part.blocks)
        host = part.address + np.arange(count, dtype=np.uint64) * np.uint64(part.place.width)
        pool = part.blocks.array.astype(np.uint64) * np.uint64(self._block_bytes)
        pool += np.uint64(self._pool_address + part.place.offset)
        return host.astype(np.uint64), pool
