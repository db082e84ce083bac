"""Opens the mover of one engine: pins the arena, makes what this machine can do, measures, chooses.

Kept apart from the choice itself (`choose_mover`) and from the ways (`*_mover`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.layout import BlockLayout

from ..block_pool import BlockPool
from ..errors import ArenaNotPinned, MoverUnavailable
from .batched_mover import BatchedMover
from .choose_mover import BLOCKS, NEAR, MoverRate, choose_mover, measure, measure_movers
from .cuda_runtime import open_runtime
from .gather_mover import GatherMover
from .memcpy_mover import MemcpyMover
from .mover import SectionMover
from .nixl_mover import NixlMover, find_gdr_lacks
from .per_block_mover import PerBlockMover
from .pinned import ArenaPin, PinnedMemory
from .section_kernels import find_kernels
from .staged_mover import StagedMover

log = logging.getLogger(__name__)

ROWS_BUDGET_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedMover:
    """A mover, and why it is this one."""

    mover: SectionMover
    rates: tuple[MoverRate, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    """Of ways that cannot be used here."""
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
        runtime = open_runtime()
        pinned = PinnedMemory(runtime, pool.memory.device)
        stack.callback(pinned.close)
        pin = ArenaPin(arena, pinned, clock=clock)
        stack.callback(pin.close)
        try:
            pin.pin()
        except ArenaNotPinned as error:
            if must_pin:
                raise
            log.warning("%s; blocks go through a small buffer", error)
        movers, problems = _make_movers(pool, layout, pinned, arena)
        # Of zeros: what is measured with leaves its bytes in blocks of the pool.
        scratch = torch.zeros(
            min(BLOCKS, pool.capacity_blocks) * layout.block_bytes,
            dtype=torch.uint8,
            pin_memory=True,
        )
        pinned.adopt(scratch)
        widths, part = [section.bytes for section in layout.sections], scratch.numpy().data
        rates, failed = measure_movers(movers, pool, widths, part, clock=clock)
        problems |= failed
        if not rates:
            raise MoverUnavailable(
                "for a GPU", [f"{name}: {why}" for name, why in problems.items()]
            )
        name = choose_mover(rates)
        if name == StagedMover.name:
            _choose_rows(movers[name], pool, widths, part, clock)
        for other, mover in movers.items():
            if other != name:
                mover.close()
        stack.callback(movers[name].close)
        opened = OpenedMover(mover=movers[name], rates=tuple(rates), problems=problems, pin=pin)
        log.info("blocks move by %s: %s", name, opened.describe())
        yield opened


def _choose_rows(
    mover: SectionMover,
    pool: BlockPool,
    widths: list[int],
    arena: memoryview,
    clock: Callable[[], float],
) -> None:
    """Whether blocks that lie together are better copied as rows: by the same measure."""
    assert isinstance(mover, StagedMover)
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


def _make_movers(
    pool: BlockPool,
    layout: BlockLayout,
    pinned: PinnedMemory,
    arena: Callable[[], memoryview | None],
) -> tuple[dict[str, SectionMover], dict[str, str]]:
    """Those that can be made here, the ones that are preferred among equals first."""
    runtime, kernels = open_runtime(), find_kernels()
    movers: dict[str, SectionMover] = {}
    problems: dict[str, str] = {}
    movers["staged"] = StagedMover(pool, layout, pinned=pinned, runtime=runtime, kernels=kernels)
    if kernels.is_compiled:
        movers["gather"] = GatherMover(
            pool, layout, pinned=pinned, runtime=runtime, kernels=kernels
        )
    else:
        problems["gather"] = "TileLang is not installed"
    try:
        movers["batched"] = BatchedMover(pool, layout, pinned=pinned, runtime=runtime)
    except MoverUnavailable as error:
        problems["batched"] = str(error)
    movers["per_block"] = PerBlockMover(pool, layout, pinned=pinned, runtime=runtime)
    lacks = find_gdr_lacks()
    if lacks:
        problems["nixl"] = "it lacks " + "; ".join(lacks)
    else:
        try:
            movers["nixl"] = NixlMover(pool, layout, arena=arena)
        except MoverUnavailable as error:
            problems["nixl"] = str(error)
    return movers, problems
