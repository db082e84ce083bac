"""What all movers for a GPU have alike: streams, checks, copies of bytes that lie together, and a
way for parts of the host's memory that are not page-locked.

Each direction has its own lane of streams, so that saves do not stand in the way of swap-in. The
lane's lock is held while work is queued, never while it runs.
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
from ..errors import DeviceLost, InvalidRequest, TransferFailed
from ..upload import upload
from .block_list import BlockList
from .cuda_runtime import CudaRuntime
from .cuda_streams import current, make_stream, mark_current, record
from .cuda_transfer import EventTransfer, all_queued
from .mover import (
    ENDED,
    ComputeMark,
    Transfer,
    check_copy,
    check_part,
    first_line,
    wait_at_close,
    wait_to_end,
)
from .pinned import PinnedMemory, PinnedRange, address_of

log = logging.getLogger(__name__)

BOUNCE_BYTES = 8 << 20


class Lane:
    """Streams of one direction. Kernels go before a pass's: they are short, and it may wait for
    them."""

    def __init__(self, device: torch.device) -> None:
        self.lock = Lock()
        self.copies = make_stream(device)
        self.kernels = make_stream(device, -1)
        # Made once, for whoever holds the lock: each would take as long as a call of CUDA.
        self.on_device = torch.cuda.device(device)
        self.with_kernels = current(self.kernels)

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Both of them."""
        return self.copies, self.kernels

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
class Together:
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
        self._in, self._out = Lane(self._device), Lane(self._device)
        self._bounce_lock = Lock()
        self._bounce: PinnedRange | None = None

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
        has_ended = wait_at_close(queued, self.name, self)
        bounce, self._bounce = self._bounce, None
        if bounce is not None and has_ended:
            self._pinned.disown(bounce)

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
        return self._move_by_bounce(lane, start, part, place, blocks, after)

    def _start(
        self,
        lane: Lane,
        start: Callable[[], torch.cuda.Event],
        after: ComputeMark,
        *keeps: object,
    ) -> Transfer:
        with lane.lock:
            try:
                with lane.on_device:
                    event = start()
            except BaseException as error:
                # What is queued of it would go on, in memory that its owner gives back.
                wait_to_end(*all_queued(self._device, *lane.streams))
                # An OSError is a kernel's that could not be compiled.
                if not isinstance(error, RuntimeError | ValueError | OSError):
                    raise
                said = first_line(error)
                raise TransferFailed(f"{self.name} on {self._device}: {said}") from error
        return EventTransfer(event, self._device, *keeps, after=after)

    def _move_by_bounce(
        self,
        lane: Lane,
        start: Callable[[HostPart], torch.cuda.Event],
        part: memoryview,
        place: SectionPlace,
        blocks: BlockList,
        after: ComputeMark,
    ) -> Transfer:
        """Through a buffer that is page-locked, a piece at a time; this thread waits for each."""
        rows = np.frombuffer(part, np.uint8).reshape(len(blocks), place.width)
        with self._bounce_lock:
            step = max(1, BOUNCE_BYTES // place.width)
            bounce, pinned = self._need_bounce(min(step, len(blocks)) * place.width)
            for first in range(0, len(blocks), step):
                some = blocks.cut(first, min(first + step, len(blocks)))
                piece = bounce[: len(some) * place.width]
                copied = np.frombuffer(piece, np.uint8).reshape(len(some), place.width)
                if lane is self._in:
                    np.copyto(copied, rows[first : first + len(some)])
                host = HostPart(address_of(piece), place, some, after, pinned)
                wait_to_end(self._start(lane, partial(start, host), after, piece, host))
                if lane is self._out:
                    np.copyto(rows[first : first + len(some)], copied)
        return ENDED

    def _copy_together(
        self, lane: Lane, part: memoryview, memory: torch.Tensor, after: ComputeMark
    ) -> Transfer:
        check_copy(part, memory, self._device)
        if not part.nbytes:
            return ENDED
        address = address_of(part)
        with self._pinned.use(address, part.nbytes) as pinned:
            if pinned is not None:
                bytes_ = Together(address, memory.data_ptr(), part.nbytes, after)
                copy = partial(self._queue_copy, lane, bytes_)
                return self._start(lane, copy, after, part, memory)
        return self._copy_by_bounce(lane, part, memory, after)

    def _copy_by_bounce(
        self, lane: Lane, part: memoryview, memory: torch.Tensor, after: ComputeMark
    ) -> Transfer:
        """As `_move_by_bounce`."""
        whole = np.frombuffer(part, np.uint8)
        with self._bounce_lock:
            bounce, _ = self._need_bounce(min(len(whole), BOUNCE_BYTES))
            for first in range(0, len(whole), BOUNCE_BYTES):
                some = whole[first : first + BOUNCE_BYTES]
                piece = bounce[: len(some)]
                copied = np.frombuffer(piece, np.uint8)
                if lane is self._in:
                    np.copyto(copied, some)
                bytes_ = Together(address_of(piece), memory.data_ptr() + first, len(some), after)
                copy = partial(self._queue_copy, lane, bytes_)
                wait_to_end(self._start(lane, copy, after, piece, memory))
                if lane is self._out:
                    np.copyto(some, copied)
        return ENDED

    def _queue_copy(self, lane: Lane, what: Together) -> torch.cuda.Event:
        """Queue one DMA."""
        if what.after is not None:
            lane.copies.wait_event(what.after)
        ends = (what.device, what.host) if lane is self._in else (what.host, what.device)
        self._runtime.copy(*ends, what.size_bytes, lane.copies.cuda_stream)
        return record(lane.copies)

    def _need_bounce(self, size_bytes: int) -> tuple[memoryview, PinnedRange]:
        """A page-locked buffer of at least so many bytes. Raises TransferFailed."""
        if self._bounce is None or self._bounce.view.nbytes < size_bytes:
            size_bytes = max(size_bytes, BOUNCE_BYTES)
            try:
                memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise TransferFailed(
                    f"{size_bytes} bytes to page-lock: {first_line(error)}"
                ) from error
            smaller, self._bounce = self._bounce, self._pinned.adopt(memory)
            if smaller is not None:  # whoever used it has waited
                self._pinned.disown(smaller)
        return self._bounce.view, self._bounce

    # For those that name single blocks ------------------------------------------------------------

    def _addresses(self, part: HostPart) -> tuple[np.ndarray, np.ndarray]:
        """Of each block's section in the host and in the pool, uint64."""
        count = len(part.blocks)
        host = part.address + np.arange(count, dtype=np.uint64) * np.uint64(part.place.width)
        pool = part.blocks.array.astype(np.uint64) * np.uint64(self._block_bytes)
        pool += np.uint64(self._pool_address + part.place.offset)
        return host.astype(np.uint64), pool
