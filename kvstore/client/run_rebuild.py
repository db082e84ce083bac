"""Rebuilds the data shards that a fetch left to its reader, where they belong in the run, on the
CPU; and says of blocks that were rebuilt, wherever that was, whether they are right.

A block is right when the checksums of its k data shards, those that came and those that were
rebuilt, combine with its key to the block's own: as strict as what the agent delivers itself. What
is wrong then is a shard that lies about itself. No other shards are at hand to leave it out: the
block is one that cannot be had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from erasure.code import Code

from .. import wire
from ..arena.losses import BlockLoss, find_missing
from ..arena.region import RunMemory
from .geometry import checksum_of
from .run_batch import RunBatch, geometry_of


def rebuild_in_run(
    run: RunMemory, keys: Sequence[bytes], losses: Sequence[BlockLoss]
) -> list[bool]:
    """Rebuild what blocks of a run have lost; for each whether it is right now, and may be used.

    `keys`: of these blocks. May be called again for the same blocks.
    """
    if not losses:
        return []
    run_code = run.layout.code
    assert run_code is not None, run.layout
    code = _code(run_code.k, run_code.m)
    first, end = losses[0].block, losses[-1].block + 1
    geometry = geometry_of(run, code.k, code.m)
    padding = np.zeros(max(1, (end - first) * geometry.scratch_bytes), np.uint8)
    batch = RunBatch(
        geometry,
        run,
        place=first,
        blocks=end - first,
        scratch=padding.data,
        scratch_address=padding.ctypes.data,
    )
    rows_by_shards: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for loss in losses:
        rows_by_shards[loss.shards].append(loss.block - first)
    for shards, rows in rows_by_shards.items():
        missing = find_missing(shards)
        for column in batch.columns:
            addresses = column.addresses[rows]
            code.reconstruct_at(
                missing,
                shards,
                addresses[:, list(shards)],
                addresses[:, missing],
                shard_bytes=column.bytes,
            )
    hashes = []
    for loss in losses:
        row = loss.block - first
        hashes.append([checksum_of(batch.shard_views(j, row, row + 1)) for j in loss.missing])
    return check_rebuilt(keys, losses, hashes)


def check_rebuilt(
    keys: Sequence[bytes], losses: Sequence[BlockLoss], hashes: Sequence[Sequence[int]]
) -> list[bool]:
    """Which blocks are right, by XXH3-64 of the shards of each that were rebuilt, in the order of
    `BlockLoss.missing`."""
    rows = []
    for loss, rebuilt in zip(losses, hashes, strict=True):
        found = list(loss.data_xxh3)
        for place, value in zip(loss.missing, rebuilt, strict=True):
            found[place] = value
        rows.append(found)
    combined = wire.combine_checksums(keys, list(zip(*rows, strict=True)))
    return [value == loss.block_xxh3 for value, loss in zip(combined, losses, strict=True)]


@lru_cache(maxsize=8)
def _code(k: int, m: int) -> Code:
    return Code(k, m)
