"""Blocks that came with lost data shards: brings them into the pool whole, rebuilt from parity.

The agent rebuilds by itself unless it is told to leave that to the reader of a run
(docs/decisions/0036). A `Rebuilder` is that reader's part. A code repairs a byte out of the same
byte of all shards, so a block can only be rebuilt when everything of it has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from kvstore.client import ArenaRun, BlockLoss

from ..errors import RebuiltWrong
from .block_list import BlockList
from .mover import ComputeMark, SectionMover, Transfer, wait_to_end

if TYPE_CHECKING:
    import torch


class Rebuilder(Protocol):
    """Brings blocks of one pool's layout. Called by the thread that moves sections."""

    def takes(self, k: int, m: int) -> bool:
        """Whether it can rebuild blocks of this code."""

    def bring(
        self,
        run: ArenaRun,
        keys: Sequence[bytes],
        losses: Sequence[BlockLoss],
        blocks: BlockList,
        *,
        after: ComputeMark = None,
    ) -> Sequence[Transfer]:
        """Bring all sections of blocks that have lost shards into the pool.

        `losses`: of blocks of the run, ascending; `keys` and `blocks`: their keys, and their ids in
        the pool. The blocks are there, and verified, when all transfers have ended; one of them
        fails if a block turns out to be wrong. Raises TransferFailed, AgentError.
        """


def move_whole(
    mover: SectionMover,
    run: ArenaRun,
    losses: Sequence[BlockLoss],
    blocks: BlockList,
    after: ComputeMark,
) -> list[Transfer]:
    """Move these blocks of a run into the pool as they are, with every section. Of what cannot be
    moved as a whole nothing is under way any more."""
    transfers: list[Transfer] = []
    try:
        for index, section in enumerate(run.layout.layout.sections):
            memory = run.section(index)
            for first, end in neighbours(losses):
                start = losses[first].block
                part = memory[start * section.bytes : (start + end - first) * section.bytes]
                transfers.append(mover.to_pool(part, index, blocks.cut(first, end), after=after))
    except BaseException:
        wait_to_end(*transfers)
        raise
    return transfers


def move_parity(
    mover: SectionMover,
    run: ArenaRun,
    losses: Sequence[BlockLoss],
    target: torch.Tensor,
    after: ComputeMark,
) -> list[Transfer]:
    """Copy the parity of these blocks of a run, one after the other, into memory of the mover's
    device: uint8, contiguous, with a row of all parity shards for each block. Else as
    `move_whole`."""
    transfers: list[Transfer] = []
    try:
        for first, end in neighbours(losses):
            start = losses[first].block
            part = run.parity(start, start + end - first)
            transfers.append(mover.copy_in(part, target[first:end], after=after))
    except BaseException:
        wait_to_end(*transfers)
        raise
    return transfers


def neighbours(losses: Sequence[BlockLoss]) -> Iterator[tuple[int, int]]:
    """The positions [first, end) of blocks that follow one another in the run."""
    first = 0
    for at in range(1, len(losses) + 1):
        if at == len(losses) or losses[at].block != losses[at - 1].block + 1:
            yield first, at
            first = at


def require_right(are_right: Sequence[bool], losses: Sequence[BlockLoss]) -> None:
    """Raises RebuiltWrong for the first block that is not what was stored."""
    for is_right, loss in zip(are_right, losses, strict=True):
        if not is_right:
            raise RebuiltWrong(
                f"block {loss.block} of the run, rebuilt without its shards {loss.missing}, is not "
                "what was stored: a node has sent wrong bytes with a checksum that fits them"
            )
