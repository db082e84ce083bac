"""Products of shards over GF(2^8) on a CUDA device; the contract is in `kernels.reference.gf256`.

A thread makes 16 bytes of every target out of the same 16 bytes of the k sources, which it holds in
registers, four bytes to a word. The product is Horner's rule over the bits of the coefficients:
from the highest bit down, the sum so far is doubled (in all four bytes at once), and the sources
whose coefficient has the bit are added to it. So doubling is paid for once a target and not once a
source. Coefficients are data and not compiled in: with one node down every block may have lost
another shard, and a kernel for each of the patterns would be compiled while somebody waits. A bit
of a coefficient becomes a mask in two instructions, which serve the four words that it selects.
"""

from typing import Any

import tilelang.language as T
import torch
from tilelang import PassConfigKey

from ..reference.gf256 import FIELD_POLYNOMIAL, check_shards, recipe_bytes
from .compiler import Program, launcher

Value = Any
"""An expression, or a buffer, of a TileLang program."""

THREADS = 128
WORD_BYTES = 4
VECTOR_BYTES = 16
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
LOW_BITS, ONES = 0x7F7F7F7F, 0x01010101
"""Of each byte of a word the seven low bits, and the lowest one."""
REMAINDER = FIELD_POLYNOMIAL & 0xFF
"""What x^8 is in the field."""


def combine_shards(
    pool: torch.Tensor,
    parity: torch.Tensor,
    block_ids: torch.Tensor,
    recipes: torch.Tensor,
) -> None:
    """See `kernels.reference.gf256.combine_shards`; on the current stream."""
    blocks, k, m, shard_bytes = check_shards(pool, parity, block_ids, recipes)
    require_aligned(pool=pool, parity=parity)
    if blocks:
        kernel = launcher(combine_program, k, m, shard_bytes, device_index=pool.device.index or 0)
        words = torch.int32
        kernel(pool.view(words), parity.flatten(1).view(words), block_ids, recipes.view(words))


def require_aligned(**tensors: torch.Tensor) -> None:
    """Raise ValueError for a tensor that cannot be read by 16 bytes at a time."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(
                f"{name}: given an address that is {tensor.data_ptr() % VECTOR_BYTES} modulo "
                f"{VECTOR_BYTES}, expected a multiple"
            )


def combine_program(k: int, m: int, shard_bytes: int) -> Program:
    """TileLang program for shards of `shard_bytes` under the code k + m."""
    vectors, shard_words = shard_bytes // VECTOR_BYTES, shard_bytes // WORD_BYTES
    recipe_words = recipe_bytes(k, m) // WORD_BYTES
    blocks, pool_blocks = T.dynamic("blocks"), T.dynamic("pool_blocks")

    @T.prim_func
    def combine_shards_of_blocks(
        pool: T.Tensor((pool_blocks, k * shard_words), "int32"),
        parity: T.Tensor((blocks, m * shard_words), "int32"),
        block_ids: T.Tensor((blocks,), "int32"),
        recipes: T.Tensor((blocks, recipe_words), "int32"),
    ) -> None:
        # Numbers of blocks and shards are checked below: a wrong one ends the kernel.
        T.annotate_pass_configs({PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True})
        with T.Kernel(blocks, T.ceildiv(vectors, THREADS), threads=THREADS) as (block, tile):
            recipe = T.alloc_local((recipe_words,), "int32")
            given = T.alloc_local((k, VECTOR_WORDS), "int32")
            made = T.alloc_local((VECTOR_WORDS,), "int32")
            vector = tile * THREADS + T.get_thread_binding()
            if vector < vectors:
                word = vector * VECTOR_WORDS
                row_id = block_ids[block]
                if row_id < 0 or row_id >= pool_blocks:
                    T.call_extern("void", "__trap")
                for at in T.unroll(recipe_words):
                    recipe[at] = recipes[block, at]
                for source in T.unroll(k):
                    shard = (recipe[source // 4] >> (8 * (source % 4))) & 0xFF
                    if shard >= k + m:
                        T.call_extern("void", "__trap")
                    if shard < k:
                        for v in T.vectorized(VECTOR_WORDS):
                            given[source, v] = pool[row_id, shard * shard_words + word + v]
                    else:
                        for v in T.vectorized(VECTOR_WORDS):
                            given[source, v] = parity[block, (shard - k) * shard_words + word + v]
                for row in T.unroll(m):
                    target = (recipe[(k + row) // 4] >> (8 * ((k + row) % 4))) & 0xFF
                    if target < k + m:
                        combine_words(given, recipe, k + m + row * k, made)
                        if target < k:
                            for v in T.vectorized(VECTOR_WORDS):
                                pool[row_id, target * shard_words + word + v] = made[v]
                        else:
                            for v in T.vectorized(VECTOR_WORDS):
                                parity[block, (target - k) * shard_words + word + v] = made[v]

    return combine_shards_of_blocks


@T.macro
def combine_words(given: Value, recipe: Value, first: Value, made: Value) -> None:
    """Puts into `made` the sum of the sources' words, each times its coefficient: those of the
    recipe from its byte `first` on."""
    for v in T.unroll(VECTOR_WORDS):
        made[v] = 0
    for step in T.unroll(8):
        for v in T.unroll(VECTOR_WORDS):
            made[v] = ((made[v] & LOW_BITS) << 1) ^ (((made[v] >> 7) & ONES) * REMAINDER)
        for source in T.unroll(given.shape[0]):
            at = first + source
            # Bit 7 - step of the coefficient, in all 32 places.
            mask = (recipe[at // 4] << (24 - 8 * (at % 4) + step)) >> 31
            for v in T.unroll(VECTOR_WORDS):
                made[v] = made[v] ^ (given[source, v] & mask)
