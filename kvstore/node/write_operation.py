"""WRITE: shards from a peer into slots, in the order that docs/formats/slot.md demands.

The payload arrives where it will be written from: shard after shard in one buffer, as they will lie
in the file. Each run of neighbouring slots is one write of payloads and one of headers. Only one
write of a target is between choosing slots and the index entry at a time; the others receive, or
wait in line.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .. import wire
from ..errors import InvalidArgument
from ..layout import SHARDS_MAX
from ..retention_rules import CHAT_CLASS, check_class
from ..wire import WriteOutcome
from .answers import Request, answer, refuse, refuse_unread
from .buffers import Buffer
from .disk import means_full
from .disk_work import SlotWrite, apply_growth, write_runs
from .effects import Drain, Effect, NeedBuffer, NeedTurn, Operation, Receive, Send, Work
from .freeing import free_slots
from .node import Node, SyncPolicy
from .slot import SLOT_HEADER, SlotGeometry
from .space import Growth, SlotRun
from .target import Target
from .touch_operation import touch_keys

WRITE_AT_ONCE_BYTES_MAX = 2 << 20
"""More than that is written by a thread in any case."""
SLOW_WRITE_S = 0.01
"""A write that took longer, and slept, had to wait for the device."""
_STORED = int(WriteOutcome.STORED)
_WRITE_BATCH_NAMES = wire.WRITE_BATCH.names or ()
_BATCH_FIELDS = ("namespace_id", "layout", "ttl_class", "k", "m", "shard", "block_bytes", "anchor")
_ITEM_FIELDS = ("key", "block_index", "payload_xxh3", "block_xxh3")


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a WRITE brings: the fields of its WRITE_BATCH record, WRITE_ITEM records, and the keys
    as bytes."""

    batch: Mapping[str, Any]
    items: NDArray[Any]
    keys: list[bytes]
    geometry: SlotGeometry


def write(node: Node, target: Target, request: Request) -> Operation:
    """Answer a WRITE."""
    batch, items = _parse_write(request)
    keys: list[bytes] = items["key"].tolist()
    problem = find_write_problem(batch, keys, request.header.payload_bytes)
    problem = problem or _find_class_problem(node, target, batch["ttl_class"])
    if problem is not None:
        yield from refuse_unread(node, request, wire.Status.BAD_REQUEST, problem)
        return
    target.statistics.writes += 1
    refusal = WriteOutcome.FULL if node.is_draining else target.write_refusal_now()
    if refusal is not None:
        yield Drain(request.header.payload_bytes)
        _count(target, [refusal] * len(keys))
        body = bytes([refusal]) * len(keys)
        yield Send([answer(node, request, body=body, count=len(keys))])
        return
    offer = _Offer(batch, items, keys, SlotGeometry(batch["shard_bytes"]))
    size_bytes = request.header.payload_bytes
    if not node.pool.fits(size_bytes, is_for_write=True):
        text = "the request exceeds the node's memory for writes"
        yield from refuse_unread(node, request, wire.Status.BUSY, text)
        return
    buffer: Buffer | None = yield NeedBuffer(size_bytes, request.due_s, is_for_write=True)
    if buffer is None:
        text = "no memory within the deadline"
        yield from refuse_unread(node, request, wire.Status.BUSY, text)
        return
    try:
        outcomes = yield from _receive_and_store(node, target, request, offer, buffer)
    finally:
        buffer.release()
    if outcomes is None:
        yield from refuse(node, request, wire.Status.EXPIRED)
        return
    _count(target, outcomes)
    yield Send([answer(node, request, body=bytes(outcomes), count=len(outcomes))])


def find_write_problem(
    batch: Mapping[str, Any], keys: Sequence[bytes], payload_bytes: int
) -> str | None:
    """The rule of wire.md that a WRITE breaks, or None; `batch`: fields of a WRITE_BATCH record."""
    k, m, shard = batch["k"], batch["m"], batch["shard"]
    shard_bytes, block_bytes = batch["shard_bytes"], batch["block_bytes"]
    if not keys:
        return "no shards, expected at least one"
    if len(set(keys)) < len(keys):
        return "a key stands twice in one request"
    if not (k >= 1 and k + m <= SHARDS_MAX and shard < k + m):
        return f"shard {shard} of {k} + {m}, expected at most {SHARDS_MAX} shards"
    if payload_bytes != len(keys) * shard_bytes or not shard_bytes:
        return f"payload of {payload_bytes} bytes for {len(keys)} shards of {shard_bytes}"
    if not 0 < block_bytes <= k * shard_bytes:
        return f"blocks of {block_bytes} bytes in {k} shards of {shard_bytes}"
    try:
        check_class(batch["ttl_class"].decode("latin-1"))
    except InvalidArgument as error:
        return str(error)
    return None


def _find_class_problem(node: Node, target: Target, name: bytes) -> str | None:
    """Why shards of a TTL class cannot be kept as the policy says, if that is so.

    Classes that got no number share one, and the TTL of classes that the policy does not list.
    """
    if target.can_number_class(name):
        return None
    ttl_class = name.decode("latin-1")
    if ttl_class == CHAT_CLASS or ttl_class not in node.policy.current.ttl_s:
        return None
    return f"TTL class {ttl_class!r} is listed in the policy, but the target has too many classes"


def _parse_write(request: Request) -> tuple[dict[str, Any], NDArray[Any]]:
    count = request.header.count
    batch_bytes = wire.WRITE_BATCH.itemsize
    # Plain values: a field of a numpy record costs as much as all of them at once.
    values = np.frombuffer(request.body, wire.WRITE_BATCH, 1)[0].item()
    batch = dict(zip(_WRITE_BATCH_NAMES, values, strict=True))
    return batch, wire.parse_records(request.body, wire.WRITE_ITEM, count, batch_bytes)


def _receive_and_store(
    node: Node, target: Target, request: Request, offer: _Offer, buffer: Buffer
) -> Generator[Effect, Any, list[int] | None]:
    """The outcome of each shard, or None if the deadline passed before anything was stored."""
    payload_bytes, count = offer.geometry.payload_bytes, len(offer.keys)
    yield Receive([buffer.view[: count * payload_bytes]])
    checksums = list(map(xxh3_64_intdigest, buffer.pieces(payload_bytes)[:count]))
    if not (yield NeedTurn(target.writing, request.due_s)):
        return None
    try:
        if node.clock.monotonic_s() > request.due_s:
            return None
        outcomes: list[int] = yield from _store(node, target, offer, checksums, buffer)
        return outcomes
    finally:
        target.writing.release()


def _store(
    node: Node, target: Target, offer: _Offer, checksums: list[int], buffer: Buffer
) -> Generator[Effect, Any, list[int]]:
    """Write the shards that are intact and wanted. Runs while the target's turn is held."""
    outcomes = _judge(target, offer, checksums)
    rows = [row for row, outcome in enumerate(outcomes) if outcome == _STORED]
    if not rows:
        return outcomes
    runs = yield from _take_slots(node, target, offer.geometry, len(rows))
    slot_count = sum(run.count for run in runs)
    for row in rows[slot_count:]:
        outcomes[row] = target.growth_refusal.current() or WriteOutcome.FULL
    if not slot_count:
        return outcomes
    headers = _make_headers(target, offer)
    ends = list(accumulate(run.count for run in runs))
    pieces = [rows[end - run.count : end] for run, end in zip(runs, ends, strict=True)]
    chosen = [headers[_as_slice(piece)] for piece in pieces]
    writes = [
        SlotWrite(run, _join_payloads(run, piece, buffer), some.view(np.uint8).data)
        for run, piece, some in zip(runs, pieces, chosen, strict=True)
    ]
    errors = yield from _write(node, target, writes)
    unused: list[int] = []
    for run, piece, some, error in zip(runs, pieces, chosen, errors, strict=True):
        # With BATCH the file was synced as a whole.
        run.segment.is_dirty |= node.sync is not SyncPolicy.BATCH
        if error is None:
            keys = [offer.keys[row] for row in piece]
            replaced = target.commit(run, some, keys)
            _keep_last_use(target, run, offer.items["last_used_s"][_as_slice(piece)])
            target.statistics.shards_replaced += len(replaced)
            unused += replaced
        else:
            outcome = target.note_write_error(error)
            unused += range(run.first_location, run.first_location + run.count)
            for row in piece:
                outcomes[row] = outcome
    yield from free_slots(node, target, unused)
    return outcomes


def _judge(target: Target, offer: _Offer, checksums: list[int]) -> list[int]:
    """What is to become of each shard, STORED for those to be written."""
    versions = offer.items["block_xxh3"].tolist()
    outcomes = target.judge(offer.keys, versions, offer.batch["shard"])
    if WriteOutcome.KNOWN in outcomes:
        _renew(target, offer, outcomes)
    expected = offer.items["payload_xxh3"].tolist()
    if checksums != expected:
        for row, (found, wanted) in enumerate(zip(checksums, expected, strict=True)):
            if found != wanted:
                outcomes[row] = WriteOutcome.REJECTED
    return outcomes


def _renew(target: Target, offer: _Offer, outcomes: Sequence[int]) -> None:
    """A shard that is here already was saved again, which is a use of it."""
    rows = [row for row, outcome in enumerate(outcomes) if outcome == WriteOutcome.KNOWN]
    given_s = offer.items["last_used_s"].tolist()
    now_s = target.clock.unix_ns() // 1_000_000_000
    touch_keys(target, [offer.keys[row] for row in rows], [given_s[row] or now_s for row in rows])


def _keep_last_use(target: Target, run: SlotRun, given_s: NDArray[np.uint32]) -> None:
    """Shards that a repair brings, with the time of their last use, are not made younger by it."""
    if given_s.any():
        now_s = np.uint32(target.clock.unix_ns() // 1_000_000_000)
        slots = slice(run.first_slot, run.first_slot + run.count)
        last_used_s = run.segment.columns.last_used_s
        last_used_s[slots] = np.where(given_s, np.minimum(given_s, now_s), last_used_s[slots])


def _write(
    node: Node, target: Target, writes: Sequence[SlotWrite]
) -> Generator[Effect, Any, list[OSError | None]]:
    """Write the runs; an error or None for each.

    As a rule the kernel only copies into its page cache, which costs less than handing the work to
    a thread and back. When it makes writers wait for the device instead, threads write for a while,
    so that the loop is held up once and not with each write.
    """
    errors: list[OSError | None]
    if node.sync is SyncPolicy.BATCH:
        errors = yield Work(partial(write_runs, node.disk, writes, is_synced=True))
        return errors
    call = partial(write_runs, node.disk, writes, is_synced=False)
    size_bytes = sum(len(view) for write in writes for view in write.payloads)
    if size_bytes > WRITE_AT_ONCE_BYTES_MAX or target.slow_writes.current():
        errors = yield Work(call)
        return errors
    begun_s, waits = node.clock.monotonic_s(), node.disk.count_waits()
    errors = call()
    took_s = node.clock.monotonic_s() - begun_s
    # On a busy processor a write takes long too, and threads would make that worse.
    if took_s > SLOW_WRITE_S and node.disk.count_waits() > waits:
        target.slow_writes.begin(True)
    return errors


def _take_slots(
    node: Node, target: Target, geometry: SlotGeometry, count: int
) -> Generator[Effect, Any, list[SlotRun]]:
    """Free slots, of new segments if need be; fewer than `count` if the target is full."""
    runs = target.space.take(geometry, count)
    left = count - sum(run.count for run in runs)
    while left and target.growth_refusal.current() is None:
        growth = target.space.plan_growth(geometry)
        if growth is None or not (yield from _grow(node, target, growth)):
            break
        more = target.space.take(geometry, left)
        left -= sum(run.count for run in more)
        runs += more
    return runs


def _grow(node: Node, target: Target, growth: Growth) -> Generator[Effect, Any, bool]:
    """Add a segment, a smaller one if the disk is too full; False if it takes none."""
    folder = target.folder
    while True:
        work = partial(apply_growth, node.disk, folder.path, folder.identity, growth)
        try:
            segment = yield Work(work)
        except OSError as error:
            smaller = target.space.plan_smaller_growth(growth.shape) if means_full(error) else None
            if smaller is None:
                target.note_growth_error(error)
                return False
            growth = smaller
            continue
        target.space.add(segment, [(0, growth.shape.slot_count)])
        return True


def _make_headers(target: Target, offer: _Offer) -> NDArray[Any]:
    """The headers of all shards (dtype SLOT_HEADER), also of those that will not be written.

    They lie in the target's scratch, so they are good for as long as the turn is held.
    """
    count, scratch = len(offer.keys), target.header_scratch
    headers = scratch.repeat(_pack_first_header(target, offer), count)
    for field in _ITEM_FIELDS:
        headers[field] = offer.items[field]
    headers["generation"] = target.next_generations(count)
    scratch.seal(count)
    return headers


def _pack_first_header(target: Target, offer: _Offer) -> NDArray[Any]:
    """A header with what all shards of the request share."""
    header = np.zeros(1, SLOT_HEADER)
    for field in _BATCH_FIELDS:
        header[field] = offer.batch[field]
    header["payload_bytes"] = offer.geometry.payload_bytes
    header["created_ns"] = target.clock.unix_ns()
    return header


def _as_slice(rows: list[int]) -> slice | list[int]:
    """An index for `rows`, which ascend: a slice if it can be, because numpy copies the others."""
    is_one_piece = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if is_one_piece else rows


def _join_payloads(run: SlotRun, rows: Sequence[int], buffer: Buffer) -> list[memoryview]:
    """The payloads of `rows`, which ascend, in the buffer; neighbours joined."""
    size_bytes = run.segment.payload_bytes
    cuts: list[int] = []
    if rows[-1] - rows[0] + 1 > len(rows):
        cuts = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    return [
        buffer.view[rows[first] * size_bytes : (rows[end - 1] + 1) * size_bytes]
        for first, end in pairwise([0, *cuts, len(rows)])
    ]


def _count(target: Target, outcomes: Sequence[int]) -> None:
    """Note in the target's statistics what became of the shards."""
    statistics = target.statistics
    statistics.shards_known += outcomes.count(WriteOutcome.KNOWN)
    statistics.shards_kept += outcomes.count(WriteOutcome.KEPT)
    statistics.full_refusals += outcomes.count(WriteOutcome.FULL)
    statistics.bad_payloads += outcomes.count(WriteOutcome.REJECTED)
