"""XXH3-64 of shards on a CUDA device; contract and algorithm are in `kernels.reference.xxh3`.

Four threads hash a shard, each with two of the eight sums: of a stripe it reads 16 bytes, and has
with them all that its two sums take. The chain through a shard is one round (16 stripes, 1,024
bytes) after the other, and inside a round all is independent, so that its reads are under way
together. That does not fill the card, and need not: shards that were rebuilt are few beside the
blocks that came over the bus meanwhile.
"""

import functools
from typing import Any

import tilelang.language as T
import torch
from tilelang import PassConfigKey

from ..reference.xxh3 import (
    AVALANCHE_PRIME,
    FIRST_SUMS,
    LANES,
    LAST_SECRET_AT,
    MERGE_SECRET_AT,
    PRIME32_1,
    PRIME64_1,
    STRIPE_BYTES,
    STRIPES_PER_ROUND,
    check_rows,
    secret_word,
    signed,
)
from .compiler import Program, launcher
from .gf256 import require_aligned

Value = Any
"""An expression, or a buffer, of a TileLang program."""

THREADS = 64
PAIRS = LANES // 2
"""Threads that work on one shard."""
WORD_BYTES = 8
FIRST_SUMS_AT = STRIPES_PER_ROUND + 2
"""Before it: the words of the secret that a thread uses in a round, the scrambling included."""
LAST_KEY_AT = FIRST_SUMS_AT + 2
MERGE_KEY_AT = LAST_KEY_AT + 2
LENGTH_AT = MERGE_KEY_AT + 2
CONSTANTS = LENGTH_AT + 1


def hash_shards(
    rows: torch.Tensor, row_ids: torch.Tensor, shards: torch.Tensor, shard_bytes: int
) -> torch.Tensor:
    """See `kernels.reference.xxh3.hash_shards`; on the current stream."""
    check_rows(rows, row_ids, shards, shard_bytes)
    require_aligned(rows=rows)
    hashes = torch.empty(shards.shape, dtype=torch.int64, device=rows.device)
    if hashes.numel():
        sizes = (shard_bytes, rows.shape[1] // shard_bytes, shards.shape[1])
        kernel = launcher(hash_program, *sizes, device_index=rows.device.index or 0)
        constants = make_constants(shard_bytes, rows.device)
        kernel(rows.view(torch.int64), row_ids, shards, constants, hashes)
    return hashes


def hash_program(shard_bytes: int, row_shards: int, wanted: int) -> Program:
    """TileLang program for `wanted` shards of each row of `row_shards` shards."""
    words = shard_bytes // WORD_BYTES
    # The last stripe is taken once more by itself, so it is not one of those before.
    rounds, rest = divmod(shard_bytes // STRIPE_BYTES - 1, STRIPES_PER_ROUND)
    row_count, count = T.dynamic("row_count"), T.dynamic("count")

    @T.prim_func
    def hash_shards_of_rows(
        rows: T.Tensor((row_count, row_shards * words), "int64"),
        row_ids: T.Tensor((count,), "int32"),
        shards: T.Tensor((count, wanted), "int32"),
        constants: T.Tensor((PAIRS, CONSTANTS), "int64"),
        hashes: T.Tensor((count, wanted), "int64"),
    ) -> None:
        # Numbers of rows and shards are checked below: a wrong one ends the kernel.
        T.annotate_pass_configs({PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True})
        with T.Kernel(T.ceildiv(count * wanted * PAIRS, THREADS), threads=THREADS) as block:
            key = T.alloc_local((CONSTANTS,), "uint64")
            sums = T.alloc_local((2,), "uint64")
            word = T.alloc_local((2,), "int64")
            total = T.alloc_local((1,), "uint64")
            thread = block * THREADS + T.get_thread_binding()
            pair = thread % PAIRS
            # Threads beyond the end do the last shard once more: all take part in the exchange.
            job = T.min(thread // PAIRS, count * wanted - 1)
            row = row_ids[job // wanted]
            shard = shards[job // wanted, job % wanted]
            if row < 0 or row >= row_count or shard >= row_shards:
                T.call_extern("void", "__trap")
            start = T.max(shard, 0) * words + pair * 2
            for at in T.unroll(CONSTANTS):
                key[at] = T.cast(constants[pair, at], "uint64")
            for lane in T.unroll(2):
                sums[lane] = key[FIRST_SUMS_AT + lane]
            for turn in T.serial(rounds):
                for stripe in T.unroll(STRIPES_PER_ROUND):
                    at = start + (turn * STRIPES_PER_ROUND + stripe) * LANES
                    take_stripe(rows, row, at, key, stripe, word, sums)
                for lane in T.unroll(2):
                    sums[lane] = (
                        sums[lane] ^ (sums[lane] >> T.uint64(47)) ^ key[STRIPES_PER_ROUND + lane]
                    ) * T.uint64(PRIME32_1)
            for stripe in T.unroll(rest):
                at = start + (rounds * STRIPES_PER_ROUND + stripe) * LANES
                take_stripe(rows, row, at, key, stripe, word, sums)
            take_stripe(rows, row, start + words - LANES, key, LAST_KEY_AT, word, sums)
            fold(sums[0] ^ key[MERGE_KEY_AT], sums[1] ^ key[MERGE_KEY_AT + 1], total)
            total[0] = total[0] + T.shfl_xor(total[0], 1)
            total[0] = total[0] + T.shfl_xor(total[0], 2)
            total[0] = total[0] + key[LENGTH_AT]
            total[0] = (total[0] ^ (total[0] >> T.uint64(37))) * T.uint64(AVALANCHE_PRIME)
            if pair == 0 and thread < count * wanted * PAIRS:
                hashes[job // wanted, job % wanted] = T.cast(
                    T.if_then_else(shard < 0, T.uint64(0), total[0] ^ (total[0] >> T.uint64(32))),
                    "int64",
                )

    return hash_shards_of_rows


@T.macro
def take_stripe(
    rows: Value, row: Value, start: Value, key: Value, key_at: Value, word: Value, sums: Value
) -> None:
    """Takes 16 bytes of a stripe from the word `start` of the row on."""
    for lane in T.vectorized(2):
        word[lane] = rows[row, start + lane]
    for lane in T.unroll(2):
        keyed = T.cast(word[lane], "uint64") ^ key[key_at + lane]
        sums[lane] = (
            sums[lane]
            + T.cast(word[1 - lane], "uint64")
            + (keyed & T.uint64(0xFFFFFFFF)) * (keyed >> T.uint64(32))
        )


@T.macro
def fold(a: Value, b: Value, out: Value) -> None:
    """Puts into `out` the two halves of the product of 128 bits, XORed."""
    half = T.uint64(0xFFFFFFFF)
    a_low, a_high = a & half, a >> T.uint64(32)
    b_low, b_high = b & half, b >> T.uint64(32)
    crossed = a_high * b_low
    middle = (crossed & half) + (a_low * b_low >> T.uint64(32)) + a_low * b_high
    high = a_high * b_high + (crossed >> T.uint64(32)) + (middle >> T.uint64(32))
    out[0] = high ^ (a * b)


@functools.cache
def make_constants(shard_bytes: int, device: torch.device) -> torch.Tensor:
    """What the thread of each pair of sums needs: int64 [PAIRS, CONSTANTS]."""
    table = []
    for pair in range(PAIRS):
        part = WORD_BYTES * 2 * pair
        places = [
            *(part + WORD_BYTES * at for at in range(FIRST_SUMS_AT)),
            *(
                start + part + WORD_BYTES * lane
                for start in (LAST_SECRET_AT, MERGE_SECRET_AT)
                for lane in range(2)
            ),
        ]
        secrets = [secret_word(at) for at in places]
        first_sums = FIRST_SUMS[2 * pair : 2 * pair + 2]
        length = shard_bytes * PRIME64_1
        row = [*secrets[:FIRST_SUMS_AT], *first_sums, *secrets[FIRST_SUMS_AT:], length]
        table.append([signed(value) for value in row])
    return torch.tensor(table, device=device)
