"""Mover (a): one DMA for a section, which is contiguous in the arena, and a kernel between a
staging buffer and the blocks of the pool.

    copies    DMA 0 | DMA 1 | DMA 2 ...         (out of the pool: gather 0, gather 1 | DMA 0 ...)
    kernels         | scatter 0 | scatter 1 ...

Three buffers for each direction, so that a DMA waits for no kernel that runs beside it. Blocks that
follow one another in the pool need neither: one DMA of rows goes straight to their places.
"""

from __future__ import annotations

import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from .cuda_mover import CudaMover, HostPart, Lane, cut_rows
from .cuda_runtime import CudaRuntime
from .cuda_streams import count_multiprocessors, make_event, record
from .piece_plan import Piece, StagingShape, plan_pieces
from .pinned import PinnedMemory
from .section_kernels import SectionKernels

DEFAULT_SHAPE = StagingShape()
BUFFERS = 3


class _Buffer:
    """A staging buffer. `filled` and `emptied` are the ends of its last uses; an event that was
    never recorded is nothing to wait for. `emptied` is another one after each use: the last of a
    transfer is also the transfer's end."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.address = self.memory.data_ptr()
        self.filled = make_event()
        self.emptied = make_event()
        self._rows = self.memory.view(1, size_bytes)

    def rows(self, count: int, width: int) -> torch.Tensor:
        # The last ones are kept: the sections of a load are mostly alike, and a view costs a call.
        if self._rows.shape != (count, width):
            self._rows = self.memory[: count * width].view(count, width)
        return self._rows


class _Staging:
    """The buffers of one direction, used in turn."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._buffers = [_Buffer(size_bytes, device) for _ in range(BUFFERS)]
        self._turn = 0

    def next(self) -> _Buffer:
        self._turn = (self._turn + 1) % BUFFERS
        return self._buffers[self._turn]


class StagedMover(CudaMover):
    """See above."""

    name = "staged"
    may_copy_rows: bool
    """A DMA of rows is as fast as staging. May be set."""

    def __init__(
        self,
        pool: BlockPool,
        layout: BlockLayout,
        *,
        pinned: PinnedMemory,
        runtime: CudaRuntime,
        kernels: SectionKernels,
        shape: StagingShape = DEFAULT_SHAPE,
        may_copy_rows: bool = True,
    ) -> None:
        super().__init__(pool, layout, pinned=pinned, runtime=runtime)
        self._kernels = kernels
        self._shape = shape
        self._kernel_blocks = shape.count_kernel_blocks(count_multiprocessors(self._device))
        self.may_copy_rows = may_copy_rows
        size_bytes = max(shape.piece_bytes, *(section.bytes for section in layout.sections))
        self._staging_in = _Staging(size_bytes, self._device)
        self._staging_out = _Staging(size_bytes, self._device)

    def _start_in(self, part: HostPart) -> torch.cuda.Event:
        if self.may_copy_rows and part.blocks.first_of_run is not None:
            return self._copy_rows(self._in, part, is_in=True)
        with self._in.with_kernels:
            ids = _prepare(self._in, part)
            for piece in plan_pieces(len(part.blocks), part.place.width, self._shape):
                buffer = self._staging_in.next()
                self._stage_in(buffer, part, piece, ids)
            return buffer.emptied

    def _stage_in(self, buffer: _Buffer, part: HostPart, piece: Piece, ids: torch.Tensor) -> None:
        copies, kernels = self._in.copies, self._in.kernels
        count, place = piece.end - piece.first, part.place
        copies.wait_event(buffer.emptied)
        self._runtime.copy(
            buffer.address,
            part.address + piece.first * place.width,
            count * place.width,
            copies.cuda_stream,
        )
        buffer.filled.record(copies)
        kernels.wait_event(buffer.filled)
        self._kernels.scatter(
            buffer.rows(count, place.width),
            self._pool,
            cut_rows(ids, piece.first, piece.end),
            place.offset,
            self._kernel_blocks,
        )
        buffer.emptied = record(kernels)

    def _start_out(self, part: HostPart) -> torch.cuda.Event:
        if self.may_copy_rows and part.blocks.first_of_run is not None:
            return self._copy_rows(self._out, part, is_in=False)
        with self._out.with_kernels:
            ids = _prepare(self._out, part)
            for piece in plan_pieces(len(part.blocks), part.place.width, self._shape):
                buffer = self._staging_out.next()
                self._stage_out(buffer, part, piece, ids)
            return buffer.emptied

    def _stage_out(self, buffer: _Buffer, part: HostPart, piece: Piece, ids: torch.Tensor) -> None:
        copies, kernels = self._out.copies, self._out.kernels
        count, place = piece.end - piece.first, part.place
        kernels.wait_event(buffer.emptied)
        self._kernels.gather(
            buffer.rows(count, place.width),
            self._pool,
            cut_rows(ids, piece.first, piece.end),
            place.offset,
            self._kernel_blocks,
        )
        buffer.filled.record(kernels)
        copies.wait_event(buffer.filled)
        self._runtime.copy(
            part.address + piece.first * place.width,
            buffer.address,
            count * place.width,
            copies.cuda_stream,
        )
        buffer.emptied = record(copies)

    def _copy_rows(self, lane: Lane, part: HostPart, *, is_in: bool) -> torch.cuda.Event:
        """Blocks that follow one another: rows of the pool that begin every block."""
        first, width = part.blocks.first_of_run, part.place.width
        assert first is not None
        pool = self._pool_address + first * self._block_bytes + part.place.offset
        host_rows, pool_rows = (part.address, width), (pool, self._block_bytes)
        copies = lane.copies
        if part.after is not None:
            copies.wait_event(part.after)
        self._runtime.copy_rows(
            *(pool_rows if is_in else host_rows),
            *(host_rows if is_in else pool_rows),
            width,
            len(part.blocks),
            copies.cuda_stream,
        )
        return record(copies)


def _prepare(lane: Lane, part: HostPart) -> torch.Tensor:
    """The ids on the device; the lane's kernels, of which this is the current stream, wait for
    them and for what the blocks have to wait for."""
    # First, so that they come before what is waited for is over, and not behind it.
    ids = lane.ids_on_device(part.blocks)
    if part.after is not None:
        lane.kernels.wait_event(part.after)
    return ids
