"""Blocks of random bytes with their keys, and places to fetch them into."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.client import (
    BlockLayout,
    Namespace,
    SaveResult,
    Section,
    StoreClient,
    batch_save,
    saving,
)
from kvstore.layout import BLOCK_TOKENS
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Target:
    """Memory for some blocks: `blocks` are views of `area`."""

    area: NDArray[np.uint8]
    blocks: list[memoryview]


class RandomBlocks:
    """`count` blocks of one chain. Equal seeds give equal keys and equal bytes."""

    def __init__(
        self,
        count: int,
        *,
        block_bytes: int,
        seed: int,
        tenant: str = "test",
        layout: BlockLayout | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        layout = layout or BlockLayout(sections=(Section("all", block_bytes),))
        self.block_bytes = block_bytes
        self.namespace = Namespace(
            model="random", weights="r1", tokenizer="t1", layout=layout, tenant=tenant
        )
        tokens = rng.integers(0, 1 << 16, count * BLOCK_TOKENS, dtype=np.int32)
        self.keys = self.namespace.block_keys(tokens)
        self.area: NDArray[np.uint8] = rng.integers(0, 256, count * block_bytes, dtype=np.uint8)
        self.sources = _cut(self.area, block_bytes)

    def empty_target(self) -> Target:
        """Zeroed memory for all blocks."""
        area = np.zeros_like(self.area)
        return Target(area, _cut(area, self.block_bytes))


async def save_in_full(save: Callable[[], Awaitable[SaveResult]]) -> tuple[int, int]:
    """How many blocks are stored, and how many were known, after as many saves as it takes: a node
    that is slow to say what it has leaves blocks in doubt, which count as failed."""
    stored = 0
    async with asyncio.timeout(PATIENCE_S):
        while (saved := await save()).failed:
            stored += saved.stored
    return stored + saved.stored, saved.known - stored


def store_whole(cluster_path: str | Path, blocks: RandomBlocks) -> None:
    """Every node has its shard of every block afterwards, however late some are."""

    async def store() -> None:
        async with StoreClient.connect(cluster_path) as client:
            saved = await client.save(blocks.namespace, blocks.keys, blocks.sources)
            assert saved.stored + saved.known == len(blocks.keys)
            await client.finish_writes(deadline_s=PATIENCE_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_save, "SILENT_S", PATIENCE_S)
        patch.setattr(batch_save, "STRAGGLER_WAIT_S", PATIENCE_S)
        patch.setattr(saving, "INQUIRY_DEADLINE_S", PATIENCE_S)
        # In a thread of its own: whoever waits here may be in a loop that runs.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, store()).result()


def _cut(area: NDArray[np.uint8], block_bytes: int) -> list[memoryview]:
    view = area.data
    return [view[at : at + block_bytes] for at in range(0, len(area), block_bytes)]
