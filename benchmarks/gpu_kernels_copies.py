"""Cases of `gpu_kernels`: sections of blocks, in the device's memory and over the bus; windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from kernels.reference import block_sections as reference_sections
from kernels.reference import window_snapshot as reference_windows
from kernels.reference.window_snapshot import WindowShape

from .gpu_roofline import Call, Case, Prepared, Workspace

GOAL = 0.85
V41_BLOCK_BYTES = 113_920
WINDOW = WindowShape(rings=20, ring_rows=134, row_bytes=528, ring_stride_bytes=70_752, window=128)
STATE_BYTES = 3_128_928
ROTATIONS_MAX = 512
POISON = 0xA5


@dataclass(frozen=True)
class Section:
    """A section of blocks, as of V4.1-Flash unless said otherwise."""

    bytes: int
    offset_bytes: int
    block_bytes: int = V41_BLOCK_BYTES


SMALL = Section(22_784, 22_784)
LARGE = Section(45_568, 68_352)
OF_28_KIB = Section(28_672, 28_672, 4 * 28_672)


def copy_cases(device: torch.device) -> Iterator[Case]:
    """Whole card; few multiprocessors; over the bus; windows."""
    for operation in ("scatter", "gather"):
        for section, counts in (
            (SMALL, (8, 64, 600, 8192)),
            (LARGE, (600, 8192)),
            (OF_28_KIB, (600,)),
        ):
            for blocks in counts:
                yield _section_case(operation, section, blocks)
        if device.type == "cuda":
            for thread_blocks in (4, 8, 16, 32):
                yield _section_case(operation, SMALL, 600, thread_blocks=thread_blocks)
            for bound in (4, 8, 16, 32, None):
                yield _bus_case(operation, SMALL, 600, thread_blocks=bound)
    for copies in (1, 8, 64, 256):
        yield _window_case("snapshot", copies)
        yield _window_case("restore", copies)


def _section_case(
    operation: str, section: Section, blocks: int, thread_blocks: int | None = None
) -> Case:
    sizes = {"section_bytes": section.bytes, "blocks": blocks, "thread_blocks": thread_blocks}
    return Case(
        operation=f"{operation}_block_sections",
        sizes=sizes,
        prepare=partial(_prepare_sections, operation, section, blocks, thread_blocks, "device"),
        goal=GOAL if thread_blocks is None and blocks >= 600 else None,
    )


def _bus_case(operation: str, section: Section, blocks: int, thread_blocks: int | None) -> Case:
    beside = "to_device" if operation == "scatter" else "to_host"
    return Case(
        operation=f"{operation}_block_sections_over_the_bus",
        sizes={"section_bytes": section.bytes, "blocks": blocks, "thread_blocks": thread_blocks},
        prepare=partial(_prepare_sections, operation, section, blocks, thread_blocks, beside),
        beside=beside,
    )


def _prepare_sections(
    operation: str,
    section: Section,
    blocks: int,
    thread_blocks: int | None,
    beside: str,
    workspace: Workspace,
) -> Prepared:
    """Calls on ever other blocks of a pool, in random order, and on ever other staging rows."""
    capacity = workspace.size_bytes // section.block_bytes
    blocks = min(blocks, capacity)
    rotations = min(ROTATIONS_MAX, capacity // blocks)
    pool = workspace.target[: capacity * section.block_bytes].view(capacity, section.block_bytes)
    rows = workspace.source
    if beside != "device":
        rotations = min(rotations, 16)
        rows = _seen_from_device(workspace, rotations * blocks * section.bytes)
    rows = rows[: rotations * blocks * section.bytes].view(-1, section.bytes)
    ids = torch.randperm(capacity, generator=torch.Generator().manual_seed(0))
    ids = ids.to(workspace.device)
    function = _function(f"{operation}_block_sections", workspace.device)
    bound = {} if workspace.device.type == "cpu" else {"thread_blocks": thread_blocks}

    def call_of(turn: int) -> Call:
        part = slice(turn * blocks, (turn + 1) * blocks)
        if operation == "scatter":
            return partial(function, rows[part], pool, ids[part], section.offset_bytes, **bound)
        return partial(function, pool, ids[part], section.offset_bytes, rows[part], **bound)

    def is_right() -> bool:
        offset = section.offset_bytes
        if operation == "gather":
            return _is_all_right(
                workspace,
                call_of(0),
                rows,
                lambda target: reference_sections.gather_block_sections(
                    pool, ids[:blocks], offset, target[:blocks]
                ),
            )
        given = rows[:blocks].clone()
        return _is_all_right(
            workspace,
            call_of(0),
            pool,
            lambda target: reference_sections.scatter_block_sections(
                given, target, ids[:blocks], offset
            ),
        )

    host_ways = {}
    if workspace.device.type == "cuda" and (section, blocks) == (SMALL, 64):
        host_ways = _host_ways(operation, section, pool, ids[:blocks], rows[:blocks])
    counted = 2 if beside == "device" else 1
    return Prepared(
        calls=[call_of(turn) for turn in range(rotations)],
        moved_bytes=counted * blocks * section.bytes,
        is_right=is_right,
        host_ways=host_ways,
    )


def _is_all_right(
    workspace: Workspace,
    call: Call,
    target: torch.Tensor,
    refer: Callable[[torch.Tensor], object],
) -> bool:
    """Does a call leave every byte of the target as the reference does, those around what is copied
    too? The target is poisoned first: what lies in it before is none of the source's bytes."""
    target.fill_(POISON)
    expected = target.clone()
    refer(expected)
    call()
    is_right = torch.equal(target, expected)
    workspace.refill()
    return is_right


def _seen_from_device(workspace: Workspace, count: int) -> torch.Tensor:
    from kernels.gpu.mapped_memory import device_view

    return device_view(workspace.host_bytes(count), workspace.device)


def _host_ways(
    operation: str, section: Section, pool: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor
) -> dict[str, Call]:
    """The kernel without our checks, and through TileLang's own wrapper in Python."""
    import tilelang

    from kernels.gpu import block_sections, compiler

    words = block_sections.choose_words_per_thread(None)
    sizes = (operation == "scatter", 16, section.bytes, section.block_bytes, "int64", words)
    tiles = -(-rows.numel() // 16 // (block_sections.THREADS * words))
    grid, rounds = block_sections.plan_grid(tiles, None)
    arguments = (rows, pool, ids, section.offset_bytes // 16, grid, rounds)
    bare = compiler.launcher(block_sections.make_program, *sizes, device_index=pool.device.index)
    wrapped = tilelang.compile(
        block_sections.make_program(*sizes), compile_flags=list(compiler.EXACT_FLAGS)
    )
    return {"bare": partial(bare, *arguments), "wrapped": partial(wrapped, *arguments)}


def _window_case(operation: str, copies: int) -> Case:
    return Case(
        operation=f"{operation}_windows",
        sizes={"copies": copies, "record_bytes": WINDOW.stored_bytes},
        prepare=partial(_prepare_windows, operation, copies),
        goal=GOAL if copies >= 64 else None,
    )


def _prepare_windows(operation: str, copies: int, workspace: Workspace) -> Prepared:
    capacity = workspace.size_bytes // STATE_BYTES
    copies = min(copies, capacity)
    rotations = min(ROTATIONS_MAX, capacity // copies)
    slots = workspace.target[: capacity * STATE_BYTES].view(capacity, STATE_BYTES)
    records = workspace.source[: rotations * copies * WINDOW.stored_bytes]
    records = records.view(-1, WINDOW.stored_bytes)
    ids = torch.randperm(capacity, generator=torch.Generator().manual_seed(0))
    ids = ids.to(workspace.device)
    positions = 128 * (1 + torch.arange(capacity, device=workspace.device))
    function = _function(f"{operation}_windows", workspace.device)

    def call_of(turn: int) -> Call:
        part = slice(turn * copies, (turn + 1) * copies)
        if operation == "snapshot":
            return partial(function, slots, ids[part], positions[part], records[part], WINDOW)
        return partial(function, records[part], slots, ids[part], WINDOW)

    def is_right() -> bool:
        if operation == "snapshot":
            return _is_all_right(
                workspace,
                call_of(0),
                records,
                lambda target: reference_windows.snapshot_windows(
                    slots, ids[:copies], positions[:copies], target[:copies], WINDOW
                ),
            )
        return _is_all_right(
            workspace,
            call_of(0),
            slots,
            lambda target: reference_windows.restore_windows(
                records[:copies], target, ids[:copies], WINDOW
            ),
        )

    kept_bytes = WINDOW.rings * WINDOW.window * WINDOW.row_bytes
    read_bytes = kept_bytes if operation == "snapshot" else WINDOW.stored_bytes
    return Prepared(
        calls=[call_of(turn) for turn in range(rotations)],
        moved_bytes=copies * (read_bytes + WINDOW.stored_bytes),
        is_right=is_right,
    )


def _function(name: str, device: torch.device) -> Callable[..., object]:
    """The operation for the device: of `kernels.gpu` or, on a CPU, of `kernels.reference`."""
    modules: tuple[Any, ...] = (reference_sections, reference_windows)
    if device.type == "cuda":
        from kernels.gpu import block_sections, window_snapshot

        modules = (block_sections, window_snapshot)
    function = next(getattr(module, name) for module in modules if hasattr(module, name))
    return cast(Callable[..., object], function)
