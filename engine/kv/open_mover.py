"""Opens the mover of one engine: pins the arena, lists the ways of this machine, takes the fastest.

Kept apart from the choice itself (`choose_mover`) and from the ways (`*_mover`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import ArenaNotPinned, MoverUnavailable
from .batched_mover import BatchedMover
from .choose_mover import BLOCKS, NEAR, ChosenMover, MoverRate, make_fastest, measure
from .cuda_runtime import open_runtime
from .gather_mover import GatherMover
from .lock_limits import read_limits
from .memcpy_mover import MemcpyMover
from .mover import SectionMover, first_line
from .nixl_mover import NixlMover, find_gdr_lacks
from .per_block_mover import PerBlockMover
from .pinned import ArenaPin, PinnedMemory
from .section_kernels import SectionKernels, find_kernels
from .staged_mover import StagedMover

log = logging.getLogger(__name__)

ROWS_BUDGET_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedMover:
    """A mover, and why it is this one."""

    mover: SectionMover
    rates: tuple[MoverRate, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    """Of ways that cannot be used here, or take too much of the host's time."""
    pin: ArenaPin | None = None

    def describe(self) -> dict[str, Any]:
        """For status documents."""
        described: dict[str, Any] = {
            "mover": self.mover.name,
            "rates": [rate.describe() for rate in self.rates],
            "problems": self.problems,
        }
        if self.pin is not None:
            status = self.pin.status
            described["pinned_bytes"] = status.pinned_bytes
            described["pin_s"] = round(status.took_s, 3)
            described["pin_problem"] = status.problem
        return described


@contextmanager
def open_mover(
    pool: BlockPool,
    layout: BlockLayout,
    arena: Callable[[], memoryview | None],
    *,
    clock: Callable[[], float],
    must_pin: bool = False,
) -> Iterator[OpenedMover]:
    """The mover for a pool: a memcpy for one of the host, else the fastest of those that work here.

    `arena`: of the agent's client. One that cannot be pinned costs speed, which the status says;
    with `must_pin` ArenaNotPinned is raised. Raises MoverUnavailable where nothing works.
    """
    if pool.is_host:
        yield OpenedMover(mover=MemcpyMover(pool, layout))
        return
    with ExitStack() as stack:
        pinned = PinnedMemory(open_runtime(), pool.memory.device)
        stack.callback(pinned.close)
        pin = ArenaPin(arena, pinned, clock=clock)
        stack.callback(pin.close)
        is_locked = True
        try:
            pin.pin()
        except ArenaNotPinned as error:
            if must_pin:
                raise
            log.warning("%s; blocks go through a small buffer", error)
            # One that comes with its agent is locked then, as a rule.
            is_locked = arena() is None
        chosen = _find_mover(pool, layout, pinned, arena, clock, is_locked=is_locked)
        stack.callback(chosen.mover.close)
        # Staging of movers that were only measured: others may have the memory.
        torch.cuda.empty_cache()
        opened = OpenedMover(
            mover=chosen.mover, rates=chosen.rates, problems=chosen.problems, pin=pin
        )
        log.info("blocks move by %s: %s", chosen.mover.name, opened.describe())
        yield opened


def _find_mover(
    pool: BlockPool,
    layout: BlockLayout,
    pinned: PinnedMemory,
    arena: Callable[[], memoryview | None],
    clock: Callable[[], float],
    *,
    is_locked: bool,
) -> ChosenMover:
    """The fastest of this machine's, with an arena that is page-locked or not. Raises
    MoverUnavailable. Of what is allocated to measure, and of movers that are not chosen, nothing is
    left when it returns."""
    widths = [section.bytes for section in layout.sections]
    kernels = find_kernels(pool.memory, widths)
    view = arena()
    lacks = find_gdr_lacks(0 if view is None else view.nbytes, read_limits())
    size_bytes = min(BLOCKS, pool.capacity_blocks) * layout.block_bytes
    with _lend_scratch(size_bytes, pinned if is_locked else None) as part:
        makers, problems = list_makers(pool, layout, pinned, arena, kernels, clock=clock, lent=part)
        if lacks:
            del makers[NixlMover.name]
            problems[NixlMover.name] = "it lacks " + "; ".join(lacks)
        chosen = make_fastest(makers, pool, widths, part, clock=clock)
        try:
            if isinstance(chosen.mover, StagedMover):
                _choose_rows(chosen.mover, pool, widths, part, clock)
            if isinstance(chosen.mover, NixlMover):
                chosen.mover.forget(part)
        except BaseException:
            chosen.mover.close()
            raise
    return replace(chosen, problems=problems | chosen.problems)


@contextmanager
def _lend_scratch(size_bytes: int, pinned: PinnedMemory | None) -> Iterator[memoryview]:
    """Memory for a while, page-locked and known to `pinned` if that is given. Raises
    MoverUnavailable."""
    # Of zeros: what is measured with leaves its bytes in blocks of the pool.
    if pinned is None:
        yield memoryview(bytearray(size_bytes))
        return
    try:
        memory = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        lack = f"{size_bytes} bytes to page-lock, to measure with: {first_line(error)}"
        raise MoverUnavailable("for a GPU", [lack]) from error
    scratch = pinned.adopt(memory)
    try:
        yield scratch.view
    finally:
        pinned.disown(scratch)


def _choose_rows(
    mover: StagedMover,
    pool: BlockPool,
    widths: list[int],
    arena: memoryview,
    clock: Callable[[], float],
) -> None:
    """Whether blocks that lie together are better copied as rows: by the same measure."""
    ids = sorted(pool.allocate(min(BLOCKS, pool.free_blocks)))
    rates = []
    try:
        for may_copy_rows in (False, True):
            mover.may_copy_rows = may_copy_rows
            end_s = clock() + ROWS_BUDGET_S
            rates.append(measure(mover.name, mover, ids, widths, arena, clock, end_s))
    finally:
        pool.release(ids)
    staged, rows = rates
    mover.may_copy_rows = (
        rows.in_bytes_per_s >= NEAR * staged.in_bytes_per_s
        and rows.out_bytes_per_s >= NEAR * staged.out_bytes_per_s
    )


def list_makers(
    pool: BlockPool,
    layout: BlockLayout,
    pinned: PinnedMemory,
    arena: Callable[[], memoryview | None],
    kernels: SectionKernels,
    *,
    clock: Callable[[], float],
    lent: memoryview | None = None,
) -> tuple[dict[str, Callable[..., SectionMover]], dict[str, str]]:
    """What makes those that these kernels allow, the ones that are preferred among equals first;
    and why others cannot be had. A maker takes what else the mover may be told, by keyword.
    `lent`: memory that is measured with, and is not of the arena."""
    runtime = open_runtime()
    shared: dict[str, Any] = {"pool": pool, "layout": layout, "pinned": pinned, "runtime": runtime}
    makers: dict[str, Callable[..., SectionMover]] = {
        StagedMover.name: partial(StagedMover, **shared, kernels=kernels),
        GatherMover.name: partial(GatherMover, **shared, kernels=kernels),
        BatchedMover.name: partial(BatchedMover, **shared),
        PerBlockMover.name: partial(PerBlockMover, **shared),
        NixlMover.name: partial(NixlMover, pool, layout, arena=arena, clock=clock, lent=lent),
    }
    problems: dict[str, str] = {}
    if not kernels.is_compiled:
        del makers[GatherMover.name]
        problems[GatherMover.name] = "no kernel could be compiled, for a reason that the log names"
    return makers, problems
