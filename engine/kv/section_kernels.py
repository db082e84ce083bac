"""Who copies between a pool on a GPU and a staging area: a compiled kernel, or else PyTorch.

Both do what `kernels.reference.block_sections` says. The compiled one can be held to a few
multiprocessors, so that it takes nothing noticeable from a forward beside it; PyTorch's takes the
whole GPU for a moment. Only the compiled one is worth using over the bus.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .device_errors import DEVICE_ERRORS, device_error
from .mover import first_line

log = logging.getLogger(__name__)

_WORD = torch.int64
"""What PyTorch moves at a time, where it can; by bytes it is slower by far."""


class SectionKernels(Protocol):
    """Queues copies in the current stream. `pool` is uint8 [capacity, block bytes], `staging` uint8
    [blocks, section bytes], `block_ids` int32 [blocks]; all on one GPU."""

    is_compiled: bool

    def scatter(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        """Write each row of `staging` into the section, at that offset, of its block."""

    def gather(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        """Fill each row of `staging` with the section of its block."""


class CompiledKernels:
    """TileLang's; raises ImportError where that is not installed. The first use of one compiles it:
    RuntimeError or OSError where there is no compiler to do that."""

    is_compiled = True

    def __init__(self) -> None:
        # Here: it is an optional package, and takes seconds to import.
        from kernels.gpu import block_sections

        self._bind_scatter = block_sections.bind_scatter
        self._bind_gather = block_sections.bind_gather
        self._bound: dict[tuple[object, ...], Callable[[torch.Tensor, torch.Tensor], None]] = {}

    def scatter(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        """See SectionKernels."""
        copy = self._bind(self._bind_scatter, staging, pool, offset_bytes, thread_blocks)
        copy(staging, block_ids)

    def gather(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        """See SectionKernels."""
        copy = self._bind(self._bind_gather, staging, pool, offset_bytes, thread_blocks)
        copy(staging, block_ids)

    def _bind(
        self,
        bind: Callable[..., Callable[[torch.Tensor, torch.Tensor], None]],
        staging: torch.Tensor,
        pool: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """One for each section of a pool, by its address: what is bound holds on to the pool, so
        that no other one can come to lie there."""
        width = staging.shape[1]
        key = (bind, pool.data_ptr(), width, offset_bytes, thread_blocks)
        copy = self._bound.get(key)
        if copy is None:
            copy = bind(pool, width, offset_bytes, torch.int32, thread_blocks)
            self._bound[key] = copy
        return copy


class TorchKernels:
    """PyTorch's own operations; for any device, and `thread_blocks` is nothing to them."""

    is_compiled = False

    def scatter(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        """See SectionKernels."""
        section, rows = _in_words(pool, offset_bytes, staging)
        section.index_copy_(0, block_ids.long(), rows)

    def gather(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        """See SectionKernels."""
        section, rows = _in_words(pool, offset_bytes, staging)
        torch.index_select(section, 0, block_ids, out=rows)


def find_kernels(pool: torch.Tensor, section_bytes: Sequence[int]) -> SectionKernels:
    """The compiled ones for this pool, if there are any: the copies of its sections, of so many
    bytes, are compiled and run, both ways. Where there is no compiler, the log says why. Raises
    DeviceFull, DeviceLost."""
    try:
        kernels = CompiledKernels()
        _try_all(kernels, pool, section_bytes)
        return kernels
    except DEVICE_ERRORS as error:
        raise device_error(error) from error
    # An OSError is a compiler's that is not there, or of a folder for its files.
    except (ImportError, RuntimeError, OSError) as error:
        log.warning(
            "sections are scattered by PyTorch's own operations: %s; compiled kernels need "
            "TileLang, CUDA's nvcc and a C++ compiler",
            first_line(error),
        )
        return TorchKernels()


def _try_all(kernels: SectionKernels, pool: torch.Tensor, section_bytes: Sequence[int]) -> None:
    """Out of a block that nobody uses yet and back into it, so that nothing of the pool changes."""
    with torch.cuda.device_of(pool):  # type: ignore[no-untyped-call]
        ids = torch.zeros(1, dtype=torch.int32, device=pool.device)
        offset = 0
        for width in section_bytes:
            row = torch.empty((1, width), dtype=torch.uint8, device=pool.device)
            kernels.gather(row, pool, ids, offset, 1)
            kernels.scatter(row, pool, ids, offset, 1)
            offset += width
        # What a kernel does wrong is told to whoever waits for it.
        pool[0].cpu()


def _in_words(
    pool: torch.Tensor, offset_bytes: int, staging: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The section of all blocks, and the rows, by the widest words that they are made of."""
    section = pool[:, offset_bytes : offset_bytes + staging.shape[1]]
    sizes = (staging.shape[1], pool.shape[1], offset_bytes, staging.data_ptr(), pool.data_ptr())
    if any(size % _WORD.itemsize for size in sizes):
        return section, staging
    return section.view(_WORD), staging.view(_WORD)
