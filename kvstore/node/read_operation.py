"""READ: shards from segments to a peer, about 1 MiB at a time, copied once into a pooled buffer.

What is in the page cache is read on the spot; the rest is read by a thread while other connections
are served. After the copy each slot must carry the asked key, the generation that the index knew
before, and a whole header: the header lies behind the payload and is copied last, so a slot that
was freed and reused meanwhile cannot pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import wire
from .answers import Request, answer, refuse
from .buffers import Buffer, SlotViews
from .disk_work import SlotRead, read_runs
from .effects import Effect, NeedBuffer, Operation, Send, Work
from .freeing import free_slots
from .index import ABSENT
from .node import Node
from .segment import LOCATION_BITS, SLOT_MASK, ReadWay, Segment
from .slot import SlotGeometry, checksum_headers
from .space import SlotRun
from .target import Target

_HEADER_FIELDS = ("shard", "payload_bytes", "generation", "payload_xxh3", "block_xxh3")


@dataclass(frozen=True, slots=True)
class _Read:
    """One READ under way: the keys as bytes, and again as rows of one array."""

    node: Node
    target: Target
    geometry: SlotGeometry
    keys: list[bytes]
    key_rows: NDArray[Any]


def read(node: Node, target: Target, request: Request) -> Operation:
    """Answer a READ."""
    shard_bytes, keys = wire.parse_read(request.body, request.header.count)
    if not 0 < shard_bytes <= wire.PAYLOAD_BYTES_MAX:
        text = f"shards of {shard_bytes} bytes, expected 1 to {wire.PAYLOAD_BYTES_MAX}"
        yield from refuse(node, request, wire.Status.BAD_REQUEST, text)
        return
    target.statistics.reads += 1
    key_rows = np.frombuffer(request.body, "V32", len(keys), len(request.body) - 32 * len(keys))
    job = _Read(node, target, SlotGeometry(shard_bytes), keys, key_rows)
    locations = target.index.find(keys)
    cuts = plan_parts(locations, shard_bytes)
    slots_max = max(len(locations[a:b]) - locations[a:b].count(ABSENT) for a, b in cuts)
    size_bytes = slots_max * job.geometry.slot_bytes
    if not node.pool.fits(size_bytes):
        yield from refuse(node, request, wire.Status.BUSY, "a part exceeds the node's memory")
        return
    buffer: Buffer | None = yield NeedBuffer(size_bytes, request.due_s)
    if buffer is None:
        yield from refuse(node, request, wire.Status.BUSY, "no memory within the deadline")
        return
    try:
        yield from _send_parts(job, request, locations, cuts, buffer)
    finally:
        buffer.release()


def plan_parts(locations: Sequence[int], shard_bytes: int) -> list[tuple[int, int]]:
    """Cut the keys of a READ into frames of about PART_BYTES_TARGET: (first, end) of each."""
    shards_per_part = max(wire.PART_BYTES_TARGET // shard_bytes, 1)
    if len(locations) <= shards_per_part:
        return [(0, len(locations))]
    found = [row for row, location in enumerate(locations) if location != ABSENT]
    starts = [0, *found[shards_per_part::shards_per_part]]
    return list(zip(starts, [*starts[1:], len(locations)], strict=True))


def plan_runs(locations: list[int]) -> list[tuple[int, int]]:
    """Cut locations, none of them ABSENT, into runs of neighbours: (first location, slots) of each.

    The slots of a run lie next to each other in one file *and* in the order they were asked for.
    """
    count = len(locations)
    if locations == list(range(locations[0], locations[0] + count)):
        return [(locations[0], count)]
    runs: list[tuple[int, int]] = []
    first = expected = ABSENT
    for location in locations:
        if location != expected:
            if first != ABSENT:
                runs.append((first, expected - first))
            first = location
        expected = location + 1
    if first != ABSENT:
        runs.append((first, expected - first))
    return runs


def _send_parts(
    job: _Read,
    request: Request,
    locations: list[int],
    cuts: list[tuple[int, int]],
    buffer: Buffer,
) -> Operation:
    node, statistics = job.node, job.target.statistics
    payload_bytes = job.geometry.payload_bytes
    for first, end in cuts:
        if first and node.clock.monotonic_s() > request.due_s:
            yield from refuse(node, request, wire.Status.EXPIRED)
            return
        # The peer may have taken its time over the parts before this one.
        here = job.target.index.find(job.keys[first:end]) if first else locations[:end]
        try:
            records, views = yield from _fill_part(job, first, here, buffer)
        except OSError as error:
            statistics.io_errors += 1
            yield from refuse(node, request, wire.Status.DISK_ERROR, str(error.strerror))
            return
        statistics.shards_read += len(views)
        statistics.read_bytes += len(views) * payload_bytes
        statistics.misses += len(records) - len(views)
        head = answer(
            node,
            request,
            body=wire.pack_part(first, records),
            count=len(records),
            payload_bytes=len(views) * payload_bytes,
            is_last=end == len(job.keys),
        )
        yield Send([head, *views])


def _fill_part(
    job: _Read, first: int, locations: list[int], buffer: Buffer
) -> Generator[Effect, Any, tuple[NDArray[Any], list[memoryview]]]:
    """PART_RECORDs of the keys from `first` on, and the payloads of those that are here."""
    records = np.zeros(len(locations), wire.PART_RECORD)
    rows = [row for row, location in enumerate(locations) if location != ABSENT]
    # Shards may have appeared since the buffer was measured; they have to wait for the next READ.
    rows = rows[: buffer.size_bytes // job.geometry.slot_bytes]
    if not rows:
        return records, []
    wanted = [locations[row] for row in rows] if len(rows) < len(locations) else locations
    generations = yield from _copy_slots(job, wanted, buffer)
    views = buffer.slots(job.geometry)
    keys = job.key_rows[first : first + len(locations)]
    is_all = len(rows) == len(locations)
    is_good = _find_good(views, keys if is_all else keys[rows], generations)
    if is_all and is_good.all():
        _fill_records(records, views.headers[: len(rows)])
        return records, views.payloads[: len(rows)]
    yield from _drop_bad(job, first, rows, wanted, generations, is_good)
    good = np.flatnonzero(is_good)
    found = np.zeros(len(good), wire.PART_RECORD)
    _fill_records(found, views.headers[good])
    records[np.array(rows)[good]] = found
    return records, [views.payloads[i] for i in good.tolist()]


def _fill_records(records: NDArray[Any], headers: NDArray[Any]) -> None:
    """Write into PART_RECORDs what the headers of their slots say, row by row."""
    records["status"] = 1
    for field in _HEADER_FIELDS:
        records[field] = headers[field]


def _copy_slots(
    job: _Read, locations: list[int], buffer: Buffer
) -> Generator[Effect, Any, NDArray[np.uint64]]:
    """Copy slots into the buffer, one after the other; returns the generations to be found there.

    A slot of another size than asked is left out, and gets a generation that no slot has.
    """
    node, target, slot_bytes = job.node, job.target, job.geometry.slot_bytes
    generations = np.zeros(len(locations), np.uint64)
    left: list[SlotRead] = []
    at = 0
    now_s = node.clock.unix_ns() // 1_000_000_000
    for first, count in plan_runs(locations):
        segment, slot = target.space.segments[first >> LOCATION_BITS], first & SLOT_MASK
        if segment.shape.geometry == job.geometry:
            columns = segment.columns
            generations[at : at + count] = columns.generation[slot : slot + count]
            columns.last_used_s[slot : slot + count] = now_s
            into = buffer.view[at * slot_bytes : (at + count) * slot_bytes]
            done_bytes = _read_from_memory(node, segment, segment.offset(slot), into)
            if done_bytes < len(into):
                left.append(SlotRead(SlotRun(segment, slot, count), into, done_bytes))
        at += count
    if left:
        target.statistics.pooled_reads += len(left)
        for read in left:
            read.run.segment.pins += 1
        try:
            target.statistics.io_errors += yield Work(partial(read_runs, node.disk, left))
        finally:
            for read in left:
                read.run.segment.pins -= 1
    return generations


def _read_from_memory(node: Node, segment: Segment, offset: int, into: memoryview) -> int:
    """How many leading bytes of `into` could be had without waiting for a device."""
    try:
        if segment.read_way is ReadWay.PROBE:
            return node.disk.read_cached(segment.descriptor, into, offset) or 0
        if segment.read_way is ReadWay.DIRECT:
            node.disk.read(segment.descriptor, into, offset)
            return len(into)
    except OSError:
        # The thread meets the same error, slot by slot, and says what it is.
        return 0
    return 0


def _find_good(
    views: SlotViews, keys: NDArray[Any], generations: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Which slots hold what was asked for; `keys` and `generations` slot by slot."""
    count = len(keys)
    headers = views.headers[:count]
    checksums = checksum_headers(views.checked[:count])
    is_good: NDArray[np.bool_] = (
        (headers["key"] == keys)
        & (headers["generation"] == generations)
        & (headers["header_xxh3"] == checksums)
    )
    return is_good


def _drop_bad(
    job: _Read,
    first: int,
    rows: list[int],
    locations: list[int],
    generations: NDArray[np.uint64],
    is_good: NDArray[np.bool_],
) -> Operation:
    """Take the shards that are not good out of use, unless they were merely replaced."""
    dropped = []
    for i in np.flatnonzero(~is_good).tolist():
        generation = int(generations[i])
        key = job.keys[first + rows[i]]
        if generation and job.target.drop_damaged(key, locations[i], generation):
            dropped.append(locations[i])
    yield from free_slots(job.node, job.target, dropped)
