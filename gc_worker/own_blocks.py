"""The blocks of the own node, as its slots say, and which targets can be asked about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.cluster.entities import Target
from kvstore.errors import NodeError

from .context import WorkerContext
from .headers import HeaderReader
from .hottest import BAND_ROWS_MAX, Band, walk_hottest
from .pacing import TokenBucket

CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBlocks:
    """n blocks of which an own target holds a shard, as its slots say.

    `headers`: dtype SLOT_HEADER (n,), whole ones. `locations`: int64 (n,), of their slots.
    `last_used_s`: uint32 (n,).
    """

    target: str
    headers: NDArray[Any]
    locations: NDArray[np.int64]
    last_used_s: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.headers)

    def take(self, rows: NDArray[Any]) -> OwnBlocks:
        """Some of the blocks, by index or by mask."""
        return OwnBlocks(
            target=self.target,
            headers=self.headers[rows],
            locations=self.locations[rows],
            last_used_s=self.last_used_s[rows],
        )


async def walk_own_blocks(
    context: WorkerContext,
    target: Target,
    bucket: TokenBucket,
    *,
    band_rows_max: int = BAND_ROWS_MAX,
) -> AsyncIterator[OwnBlocks]:
    """All blocks of an own target, hottest first, some at a time; a token for each row.

    Raises NodeError if the own node does not answer, or if the cluster map has changed: whoever
    asked has placed the blocks before by the old one.
    """
    cluster_map = context.link.map
    reader = HeaderReader(context.folder(target))
    scan = partial(context.link.scan, target.name)
    try:
        async for band in walk_hottest(scan, band_rows_max=band_rows_max):
            for at in range(0, len(band), CHUNK_ROWS):
                rows = band.take(slice(at, at + CHUNK_ROWS))
                await bucket.take(len(rows))
                blocks = await read_blocks(reader, target.name, rows)
                if context.link.map is not cluster_map:
                    raise NodeError(target.node, "the cluster map has changed")
                yield blocks
    finally:
        reader.close()


async def read_blocks(reader: HeaderReader, target: str, rows: Band) -> OwnBlocks:
    """The blocks in the slots of `rows` that are still there. Reads in a thread."""
    locations: list[int] = rows.location.tolist()
    found = await asyncio.to_thread(reader.read, locations, rows.generation)
    return OwnBlocks(
        target=target,
        headers=found.headers,
        locations=rows.location[found.rows],
        last_used_s=rows.last_used_s[found.rows],
    )


async def find_silent_targets(context: WorkerContext) -> frozenset[str]:
    """Targets that cannot say what they hold: their node does not answer, or their folder is lost.

    Raises NodeError if the own node is one of them.
    """
    cluster_map = context.link.map
    names = [node.name for node in cluster_map.nodes if cluster_map.targets_by_node[node.name]]
    answers = await asyncio.gather(
        *(context.link.statistics(name) for name in names), return_exceptions=True
    )
    silent: set[str] = set()
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, NodeError):
            if name == context.node:
                raise answer
            silent.update(target.name for target in cluster_map.targets_by_node[name])
        elif isinstance(answer, BaseException):
            raise answer
        else:
            described = answer.get("targets")
            listed = described if isinstance(described, list) else []
            rows = [row for row in listed if isinstance(row, dict)]
            good = {row.get("name") for row in rows if not row.get("is_lost")}
            silent |= {one.name for one in cluster_map.targets_by_node[name]} - good
    return frozenset(silent)
