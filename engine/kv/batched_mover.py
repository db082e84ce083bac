"""Mover (c): one call that names the copy of each block (cudaMemcpyBatchAsync). No kernel at all,
so nothing is taken from a forward beside it; the DMA engine stops between blocks."""

from __future__ import annotations

import numpy as np
import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import MoverUnavailable
from .cuda_mover import CudaMover, HostPart, Lane
from .cuda_runtime import BATCHES_FROM_VERSION, CudaRuntime
from .cuda_streams import record
from .pinned import PinnedMemory


class BatchedMover(CudaMover):
    """See above. Raises MoverUnavailable for a CUDA without that call."""

    name = "batched"

    def __init__(
        self,
        pool: BlockPool,
        layout: BlockLayout,
        *,
        pinned: PinnedMemory,
        runtime: CudaRuntime,
    ) -> None:
        if runtime.version < BATCHES_FROM_VERSION:
            lack = f"CUDA {runtime.version}, and its call is known from {BATCHES_FROM_VERSION} on"
            raise MoverUnavailable(self.name, [lack])
        super().__init__(pool, layout, pinned=pinned, runtime=runtime)

    def _start_in(self, part: HostPart) -> torch.cuda.Event:
        host, pool = self._addresses(part)
        return self._copy(self._in, part, targets=pool, sources=host)

    def _start_out(self, part: HostPart) -> torch.cuda.Event:
        host, pool = self._addresses(part)
        return self._copy(self._out, part, targets=host, sources=pool)

    def _copy(
        self, lane: Lane, part: HostPart, *, targets: np.ndarray, sources: np.ndarray
    ) -> torch.cuda.Event:
        sizes = np.full(len(targets), part.place.width, np.uint64)
        if part.after is not None:
            lane.copies.wait_event(part.after)
        self._runtime.copy_batch(targets, sources, sizes, lane.copies.cuda_stream)
        return record(lane.copies)
