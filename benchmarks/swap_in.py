"""Blocks between the arena and a pool, by every mover, against one copy of bytes that lie together.

    python -m benchmarks.swap_in [--device cuda] [--rounds 15] [--seconds 90] [--tune] [--only rate]
        [--forwards wide] [--beside-ways staged gather batched]

Prints JSON lines as it goes; what fails gives a line with its error and costs the others nothing.

    pin       seconds to page-lock a GiB of an arena: pages that are new, pages that are there
    rate      a mover, blocks in random order, both directions. `gpu_of_together`: the rate against
              the copy's, in turns with it, from a moment when all is queued (medians of rounds);
              `wall_of_together`: with the calls. `issue_us`: of the host, for a section;
              `late_rounds`: those in which the host was later than that moment
    together  blocks that lie together in the pool: as rows
    choice    what an engine would choose, and how long it measures
    beside    forwards beside swap-in, that never stops and of one hit, against the same ones alone

With `--tune` the staged way is there with other sizes too. `--device cpu` has the memcpy only (and
NIXL where it is installed).
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from engine.threads import prepare_environment

prepare_environment()

import numpy as np
import torch

from engine.kv.choose_mover import BLOCKS as MEASURED_BLOCKS
from engine.kv.choose_mover import choose_mover, measure_movers
from engine.kv.cuda_runtime import open_runtime
from engine.kv.lock_limits import read_limits
from engine.kv.pinned import PinnedMemory
from engine.kv.staged_mover import DEFAULT_SHAPE, StagedMover
from kvstore.admin.machine import describe_machine
from kvstore.layout import BlockLayout, Section

from .swap_in_beside import FORWARDS, beside_rows
from .swap_in_ways import DIRECTIONS, Bench, Direction, Times, open_arena, open_bench, ratio

LAYOUTS = {
    "v41-flash": BlockLayout(
        tuple(Section(f"L{n}", size) for n, size in enumerate((22_784, 22_784, 22_784, 45_568)))
    ),
    "28KiB": BlockLayout(tuple(Section(f"L{n}", 28 << 10) for n in range(4))),
}
BLOCKS = (1, 8, 64, 600, 8192)
BLOCKS_CPU = (1, 8, 64, 600)
SLOW_WAYS = ("per_block", "nixl")
SLOW_BLOCKS_MAX = 600
"""Thousands of calls, or descriptors, a section: measured in few rounds above that."""
FEW_ROUNDS = 3
BESIDE_WAYS = ("staged", "gather", "batched")

SHAPES = {
    "staged_k16": replace(DEFAULT_SHAPE, kernel_blocks=16),
    "staged_k32": replace(DEFAULT_SHAPE, kernel_blocks=32),
    "staged_k64": replace(DEFAULT_SHAPE, kernel_blocks=64),
    "staged_8M": replace(DEFAULT_SHAPE, piece_bytes=8 << 20),
    "staged_32M": replace(DEFAULT_SHAPE, piece_bytes=32 << 20),
}


class Report:
    """Prints rows; knows when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.has_failed = False
        self._end_s = time.monotonic() + seconds

    def row(self, kind: str, **fields: Any) -> None:  # noqa: ANN401
        print(json.dumps({"benchmark": "swap_in", "row": kind, **fields}), flush=True)

    def attempt(self, kind: str, run: Callable[[], None], **fields: Any) -> None:  # noqa: ANN401
        """Run one part; its error is a row."""
        if time.monotonic() > self._end_s:
            self.row(kind, skipped="the time is over", **fields)
            return
        try:
            run()
        except Exception as error:
            self.has_failed = True
            traceback.print_exc()
            self.row(kind, error=repr(error), **fields)


def pin_row(report: Report, pinned: PinnedMemory, arena: memoryview) -> None:
    """Page-lock the arena three times: as it is new, and then with all pages there."""
    took_s = []
    for number in range(3):
        begun_s = time.perf_counter()
        locked = pinned.pin(arena)
        took_s.append(time.perf_counter() - begun_s)
        if number < 2:
            pinned.unpin(locked)
    gib = arena.nbytes / 2**30
    report.row(
        "pin",
        bytes=arena.nbytes,
        new_pages_s_per_gib=round(took_s[0] / gib, 4),
        old_pages_s_per_gib=round(min(took_s[1:]) / gib, 4),
        limits=read_limits().describe(),
    )


def rate_rows(report: Report, bench: Bench, name: str, blocks: int, rounds: int) -> None:
    """All ways take turns, so that whatever else goes on hits all of them alike."""
    together: dict[Direction, Times] = {direction: Times() for direction in DIRECTIONS}
    times: dict[tuple[str, Direction], Times] = {}
    of: dict[tuple[str, Direction], list[int]] = {}
    rng = np.random.default_rng(blocks)
    failed: set[str] = set()
    for number in range(rounds + 1):
        ids = rng.permutation(bench.pool.capacity_blocks)[:blocks].tolist()
        first = bench.run_offset(number, blocks)
        for direction in DIRECTIONS:
            bench.time_together(together[direction], direction, blocks, first)
            for way in bench.movers:
                is_slow = way in SLOW_WAYS and blocks > SLOW_BLOCKS_MAX
                if way in failed or (is_slow and number > FEW_ROUNDS):
                    continue
                try:
                    own = times.setdefault((way, direction), Times())
                    bench.time_mover(own, way, direction, ids, first)
                    of.setdefault((way, direction), []).append(number)
                except Exception as error:
                    failed.add(way)
                    report.has_failed = True
                    report.row("rate", layout=name, blocks=blocks, mover=way, error=repr(error))
    moved = blocks * bench.layout.block_bytes
    for direction in DIRECTIONS:
        base = together[direction]
        report.row(
            "rate",
            layout=name,
            blocks=blocks,
            direction=direction,
            mover="one copy",
            gpu_gib_per_s=round(moved / median(base.gpu_s[1:]) / 2**30, 2),
            wall_gib_per_s=round(moved / median(base.wall_s[1:]) / 2**30, 2),
        )
    for (way, direction), own in times.items():
        if way in failed:
            continue
        # The first round warms up.
        turns, base = of[way, direction][1:], together[direction]
        report.row(
            "rate",
            layout=name,
            blocks=blocks,
            direction=direction,
            mover=way,
            gpu_gib_per_s=round(moved / median(own.gpu_s[1:]) / 2**30, 2),
            gpu_of_together=ratio(own.gpu_s[1:], [base.gpu_s[turn] for turn in turns]),
            wall_of_together=ratio(own.wall_s[1:], [base.wall_s[turn] for turn in turns]),
            issue_us=round(median(own.issue_s[1:]) * 1e6, 1),
            rounds=len(turns),
            late_rounds=own.late,
        )


def together_rows(report: Report, bench: Bench, name: str, blocks: int, rounds: int) -> None:
    """Blocks that lie together: rows straight into the pool, and through staging; and what a copy
    for each section comes to that has nothing more to do."""
    mover = bench.movers.get("staged")
    if not isinstance(mover, StagedMover):
        return
    may_copy_rows = mover.may_copy_rows
    try:
        for direction in DIRECTIONS:
            _together_row(report, bench, mover, name, direction, blocks, rounds)
    finally:
        mover.may_copy_rows = may_copy_rows


def _together_row(
    report: Report,
    bench: Bench,
    mover: StagedMover,
    name: str,
    direction: Direction,
    blocks: int,
    rounds: int,
) -> None:
    """Leaves the mover set to one of both ways."""
    ids = list(range(7, 7 + blocks))
    base, sections, rows, staged = Times(), Times(), Times(), Times()
    for number in range(rounds + 1):
        first = bench.run_offset(number, blocks)
        bench.time_together(base, direction, blocks, first)
        bench.time_together(sections, direction, blocks, first, by_section=True)
        mover.may_copy_rows = True
        bench.time_mover(rows, "staged", direction, ids, first)
        mover.may_copy_rows = False
        bench.time_mover(staged, "staged", direction, ids, first)
    report.row(
        "together",
        layout=name,
        blocks=blocks,
        direction=direction,
        copies_of_together=ratio(sections.gpu_s[1:], base.gpu_s[1:]),
        rows_issue_us=round(median(rows.issue_s[1:]) * 1e6, 1),
        rows_of_together=ratio(rows.gpu_s[1:], base.gpu_s[1:]),
        staged_of_together=ratio(staged.gpu_s[1:], base.gpu_s[1:]),
    )


def choice_row(report: Report, bench: Bench, name: str) -> None:
    begun_s = time.perf_counter()
    arena = bench.arena[: MEASURED_BLOCKS * bench.layout.block_bytes]
    rates, problems = measure_movers(
        bench.movers, bench.pool, bench.widths, arena, clock=time.perf_counter
    )
    report.row(
        "choice",
        layout=name,
        chosen=choose_mover(rates),
        took_s=round(time.perf_counter() - begun_s, 3),
        rates=[rate.describe() for rate in rates],
        problems=bench.problems | problems,
    )


def measure_layout(
    report: Report,
    options: argparse.Namespace,
    device: torch.device,
    name: str,
    arena: memoryview,
    pinned: PinnedMemory | None,
) -> None:
    layout, counts = LAYOUTS[name], options.blocks
    shapes = SHAPES if options.tune and name == "v41-flash" else {}
    capacity = max(counts) + 64
    with open_bench(device, layout, capacity, arena, pinned, shapes) as bench:
        for way in list(bench.movers):
            fails_before = report.has_failed
            report.has_failed = False
            report.attempt("check", partial(bench.check, way), layout=name, mover=way)
            if report.has_failed:
                bench.problems[way] = "it has moved other bytes, or failed"
                bench.movers.pop(way).close()
            report.has_failed |= fails_before
        report.row("movers", layout=name, movers=list(bench.movers), problems=bench.problems)
        if "rate" in options.only:
            for blocks in counts:
                report.attempt(
                    "rate",
                    partial(rate_rows, report, bench, name, blocks, options.rounds),
                    layout=name,
                    blocks=blocks,
                )
        if "together" in options.only:
            for blocks in (64, 600):
                report.attempt(
                    "together",
                    partial(
                        together_rows,
                        report,
                        bench,
                        name,
                        min(blocks, capacity - 7),
                        options.rounds,
                    ),
                    layout=name,
                )
        if "choice" in options.only:
            report.attempt("choice", partial(choice_row, report, bench, name), layout=name)
        if "beside" in options.only and name == "v41-flash" and device.type == "cuda":
            for row in beside_rows(bench, options.beside_ways, options.forwards):
                report.attempt("beside", partial(_print_beside, report, row))


def _print_beside(report: Report, row: Callable[[], dict[str, Any]]) -> None:
    report.row("beside", **row())


def describe_device(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"card": properties.name, "cuda": torch.version.cuda}
        described["runtime"] = open_runtime().version
    return described | describe_machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--blocks", type=int, nargs="+")
    parser.add_argument("--tune", action="store_true")
    parts = ("rate", "together", "choice", "beside")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--forwards", nargs="+", choices=FORWARDS, default=FORWARDS)
    parser.add_argument("--beside-ways", nargs="+", default=BESIDE_WAYS)
    options = parser.parse_args()
    device = torch.device(options.device)
    options.blocks = options.blocks or (BLOCKS if device.type == "cuda" else BLOCKS_CPU)
    report = Report(options.seconds)
    with ExitStack() as stack:
        pinned: PinnedMemory | None = None
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            torch.zeros(1, device=device)
            pinned = PinnedMemory(open_runtime(), device)
        largest = max(max(options.blocks), 64)
        size_bytes = (largest + 64) * max(layout.block_bytes for layout in LAYOUTS.values())
        arena = stack.enter_context(open_arena(max(size_bytes, 256 << 20)))
        report.row("machine", **describe_device(device))
        if pinned is not None:
            stack.callback(pinned.close)
            pin_row(report, pinned, arena)
        else:
            np.frombuffer(arena, np.uint8)[:] = 1  # pages are taken when they are first used
        for name in LAYOUTS:
            report.attempt(
                "layout",
                partial(measure_layout, report, options, device, name, arena, pinned),
                layout=name,
            )
    sys.exit(1 if report.has_failed else 0)


if __name__ == "__main__":
    main()
