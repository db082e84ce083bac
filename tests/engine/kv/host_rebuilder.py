"""A `Rebuilder` by the CPU, which shows what every one has to do. Engines have none: it would do
the work of the agent, by the same kind of core, only later."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block_list import BlockList
from engine.kv.mover import ComputeMark, SectionMover, Transfer
from engine.kv.rebuild import move_whole, require_right
from kvstore.client import ArenaRun, BlockLoss
from tests.kvstore.run_rebuild import rebuild_in_run


class HostRebuilder:
    """In the run, before its sections are moved, whatever moves them."""

    def __init__(self, mover: SectionMover) -> None:
        self._mover = mover

    def takes(self, k: int, m: int) -> bool:
        """See Rebuilder: any."""
        return True

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
        require_right(rebuild_in_run(run.memory, keys, losses), losses)
        return move_whole(self._mover, run, losses, blocks, after)
