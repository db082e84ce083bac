"""Says of blocks that the reader of a run has rebuilt whether they are right.

A block is right when the checksums of its k data shards, those that came and those that were
rebuilt, combine with its key to the block's own: as strict as what the agent delivers itself. What
is wrong then is a shard that lies about itself. No other shards are at hand to leave it out: the
block is one that cannot be had.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import wire
from ..arena.losses import BlockLoss


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
