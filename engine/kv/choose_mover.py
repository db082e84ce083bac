"""Which mover an engine uses: a short measurement at its start, and the choice from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..block_pool import BlockPool
from ..errors import MoverUnavailable, TransferFailed
from .block_list import BlockList
from .mover import SectionMover, Transfer, first_line, wait_to_end

BLOCKS = 256
"""So many that the time to start a section is hidden behind the one before it."""
ROUNDS = 9
BUDGET_S = 0.5
"""For all movers together, beside what is compiled for the first use of one."""
WATCH_S = 1.0
NEAR = 0.97
"""Ways that are so close to the fastest are as good."""
WITHIN_REACH = 0.5
"""A way slower than that part of the fastest is not taken for its little work in the host."""
ISSUE_US_MAX = 100.0
"""For a section: what a thread may take that starts transfers beside a forward. That is twice the
aim, and below what it takes to move as much (BLOCKS of V4.1-Flash, 105 to 210 us on an H200): above
that the thread never rests, and a forward that is bound by its launches waits for it each time."""
ISSUE_TIMES_MAX = 2.0
"""As many times as the cheapest way within reach is no fault of a way on a slow host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverRate:
    """What a mover did: median bytes a second of all sections of some blocks, as the host sees it,
    and microseconds that the calling thread needs to start one section into the pool."""

    name: str
    in_bytes_per_s: float
    out_bytes_per_s: float
    issue_us: float

    def describe(self) -> dict[str, Any]:
        """For status documents."""
        return asdict(self)


def choose_mover(measured: Sequence[MoverRate]) -> str:
    """Of those that leave the host its time (not `find_busy`) the fastest into the pool, because a
    pass waits for that; of those that are near it, the fastest out; of those that are near that
    too, the first named. There must be one."""
    busy = find_busy(measured)
    calm = [one for one in _within_reach(measured) if one not in busy]
    best_in = max(one.in_bytes_per_s for one in calm)
    near = [one for one in calm if one.in_bytes_per_s >= NEAR * best_in]
    best_out = max(one.out_bytes_per_s for one in near)
    return next(one.name for one in near if one.out_bytes_per_s >= NEAR * best_out)


def find_busy(measured: Sequence[MoverRate]) -> list[MoverRate]:
    """Those within reach that keep a thread busy while a forward needs the host; never all of them.
    The rate does not make up for that: beside a forward of small operations the way with a call for
    a batch has slowed it twelve times."""
    within = _within_reach(measured)
    cheapest_us = min(one.issue_us for one in within)
    most_us = max(ISSUE_US_MAX, ISSUE_TIMES_MAX * cheapest_us)
    return [one for one in within if one.issue_us > most_us]


def _within_reach(measured: Sequence[MoverRate]) -> list[MoverRate]:
    best_in = max(one.in_bytes_per_s for one in measured)
    return [one for one in measured if one.in_bytes_per_s >= WITHIN_REACH * best_in]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenMover:
    """The mover to use, what all did, and why others cannot be used, or are not to be."""

    mover: SectionMover
    rates: tuple[MoverRate, ...]
    problems: dict[str, str]


def make_fastest(
    makers: Mapping[str, Callable[[], SectionMover]],
    pool: BlockPool,
    section_bytes: Sequence[int],
    arena: memoryview,
    *,
    clock: Callable[[], float],
) -> ChosenMover:
    """Make all movers that can be made, measure them (`measure_movers`), and keep the fastest; the
    others are closed, and nothing here holds on to their memory.

    One that cannot be made, as for want of memory of the device, costs no other. Raises
    MoverUnavailable if none is left.
    """
    movers: dict[str, SectionMover] = {}
    problems: dict[str, str] = {}
    chosen = None
    try:
        for name, make in makers.items():
            try:
                movers[name] = make()
            # What PyTorch raises for a device that is full, or has failed, is a RuntimeError.
            # An OSError is a kernel's that could not be compiled.
            except (MoverUnavailable, TransferFailed, RuntimeError, OSError) as error:
                problems[name] = first_line(error)
        rates, failed = measure_movers(movers, pool, section_bytes, arena, clock=clock)
        problems |= failed
        if not rates:
            lacks = [f"{name}: {why}" for name, why in problems.items()]
            raise MoverUnavailable("for a GPU", lacks)
        for one in find_busy(rates):
            problems[one.name] = f"takes the host {one.issue_us:.0f} us a section"
        chosen = choose_mover(rates)
        return ChosenMover(mover=movers[chosen], rates=tuple(rates), problems=problems)
    finally:
        for name, mover in movers.items():
            if name != chosen:
                mover.close()


def measure_movers(
    movers: Mapping[str, SectionMover],
    pool: BlockPool,
    section_bytes: Sequence[int],
    arena: memoryview,
    *,
    clock: Callable[[], float],
    budget_s: float = BUDGET_S,
) -> tuple[list[MoverRate], dict[str, str]]:
    """Move blocks that nobody uses in and out of the pool, by each mover; what they did, and why
    one of them cannot be used.

    `arena` is memory as the real one is (page-locked or not), of BLOCKS blocks or fewer. Blocks
    that are named in the pool's own order would lie together: here they do not. Their bytes are
    lost.
    """
    block_bytes = sum(section_bytes)
    count = min(BLOCKS, arena.nbytes // block_bytes, pool.free_blocks)
    taken = pool.allocate(count)
    rates, problems = [], {}
    try:
        ids = taken[::2] + taken[1::2]
        for name, mover in movers.items():
            end_s = clock() + budget_s / len(movers)
            try:
                rates.append(measure(name, mover, ids, section_bytes, arena, clock, end_s))
            except TransferFailed as error:
                problems[name] = str(error)
    finally:
        pool.release(taken)
    return rates, problems


def measure(
    name: str,
    mover: SectionMover,
    ids: Sequence[int],
    section_bytes: Sequence[int],
    arena: memoryview,
    clock: Callable[[], float],
    end_s: float,
) -> MoverRate:
    """Move the blocks in and out until `end_s`, twice at least. Raises TransferFailed."""
    into, out, issue = [], [], []
    for number in range(ROUNDS + 1):
        blocks = BlockList(ids)
        start_s = clock()
        transfers = [
            mover.to_pool(part, section, blocks)
            for section, part in _parts(arena, section_bytes, len(ids))
        ]
        issued_s = clock()
        _watch(transfers, clock)
        moved_in_s = clock()
        transfers = [
            mover.from_pool(part, section, blocks)
            for section, part in _parts(arena, section_bytes, len(ids))
        ]
        _watch(transfers, clock)
        moved_out_s = clock()
        if number > 0:  # the first one compiles, allocates and warms up
            into.append(moved_in_s - start_s)
            out.append(moved_out_s - moved_in_s)
            issue.append((issued_s - start_s) / len(section_bytes))
        if number > 1 and clock() > end_s:
            break
    moved_bytes = len(ids) * sum(section_bytes)
    return MoverRate(
        name=name,
        in_bytes_per_s=moved_bytes / median(into),
        out_bytes_per_s=moved_bytes / median(out),
        issue_us=median(issue) * 1e6,
    )


def _watch(transfers: Sequence[Transfer], clock: Callable[[], float]) -> None:
    """Wait without a sleep, which would be as long as what is measured; not for ever."""
    end_s = clock() + WATCH_S
    while not all(transfer.has_ended for transfer in transfers) and clock() < end_s:
        pass
    wait_to_end(*transfers)


def _parts(
    arena: memoryview, section_bytes: Sequence[int], blocks: int
) -> Iterator[tuple[int, memoryview]]:
    """The sections of so many blocks, one after the other as in a run."""
    at = 0
    for section, width in enumerate(section_bytes):
        yield section, arena[at : at + blocks * width]
        at += blocks * width
