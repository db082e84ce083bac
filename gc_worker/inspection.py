"""Inspect: what every node of the cluster says of one block, and what its header here says.

Asks all targets and not only those where the block belongs, so that shards which a change of the
map has left behind are seen too. Renews nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from kvstore import wire
from kvstore.cluster.entities import Target
from kvstore.errors import NodeError
from kvstore.node.slot import SLOT_HEADER

from .context import WorkerContext
from .headers import HeaderReader
from .hottest import Band, rows_of_scan, walk_slots
from .own_blocks import read_blocks

QUESTIONS_AT_ONCE = 64


async def inspect_block(context: WorkerContext, key: bytes, *, deadline_s: float) -> dict[str, Any]:
    """What there is of the block, such that JSON can show it.

    `targets`: for each target of the map node, target, is_reachable, problem, and if it holds a
    shard: shard, version, generation, payload_bytes, block_index, last_used_s, age_s. `versions`:
    number of shards by version. `is_readable`: k of one version answer. `header`: what only the
    slot's header says (namespace_id, layout, ttl_class, anchor, group, belongs_on, ...); None if
    the own node holds no shard of it, or could not look in time.
    """
    cluster_map = context.link.map
    end_s = context.clock.monotonic_s() + deadline_s
    gate = asyncio.Semaphore(QUESTIONS_AT_ONCE)

    async def ask(target: Target) -> dict[str, Any]:
        async with gate:
            return await _ask_target(context, target, key, max(end_s - _now(context), 0.1))

    targets = list(await asyncio.gather(*(ask(target) for target in cluster_map.targets)))
    found = [row for row in targets if "version" in row]
    versions = Counter(row["version"] for row in found)
    try:
        async with asyncio.timeout(max(end_s - _now(context), 0.1)):
            header = await _own_header(context, key, found)
    except (TimeoutError, NodeError):
        header = None
    return {
        "key": key.hex(),
        "k": cluster_map.code.k,
        "width": cluster_map.width,
        "shards": len(found),
        "versions": dict(versions),
        "is_readable": max(versions.values(), default=0) >= cluster_map.code.k,
        "targets": targets,
        "header": header,
    }


def _now(context: WorkerContext) -> float:
    return context.clock.monotonic_s()


async def _ask_target(
    context: WorkerContext, target: Target, key: bytes, deadline_s: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"node": target.node, "target": target.name}
    try:
        found = await context.link.ask_records(
            target.name, wire.Op.LOCATE, wire.LOCATION, body=key, count=1, deadline_s=deadline_s
        )
    except NodeError as error:
        return {**row, "is_reachable": False, "problem": error.detail}
    row |= {"is_reachable": True, "problem": ""}
    if found["status"][0] != 1:
        return row
    last_used_s = int(found["last_used_s"][0])
    return {
        **row,
        "shard": int(found["shard"][0]),
        "version": f"{int(found['block_xxh3'][0]):016x}",
        "generation": int(found["generation"][0]),
        "payload_bytes": int(found["payload_bytes"][0]),
        "block_index": int(found["block_index"][0]),
        "last_used_s": last_used_s,
        "age_s": max(context.now_s() - last_used_s, 0),
    }


async def _own_header(
    context: WorkerContext, key: bytes, found: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The header of the own shard. LOCATE tells no slot; its generation, which is unique, does."""
    for row in found:
        if row["node"] != context.node:
            continue
        target = context.link.map.target_by_name[row["target"]]
        wanted = np.uint64(row["generation"])
        async for head, rows in walk_slots(partial(context.link.scan, target.name)):
            band = rows_of_scan(head, rows)
            here = band.take(band.generation == wanted)
            if len(here):
                return await _read_header(context, target, key, here)
    return None


async def _read_header(
    context: WorkerContext, target: Target, key: bytes, here: Band
) -> dict[str, Any] | None:
    reader = HeaderReader(context.folder(target))
    try:
        blocks = await read_blocks(reader, target.name, here)
    finally:
        reader.close()
    if not len(blocks) or blocks.headers["key"][0].tobytes() != key:
        return None
    return describe_header(context, blocks.headers[0])


def describe_header(context: WorkerContext, header: np.void) -> dict[str, Any]:
    """What only a slot's header (a SLOT_HEADER record) says, and where the block belongs."""
    assert header.dtype == SLOT_HEADER
    anchor = header["anchor"].tobytes()
    placement = context.link.place(anchor)
    return {
        "namespace_id": header["namespace_id"].tobytes().hex(),
        "layout": header["layout"].tobytes().hex(),
        "ttl_class": bytes(header["ttl_class"]).decode(errors="replace"),
        "k": int(header["k"]),
        "m": int(header["m"]),
        "shard": int(header["shard"]),
        "block_index": int(header["block_index"]),
        "block_bytes": int(header["block_bytes"]),
        "payload_bytes": int(header["payload_bytes"]),
        "created_s": int(header["created_ns"]) // 1_000_000_000,
        "anchor": anchor.hex(),
        "group": placement.group.name,
        "belongs_on": list(placement.targets_by_shard()),
    }
