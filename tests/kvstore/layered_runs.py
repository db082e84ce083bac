"""Chains that are stored, and runs that check each promise of a fetch in layer order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import numpy as np

from kvstore.arena.losses import clear_losses, read_losses
from kvstore.arena.run_layout import RunCode
from kvstore.client import StoreClient
from kvstore.client.arguments import Rebuild
from kvstore.client.results import FetchResult
from kvstore.cluster.map import load_cluster_map
from kvstore.layout import BlockLayout
from tests.kvstore.blocks import store_whole
from tests.kvstore.faults.lost_nodes import nodes_by_shard
from tests.kvstore.run_rebuild import rebuild_in_run
from tests.kvstore.runs import PlainRun, blocks_of, layout_of
from tests.patience import OPERATION_S

SMALL_FLASH = layout_of(2_816, 2_816, 2_816, 5_632)
"""Cut like a block of V4.1-Flash, an eighth as long: under 10+2 shards 0-1, 2-3, 4-5 and 6-9."""
PLACE = 3
"""Where in the run blocks go: not at its beginning."""


class StoredChain:
    """Blocks that every node of a cluster has its shard of."""

    def __init__(
        self, path: str, layout: BlockLayout, *, count: int, tenant: str, seed: int
    ) -> None:
        self.path = path
        self.map = load_cluster_map(path)
        self.layout = layout
        self.count = count
        self.blocks = blocks_of(layout, count, seed=seed, tenant=f"{tenant}-{os.getpid()}")
        store_whole(path, self.blocks)

    def holder(self, shard: int) -> str:
        """Name of the node that holds a shard of the first span."""
        return nodes_by_shard(self.map, self.blocks.keys)[shard]


class WatchedRun(PlainRun):
    """A run that looks whether it is true whenever it is told that a section is ready.

    `also` is called after each look, with the section and the blocks. With `rebuild` "reader" it
    rebuilds what is left to it, as soon as it is told of a block.
    """

    rebuild: Rebuild = "agent"

    def __init__(
        self, chain: StoredChain, *, also: Callable[[int, int], None] | None = None
    ) -> None:
        is_reader = self.rebuild == "reader"
        code = RunCode(chain.map.code.k, chain.map.code.m) if is_reader else None
        super().__init__(chain.layout, chain.count + PLACE + 2, code)
        clear_losses(self.memory)
        self.chain = chain
        self.rebuilt: set[int] = set()
        """Blocks of the chain."""
        self.ready = [0] * len(chain.layout.sections)
        self.told: list[tuple[int, int]] = []
        self._also = also
        self._first_block = 0

    async def fetch(
        self, store: StoreClient, *, first_block: int = 0, deadline_s: float = OPERATION_S
    ) -> FetchResult:
        """Fetches in layer order; what is said of it in the end must be true too."""
        self._first_block = first_block
        blocks = self.chain.blocks
        result = await store.fetch_run(
            blocks.namespace,
            blocks.keys,
            self.memory,
            first_block=first_block,
            place=PLACE,
            is_by_layer=True,
            is_left_to_reader=self.rebuild == "reader",
            on_ready=self._on_ready,
            deadline_s=deadline_s,
        )
        assert min(self.ready) == result.blocks
        self.check()
        return result

    def check(self) -> None:
        """Is all that was ever called ready still what was stored, and the rest of the run
        untouched?"""
        for section, blocks in enumerate(self.ready):
            self._check(section, 0, blocks)
        assert self.untouched(PLACE, PLACE + self.chain.count - self._first_block)

    def _on_ready(self, section: int, blocks: int) -> None:
        assert blocks > self.ready[section], "told only of more"
        self._rebuild(self.ready[section], blocks)
        self._check(section, self.ready[section], blocks)
        self.ready[section] = blocks
        self.told.append((section, blocks))
        if self._also is not None:
            self._also(section, blocks)

    def _rebuild(self, first: int, end: int) -> None:
        losses = read_losses(self.memory, PLACE + first, PLACE + end)
        first_block = self._first_block - PLACE
        new = [loss for loss in losses if loss.block + first_block not in self.rebuilt]
        keys = [self.chain.blocks.keys[loss.block + first_block] for loss in new]
        assert all(rebuild_in_run(self.memory, keys, new))
        self.rebuilt.update(loss.block + first_block for loss in new)

    def _check(self, section: int, first: int, end: int) -> None:
        sizes = [one.bytes for one in self.chain.layout.sections]
        at, size = sum(sizes[:section]), sizes[section]
        area = self.chain.blocks.area.reshape(self.chain.count, -1)
        truth = area[self._first_block + first : self._first_block + end, at : at + size]
        start = self.layout.place(section, PLACE + first)
        found = self.area[start : start + (end - first) * size].reshape(end - first, size)
        assert np.array_equal(found, truth), (section, first, end)


async def stays_as_it_is(run: WatchedRun, *, for_s: float) -> None:
    """Asserts that nobody writes into the run any more."""
    before = run.area.copy()
    await asyncio.sleep(for_s)
    assert np.array_equal(before, run.area)
