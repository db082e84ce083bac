"""Mover (b): one kernel that reads the arena over the bus and writes the blocks of the pool, or the
other way round. No staging, no DMA engine; a few multiprocessors as long as it takes."""

from __future__ import annotations

import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from .cuda_mover import CudaMover, HostPart, Lane
from .cuda_runtime import CudaRuntime
from .cuda_streams import record
from .pinned import PinnedMemory
from .section_kernels import SectionKernels

KERNEL_BLOCKS = 8
"""Blocks of threads: with fewer the bus has not always something to do."""


class GatherMover(CudaMover):
    """See above."""

    name = "gather"

    def __init__(
        self,
        pool: BlockPool,
        layout: BlockLayout,
        *,
        pinned: PinnedMemory,
        runtime: CudaRuntime,
        kernels: SectionKernels,
        kernel_blocks: int = KERNEL_BLOCKS,
    ) -> None:
        super().__init__(pool, layout, pinned=pinned, runtime=runtime)
        self._kernels = kernels
        self._kernel_blocks = kernel_blocks

    def _start_in(self, part: HostPart) -> torch.cuda.Event:
        return self._run(self._in, part, is_in=True)

    def _start_out(self, part: HostPart) -> torch.cuda.Event:
        return self._run(self._out, part, is_in=False)

    def _run(self, lane: Lane, part: HostPart, *, is_in: bool) -> torch.cuda.Event:
        place = part.place
        rows = part.pinned.device_rows(part.address, len(part.blocks), place.width, self._device)
        move = self._kernels.scatter if is_in else self._kernels.gather
        with lane.with_kernels:
            # First, so that they come before what is waited for is over, and not behind it.
            ids = lane.ids_on_device(part.blocks)
            if part.after is not None:
                lane.kernels.wait_event(part.after)
            move(rows, self._pool, ids, place.offset, self._kernel_blocks)
            return record(lane.kernels)
