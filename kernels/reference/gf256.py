"""Products of shards with small matrices over GF(2^8), for blocks that lie in a pool.

The field and its polynomial are those of docs/formats/erasure-code.md; which coefficients make
parity or bring back a lost shard is said by `erasure`. A block of k shards lies in its pool row,
shard j in bytes j x S to (j + 1) x S; its m parity shards lie in a staging tensor. Each block has a
*recipe* of its own, so that one call serves blocks that have lost different shards:

    sources, k bytes | targets, m bytes | coefficients, m rows of k bytes | zeros up to 4 bytes

Shards are numbered as everywhere: 0 to k - 1 are data, k to k + m - 1 parity. Row r of the
coefficients makes shard targets[r] out of the sources; the target NO_SHARD makes nothing.
"""

import functools
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

FIELD_POLYNOMIAL = 0x11D
NO_SHARD = 0xFF
SHARD_ALIGN_BYTES = 16
RECIPE_ALIGN_BYTES = 4


class ShardSizes(NamedTuple):
    """What `check_shards` found: `blocks` blocks of k data and m parity shards."""

    blocks: int
    k: int
    m: int
    shard_bytes: int


def recipe_bytes(k: int, m: int) -> int:
    """Length of a block's recipe."""
    return -(-(k + m + m * k) // RECIPE_ALIGN_BYTES) * RECIPE_ALIGN_BYTES


def pack_recipe(
    k: int,
    m: int,
    sources: Sequence[int],
    targets: Sequence[int],
    coefficients: Sequence[Sequence[int]],
) -> bytes:
    """The recipe that makes `targets` (at most m shards) out of `sources` (k others).

    coefficients: for each target a row of k values, in the order of the sources.
    """
    shards = [*sources, *targets]
    is_fit = (
        len(sources) == k
        and len(targets) <= m
        and [len(row) for row in coefficients] == [k] * len(targets)
    )
    if not is_fit or len(set(shards)) < len(shards) or not set(shards) <= set(range(k + m)):
        raise ValueError(
            f"recipe: given sources {list(sources)}, targets {list(targets)} and coefficients "
            f"{list(map(list, coefficients))}, expected {k} sources of {k + m} shards, at most {m} "
            f"others as targets, and {k} coefficients for each of them"
        )
    idle = m - len(targets)
    packed = bytes([*sources, *targets, *([NO_SHARD] * idle), *chain(*coefficients)])
    return packed.ljust(recipe_bytes(k, m), b"\0")


def check_shards(
    pool: torch.Tensor,
    parity: torch.Tensor,
    block_ids: torch.Tensor,
    recipes: torch.Tensor,
) -> ShardSizes:
    """Sizes of the arguments of `combine_shards`; TypeError or ValueError if they do not fit."""
    given = {"pool": pool, "parity": parity, "recipes": recipes}
    for name, tensor in given.items():
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name}: given {tensor.dtype}, expected uint8")
    if block_ids.dtype != torch.int32:
        raise TypeError(f"block_ids: given {block_ids.dtype}, expected int32")
    is_fit = (pool.dim(), parity.dim(), block_ids.dim(), recipes.dim()) == (2, 3, 1, 2)
    if is_fit:
        blocks, m, shard_bytes = parity.shape
        k = pool.shape[1] // shard_bytes if shard_bytes else 0
        is_fit = (
            k > 0
            and m > 0
            and k + m < NO_SHARD
            and shard_bytes % SHARD_ALIGN_BYTES == 0
            and pool.shape[1] == k * shard_bytes
            and block_ids.shape == (blocks,)
            and recipes.shape == (blocks, recipe_bytes(k, m))
        )
    if not is_fit:
        raise ValueError(
            f"pool, parity, block_ids, recipes: given {list(pool.shape)}, {list(parity.shape)}, "
            f"{list(block_ids.shape)} and {list(recipes.shape)}, expected [pool blocks, k x S], "
            f"[blocks, m, S], [blocks] and [blocks, recipe bytes], S a multiple of "
            f"{SHARD_ALIGN_BYTES}"
        )
    for name, tensor in (*given.items(), ("block_ids", block_ids)):
        if not tensor.is_contiguous() or tensor.device != pool.device:
            raise ValueError(
                f"{name}: given strides {tensor.stride()} on {tensor.device}, expected a "
                f"contiguous tensor on {pool.device}"
            )
    return ShardSizes(blocks, k, m, shard_bytes)


def combine_shards(
    pool: torch.Tensor,
    parity: torch.Tensor,
    block_ids: torch.Tensor,
    recipes: torch.Tensor,
) -> None:
    """Make the shards that the recipes name, where they belong: data in the pool, parity beside.

    pool: uint8 [pool blocks, k x S]. parity: uint8 [blocks, m, S]. block_ids: int32 [blocks], the
    pool row of each block, all different. recipes: uint8 [blocks, recipe_bytes(k, m)]. Only the
    targets change. S is a multiple of 16.
    """
    blocks, k, m, shard_bytes = check_shards(pool, parity, block_ids, recipes)
    table = multiplication_table(pool.device)
    by_shard = pool.view(-1, k, shard_bytes)
    rows = block_ids.long()
    held = torch.cat([by_shard[rows], parity], dim=1)
    numbers = torch.arange(blocks, device=pool.device)
    steps = recipes.long()
    sources = held[numbers[:, None], steps[:, :k]].long()
    for row in range(m):
        first = k + m + row * k
        made = torch.zeros(blocks, shard_bytes, dtype=torch.uint8, device=pool.device)
        for source in range(k):
            made ^= table[steps[:, first + source, None], sources[:, source]]
        targets = steps[:, k + row]
        is_data, is_parity = targets < k, (targets >= k) & (targets < k + m)
        by_shard[rows[is_data], targets[is_data]] = made[is_data]
        parity[numbers[is_parity], targets[is_parity] - k] = made[is_parity]


@functools.cache
def multiplication_table(device: torch.device) -> torch.Tensor:
    """All products of the field, uint8 [256, 256]."""
    powers, logarithms, element = [], [0] * 256, 1
    for exponent in range(255):
        powers.append(element)
        logarithms[element] = exponent
        element <<= 1
        if element >= 256:
            element ^= FIELD_POLYNOMIAL
    exponents = torch.tensor(logarithms)
    table = torch.tensor(powers, dtype=torch.uint8)[(exponents[:, None] + exponents) % 255]
    # Zero has no logarithm; its row and column are set apart.
    table[0, :] = 0
    table[:, 0] = 0
    return table.to(device)
