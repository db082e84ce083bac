"""Copies one section of many blocks between a pool and a staging area, on a CUDA device.

The contracts are those of `kernels.reference.block_sections`.

The staging area may also be page-locked memory of the host, seen from the device
(`kernels.gpu.mapped_memory.device_view`): the kernel then moves the bytes over the bus itself.

All words of all rows are dealt out evenly to the threads, so that one large block fills the card as
well as many small ones. Each thread starts all its loads before its first store: what hides the way
to memory (and, to the host's, of more than a microsecond) is the bytes under way, not the number of
threads.
"""

from collections.abc import Callable
from math import gcd

import tilelang.language as T
import torch

from kernels.reference.block_sections import check_sections

from .compiler import Launcher, Program, launcher

THREADS = 256
WORDS_WHOLE_CARD, WORDS_BOUNDED = 4, 8
"""Words that a thread has under way at once. Eight take so many registers that half as many threads
are there; for a few blocks of threads, which cannot be more, they are what hides the way."""

WORD_BYTES = 16
"""The widest access of a thread. Narrower ones are taken where sizes or addresses ask for it: the
widest of 16, 8, 4, 2, 1 that divides them all."""

WORDS_MAX = 2**31 - 2**24
"""Words of a call: numbers of words are int32, also those of the last round, which is not full."""

THREAD_BLOCKS_MAX = 2**24 // (THREADS * WORDS_BOUNDED)
"""A last round of more would go beyond that."""


def scatter_block_sections(
    staging: torch.Tensor,
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    offset_bytes: int,
    *,
    thread_blocks: int | None = None,
) -> None:
    """Queue the copy of each row of `staging` into the section of its block.

    `thread_blocks` bounds the blocks of threads, and with them the multiprocessors that are taken
    from what runs beside it; without it the copy takes the whole card.
    """
    _copy(True, staging, pool, block_ids, offset_bytes, thread_blocks)


def gather_block_sections(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    offset_bytes: int,
    staging: torch.Tensor,
    *,
    thread_blocks: int | None = None,
) -> None:
    """Queue the copy of each block's section into its row of `staging`; as the one above."""
    _copy(False, staging, pool, block_ids, offset_bytes, thread_blocks)


def _copy(
    is_scatter: bool,
    staging: torch.Tensor,
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    offset_bytes: int,
    thread_blocks: int | None,
) -> None:
    check_sections(staging, pool, block_ids, offset_bytes)
    if pool.device.type != "cuda":
        raise ValueError(f"pool: given memory of {pool.device}, expected of a CUDA device")
    bind = bind_scatter if is_scatter else bind_gather
    bind(pool, staging.shape[1], offset_bytes, block_ids.dtype, thread_blocks)(staging, block_ids)


BoundCopy = Callable[[torch.Tensor, torch.Tensor], None]
"""Queues the copy between `staging` and the section of `block_ids` (its two arguments, in this
order). They are as the checked copies ask for; only the number of words is looked at."""


def bind_scatter(
    pool: torch.Tensor,
    section_bytes: int,
    offset_bytes: int,
    id_type: torch.dtype,
    thread_blocks: int | None,
) -> BoundCopy:
    """`scatter_block_sections` into one section of a pool, for a caller that makes many calls and
    has checked what it hands over: the checks and look-ups of a call take longer than its launch.
    """
    return _bind(True, pool, section_bytes, offset_bytes, id_type, thread_blocks)


def bind_gather(
    pool: torch.Tensor,
    section_bytes: int,
    offset_bytes: int,
    id_type: torch.dtype,
    thread_blocks: int | None,
) -> BoundCopy:
    """As `bind_scatter`, out of the pool."""
    return _bind(False, pool, section_bytes, offset_bytes, id_type, thread_blocks)


def _bind(
    is_scatter: bool,
    pool: torch.Tensor,
    section_bytes: int,
    offset_bytes: int,
    id_type: torch.dtype,
    thread_blocks: int | None,
) -> BoundCopy:
    block_bytes = pool.shape[1]
    width_max = gcd(WORD_BYTES, section_bytes, block_bytes, pool.data_ptr(), offset_bytes)
    id_name = "int32" if id_type == torch.int32 else "int64"
    words_per_thread = choose_words_per_thread(thread_blocks)
    tile_words = THREADS * words_per_thread
    copies: dict[int, Launcher] = {}

    def copy(staging: torch.Tensor, block_ids: torch.Tensor) -> None:
        width = gcd(width_max, staging.data_ptr())
        words = len(block_ids) * section_bytes // width
        if words > WORDS_MAX:
            raise ValueError(f"copy: given {words} words, expected at most {WORDS_MAX} in a call")
        grid, rounds = plan_grid(-(-words // tile_words), thread_blocks)
        if not rounds:
            return
        launch = copies.get(width)
        if launch is None:
            sizes = (is_scatter, width, section_bytes, block_bytes, id_name, words_per_thread)
            launch = launcher(make_program, *sizes, device_index=pool.device.index)
            copies[width] = launch
        launch(staging, pool, block_ids, offset_bytes // width, grid, rounds)

    return copy


def choose_words_per_thread(thread_blocks: int | None) -> int:
    """Words that a thread has under way at once, with so many blocks of threads."""
    return WORDS_WHOLE_CARD if thread_blocks is None else WORDS_BOUNDED


def plan_grid(tiles: int, thread_blocks: int | None) -> tuple[int, int]:
    """Blocks of threads, and rounds of a tile that each does, for so many tiles; no tiles, no
    rounds.

    Without a bound every block of threads does one: the card deals them out as multiprocessors
    become free, which is better than a fixed share. Raises ValueError for a bound that is none.
    """
    if thread_blocks is not None and not 1 <= thread_blocks <= THREAD_BLOCKS_MAX:
        expected = f"1 to {THREAD_BLOCKS_MAX}"
        raise ValueError(f"thread blocks: given {thread_blocks}, expected {expected}")
    if thread_blocks is None or thread_blocks >= tiles:
        return tiles, min(tiles, 1)
    return thread_blocks, -(-tiles // thread_blocks)


def make_program(
    is_scatter: bool,
    width: int,
    section_bytes: int,
    block_bytes: int,
    id_type: str,
    words_per_thread: int,
) -> Program:
    """The program of both copies for sections of one size, moved `width` bytes at a time.

    Word number n of a call is word n mod (section words) of row n / (section words). Block of
    threads b does tiles b, b + grid, ... of THREADS * words_per_thread words.
    """
    blocks, capacity = T.dynamic("blocks"), T.dynamic("capacity")
    section_words = section_bytes // width

    @T.prim_func
    def copy_block_sections(
        staging: T.Tensor((blocks, section_bytes), "uint8"),
        pool: T.Tensor((capacity, block_bytes), "uint8"),
        block_ids: T.Tensor((blocks,), id_type),
        offset_words: T.int32,
        grid: T.int32,
        rounds: T.int32,
    ) -> None:
        # Its checks of bounds would be made byte by byte.
        T.annotate_pass_configs({"tl.disable_safe_memory_legalize": True})
        with T.Kernel(grid, threads=THREADS) as block:
            thread = T.get_thread_binding()
            words = T.alloc_local((words_per_thread, width), "uint8")
            row = T.alloc_local((words_per_thread,), "int32")
            column = T.alloc_local((words_per_thread,), "int32")
            block_id = T.alloc_local((words_per_thread,), "int64")
            for turn in T.serial(rounds):
                for n in T.unroll(words_per_thread):
                    word = ((turn * grid + block) * words_per_thread + n) * THREADS + thread
                    row[n] = T.truncdiv(word, section_words)
                    column[n] = word - row[n] * section_words
                    if row[n] < blocks:
                        block_id[n] = block_ids[row[n]]
                        if block_id[n] < 0 or block_id[n] >= capacity:
                            T.call_extern("void", "__trap")
                for n in T.unroll(words_per_thread):
                    if row[n] < blocks:
                        for at in T.vectorized(width):
                            if is_scatter:
                                words[n, at] = staging[row[n], column[n] * width + at]
                            else:
                                words[n, at] = pool[
                                    block_id[n], (offset_words + column[n]) * width + at
                                ]
                for n in T.unroll(words_per_thread):
                    if row[n] < blocks:
                        for at in T.vectorized(width):
                            if is_scatter:
                                pool[block_id[n], (offset_words + column[n]) * width + at] = words[
                                    n, at
                                ]
                            else:
                                staging[row[n], column[n] * width + at] = words[n, at]

    return copy_block_sections
