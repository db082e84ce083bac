"""Which data shards of a run's blocks are missing, and which parity came in their place.

    of each block  state u32 (0 nothing is missing, 1 rebuildable) | zeros u32 | block_xxh3 u64
                   payload_xxh3 u64 of each data shard, 0 of a missing one
                   shard u8 for each data shard: itself, or the parity shard that came for it

Written only by a fetch that leaves it to the reader of the run to rebuild: the worker fills in a
block's record, the state last, before it says that any section of the block is ready. With the
blocks' sections and parity that is all that is needed to rebuild, and to verify what was rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .region import RunMemory
from .run_layout import RunCode

REBUILDABLE = 1


class BlockLoss(NamedTuple):
    """A block of which data shards are missing."""

    block: int
    """Within the run."""
    shards: tuple[int, ...]
    """For each data shard the shard that is there: itself, or parity (k and above)."""
    data_xxh3: tuple[int, ...]
    """payload_xxh3 of each data shard; of a missing one it is not known, and 0."""
    block_xxh3: int

    @property
    def missing(self) -> list[int]:
        """The data shards that are to be rebuilt."""
        return find_missing(self.shards)


def find_missing(shards: Sequence[int]) -> list[int]:
    """The data shards in whose place parity is there."""
    return [place for place, shard in enumerate(shards) if shard != place]


def clear_losses(run: RunMemory) -> None:
    """Nothing is missing: before a fetch begins, in a run with room for parity."""
    code = run.layout.code
    if code is not None:
        _area(run, code)[:] = 0


def write_loss(run: RunMemory, loss: BlockLoss) -> None:
    """Note what a block has lost. For the worker that fills it."""
    record = _records(run)[loss.block]
    record["block_xxh3"] = loss.block_xxh3
    record["data_xxh3"] = loss.data_xxh3
    record["shards"] = loss.shards
    record["state"] = REBUILDABLE


def read_losses(run: RunMemory, first: int, end: int) -> list[BlockLoss]:
    """Of the blocks `first` to `end`, of which some section is ready, those that are to be rebuilt;
    none in a run without room for parity. Raises StoreError if what stands there makes no sense."""
    code = run.layout.code
    if code is None:
        return []
    records = _records(run)
    lost = np.flatnonzero(records["state"][first:end]) + first
    return [_read(code, int(block), records[block]) for block in lost]


def _read(code: RunCode, block: int, record: np.void) -> BlockLoss:
    shards = tuple(record["shards"].tolist())
    parity = [shard for place, shard in enumerate(shards) if shard != place]
    is_sound = len(set(parity)) == len(parity) and all(
        code.k <= shard < code.k + code.m for shard in parity
    )
    if int(record["state"]) != REBUILDABLE or not parity or not is_sound:
        raise StoreError(f"no record of lost shards of a code {code.k}+{code.m}: block {block}")
    return BlockLoss(block, shards, tuple(record["data_xxh3"].tolist()), int(record["block_xxh3"]))


def _records(run: RunMemory) -> NDArray[np.void]:
    code = run.layout.code
    assert code is not None, run.layout
    return _area(run, code).view(_record_type(code))


def _area(run: RunMemory, code: RunCode) -> NDArray[np.uint8]:
    start = run.layout.losses_offset
    size = code.loss_bytes * run.layout.blocks
    return np.frombuffer(run.view[start : start + size], np.uint8)


def _record_type(code: RunCode) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": ["state", "zeros", "block_xxh3", "data_xxh3", "shards"],
            "formats": ["<u4", "<u4", "<u8", ("<u8", (code.k,)), ("u1", (code.k,))],
            "itemsize": code.loss_bytes,
        }
    )


def loss_of(
    block: int, shards: Sequence[int], data_xxh3: Sequence[int], block_xxh3: int
) -> BlockLoss:
    """The record of a block that has the k `shards`, in ascending order: the parity among them
    comes for the missing data, in order. `data_xxh3`: of each data shard, whatever of a missing."""
    k = len(data_xxh3)
    parity = iter([shard for shard in shards if shard >= k])
    places = tuple(j if j in shards else next(parity) for j in range(k))
    known = tuple(data_xxh3[j] if places[j] == j else 0 for j in range(k))
    return BlockLoss(block, places, known, block_xxh3)
