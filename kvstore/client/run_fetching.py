"""Fetches blocks into a run of the arena in block order: whole batches, one after the other.

In layer order, where the first sections of all blocks come first: layered_fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..arena.region import RunMemory
from ..key import Namespace
from .context import ClientContext
from .fetching import fetch_blocks
from .results import FetchResult
from .run_batch import RunBlocks


async def fetch_run_by_block(
    context: ClientContext,
    namespace: Namespace,
    keys: Sequence[bytes],
    run: RunMemory,
    *,
    first_block: int,
    place: int,
    on_ready: Callable[[int, int], None],
    deadline_s: float,
) -> FetchResult:
    """Blocks `first_block` to the end of `keys` into the run from its block `place` on. With each
    verified batch every section of its blocks is ready: `on_ready(section, leading blocks)`."""
    code = context.router.code
    sections = range(len(namespace.layout.sections))

    def tell(blocks: int) -> None:
        for section in sections:
            on_ready(section, blocks)

    return await fetch_blocks(
        context,
        keys,
        first_block=first_block,
        memory=RunBlocks(run, place=place, count=len(keys) - first_block, k=code.k, m=code.m),
        deadline_s=deadline_s,
        on_blocks=tell,
    )
