"""A reader of runs: rebuilds the data shards that a fetch left to it, where they belong in the run,
on the CPU. An engine with a GPU does it in its pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from erasure.code import Code
from kvstore.arena.losses import BlockLoss, find_missing
from kvstore.arena.region import RunMemory
from kvstore.client import check_rebuilt
from kvstore.client.geometry import checksum_of
from kvstore.client.run_batch import RunBatch, geometry_of


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
    code = Code(run_code.k, run_code.m)
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
