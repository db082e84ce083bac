"""Mover (d): a call for each block. What there is to compare the others with; of use for very few
blocks only."""

from __future__ import annotations

import numpy as np
import torch

from .cuda_mover import CudaMover, HostPart, Lane
from .cuda_streams import record


class PerBlockMover(CudaMover):
    """See above."""

    name = "per_block"

    def _start_in(self, part: HostPart) -> torch.cuda.Event:
        host, pool = self._addresses(part)
        return self._copy(self._in, part, targets=pool, sources=host)

    def _start_out(self, part: HostPart) -> torch.cuda.Event:
        host, pool = self._addresses(part)
        return self._copy(self._out, part, targets=host, sources=pool)

    def _copy(
        self, lane: Lane, part: HostPart, *, targets: np.ndarray, sources: np.ndarray
    ) -> torch.cuda.Event:
        if part.after is not None:
            lane.copies.wait_event(part.after)
        stream, width = lane.copies.cuda_stream, part.place.width
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            self._runtime.copy(target, source, width, stream)
        return record(lane.copies)
