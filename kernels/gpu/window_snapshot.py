"""Copies the windows of sequences between state slots and records, on a CUDA device.

The contracts are those of `kernels.reference.window_snapshot`. One call copies many windows: the
1.4 MB of one keep the card busy for no longer than it takes to start a kernel.
"""

from math import gcd

import tilelang.language as T
import torch

from kernels.reference.window_snapshot import WindowShape, check_windows

from .block_sections import THREADS, WORD_BYTES, plan_grid, scatter_block_sections
from .compiler import Program, launcher

WORDS_PER_THREAD = 8
"""Words that a thread has under way at once."""

TILE_WORDS = THREADS * WORDS_PER_THREAD
"""What a block of threads moves in a round: 32 KiB."""


def snapshot_windows(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    shape: WindowShape,
    *,
    thread_blocks: int | None = None,
) -> None:
    """Queue the copy of each slot's window into its record, all else in the record zero.

    `thread_blocks` bounds the blocks of threads, as in `block_sections`.
    """
    check_windows(slots, slot_ids, records, shape, positions)
    device = slots.device
    if device.type != "cuda":
        raise ValueError(f"slots: given memory of {device}, expected of a CUDA device")
    state_bytes = slots.shape[1]
    sizes = (shape.row_bytes, shape.ring_stride_bytes, state_bytes)
    width = gcd(WORD_BYTES, *sizes, slots.data_ptr(), records.data_ptr())
    tiles = len(records) * record_tiles(shape, width)
    grid, rounds = plan_grid(tiles, thread_blocks)
    if not rounds:
        return
    snapshot = launcher(make_program, width, shape, state_bytes, device_index=device.index)
    snapshot(slots, slot_ids, positions, records, grid, rounds)


def restore_windows(
    records: torch.Tensor,
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    shape: WindowShape,
    *,
    thread_blocks: int | None = None,
) -> None:
    """Queue the copy of each record over the first bytes of its slot."""
    check_windows(slots, slot_ids, records, shape)
    # A slot is a block, and what is stored of it is its first section.
    scatter_block_sections(records, slots, slot_ids, 0, thread_blocks=thread_blocks)


def record_tiles(shape: WindowShape, width: int) -> int:
    """Tiles that a record is cut into, the last one not full."""
    return -(-(shape.stored_bytes // width) // TILE_WORDS)


def make_program(width: int, shape: WindowShape, state_bytes: int) -> Program:
    """The program of a snapshot, `width` bytes at a time; a tile is of one record.

    A word is copied if its row is one of the window, which is known from the row's number and the
    position alone, and is zero otherwise. The position is 64 bits wide, so that what depends on it
    alone is reckoned once for a tile.
    """
    copies, capacity = T.dynamic("copies"), T.dynamic("capacity")
    record_words = shape.stored_bytes // width
    ring_words = shape.ring_stride_bytes // width
    row_words = shape.row_bytes // width
    ring_rows, window = shape.ring_rows, shape.window
    tiles = record_tiles(shape, width)

    @T.prim_func
    def snapshot_windows(
        slots: T.Tensor((capacity, state_bytes), "uint8"),
        slot_ids: T.Tensor((copies,), "int64"),
        positions: T.Tensor((copies,), "int64"),
        records: T.Tensor((copies, shape.stored_bytes), "uint8"),
        grid: T.int32,
        rounds: T.int32,
    ) -> None:
        # Its checks of bounds would be made byte by byte.
        T.annotate_pass_configs({"tl.disable_safe_memory_legalize": True})
        with T.Kernel(grid, threads=THREADS) as block:
            thread = T.get_thread_binding()
            words = T.alloc_local((WORDS_PER_THREAD, width), "uint8")
            copy = T.alloc_var("int32")
            slot = T.alloc_var("int64")
            kept_rows = T.alloc_var("int32")
            first_row = T.alloc_var("int32")
            column = T.alloc_var("int32")
            row = T.alloc_var("int32")
            for turn in T.serial(rounds):
                tile = turn * grid + block
                copy = T.truncdiv(tile, tiles)
                if copy < copies:
                    slot = slot_ids[copy]
                    if slot < 0 or slot >= capacity:
                        T.call_extern("void", "__trap")
                    first_row = T.truncmod(T.max(positions[copy] - window, 0), ring_rows)
                    kept_rows = T.min(positions[copy], window)
                    for n in T.unroll(WORDS_PER_THREAD):
                        column = T.truncmod(tile, tiles) * TILE_WORDS + n * THREADS + thread
                        for at in T.vectorized(width):
                            words[n, at] = 0
                        row = T.truncdiv(T.truncmod(column, ring_words), row_words)
                        is_row = column < record_words and row < ring_rows
                        # How far the row is behind the window's first, around the ring.
                        if (
                            is_row
                            and T.truncmod(row + ring_rows - first_row, ring_rows) < kept_rows
                        ):
                            for at in T.vectorized(width):
                                words[n, at] = slots[slot, column * width + at]
                    for n in T.unroll(WORDS_PER_THREAD):
                        column = T.truncmod(tile, tiles) * TILE_WORDS + n * THREADS + thread
                        if column < record_words:
                            for at in T.vectorized(width):
                                records[copy, column * width + at] = words[n, at]

    return snapshot_windows
