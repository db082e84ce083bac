"""A rebuilder that says how much was left to it."""

from collections.abc import Sequence

from engine.kv.block_list import BlockList
from engine.kv.mover import ComputeMark, Transfer
from engine.kv.rebuild import Rebuilder
from kvstore.client import ArenaRun, BlockLoss


class CountingRebuilder:
    """A `Rebuilder` that counts the blocks which are left to it."""

    def __init__(self, rebuilder: Rebuilder) -> None:
        self._rebuilder = rebuilder
        self.blocks = 0

    def takes(self, k: int, m: int) -> bool:
        """See Rebuilder."""
        return self._rebuilder.takes(k, m)

    def bring(
        self,
        run: ArenaRun,
        keys: Sequence[bytes],
        losses: Sequence[BlockLoss],
        blocks: BlockList,
        *,
        after: ComputeMark = None,
    ) -> Sequence[Transfer]:
        """See Rebuilder."""
        self.blocks += len(losses)
        return self._rebuilder.bring(run, keys, losses, blocks, after=after)
