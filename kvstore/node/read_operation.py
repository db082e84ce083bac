"""READ: shards from segments to a peer. What asks for their heads only is for `read_heads`.

What is in memory is sent from the file by the kernel, which copies it nowhere on the way; the rest
is read into a buffer by a thread, about 1 MiB at a time, while other connections are served. What
the answer says of the shards comes from the segment's columns, so the headers on the disk are not
read. A slot that is freed and written again while its bytes are on their way out is found by the
client: the bytes do not fit the checksum that was announced.
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
from .buffers import Buffer
from .disk_work import SlotRead, read_runs
from .effects import Effect, NeedBuffer, Operation, Send, Work
from .freeing import free_slots
from .node import Node
from .read_at_once import FileAnswer, note_use
from .read_heads import describe_heads, find_read_mistake
from .segment import ABSENT, Segment
from .space import SlotRun, plan_runs
from .target import Target

_RECORD_BYTES = wire.PART_RECORD.itemsize
_NO_RECORD = bytes(_RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class _Read:
    """One READ under way."""

    node: Node
    target: Target
    request: Request
    shard_bytes: int
    is_use: bool
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class _Span:
    """Keys `first` to `end` of a READ: where each is, and the runs of those that will be sent.

    A run is (row, slots); rows count from `first`.
    """

    first: int
    locations: list[int]
    runs: list[tuple[int, SlotRun]]

    @property
    def end(self) -> int:
        return self.first + len(self.locations)

    @property
    def slots(self) -> list[tuple[Segment, int, int]]:
        """Segment, first slot and slots of each run."""
        return [(run.segment, run.first_slot, run.count) for _, run in self.runs]


def read(node: Node, target: Target, request: Request) -> Operation:
    """Answer a READ."""
    shard_bytes, flags, keys = wire.parse_read(request.body, request.header.count)
    mistake = find_read_mistake(shard_bytes, flags)
    if mistake:
        yield from refuse(node, request, wire.Status.BAD_REQUEST, mistake)
        return
    if flags & wire.READ_HEADS:
        joined = wire.join_keys(keys)
        yield Send([describe_heads(node, target, request, shard_bytes, joined)])
        return
    target.statistics.reads += 1
    is_use = not flags & wire.READ_IS_NO_USE
    job = _Read(node, target, request, shard_bytes, is_use, keys)
    first = 0
    buffer: Buffer | None = None
    try:
        while True:
            if first and node.clock.monotonic_s() > request.due_s:
                yield from refuse(node, request, wire.Status.EXPIRED)
                return
            span, is_in_memory = _next_span(job, first)
            if is_in_memory:
                if not (yield from _send_from_files(job, span)):
                    return
            else:
                buffer = buffer or (yield from _get_buffer(job, len(keys) - first))
                if buffer is None or not (yield from _send_through_buffer(job, span, buffer)):
                    return
            first = span.end
            if first == len(keys):
                return
    finally:
        if buffer is not None:
            buffer.release()


def _next_span(job: _Read, first: int) -> tuple[_Span, bool]:
    """What the next frame answers, and whether all of it is in memory: then it may be long."""
    disk = job.node.disk
    span = _look_up(job, first, wire.PAYLOAD_BYTES_MAX // job.shard_bytes)
    if all(run.segment.can_send(disk, run.first_slot, run.count) for _, run in span.runs):
        return span, True
    span = _look_up(job, first, _shards_per_buffer(job))
    return span, all(run.segment.can_send(disk, run.first_slot, run.count) for _, run in span.runs)


def _look_up(job: _Read, first: int, count_max: int) -> _Span:
    """Where the next keys are now, `count_max` of them at most."""
    target, shard_bytes = job.target, job.shard_bytes
    locations = target.index.find(job.keys[first : first + count_max])
    runs = [(row, target.space.run_at(at, count)) for row, at, count in plan_runs(locations)]
    # A shard of another size counts as not here.
    runs = [(row, run) for row, run in runs if run.segment.payload_bytes == shard_bytes]
    return _Span(first, locations, runs)


def _shards_per_buffer(job: _Read) -> int:
    return max(wire.PART_BYTES_TARGET // job.shard_bytes, 1)


def _pack_head(job: _Read, span: _Span, body: bytes, sent: int) -> memoryview:
    """Header and body of the frame that answers a span with `sent` shards; counts them too."""
    statistics, payload_bytes = job.target.statistics, sent * job.shard_bytes
    statistics.shards_read += sent
    statistics.read_bytes += payload_bytes
    statistics.misses += len(span.locations) - sent
    if sent < len(span.locations) and job.is_use:
        _note_misses(job, span)
    return answer(
        job.node,
        job.request,
        body=body,
        count=len(span.locations),
        payload_bytes=payload_bytes,
        is_last=span.end == len(job.keys),
    )


def _note_misses(job: _Read, span: _Span) -> None:
    """Count why keys are not here. One that is here with a shard of another size is no miss."""
    is_missed = np.array(span.locations) == ABSENT
    job.target.misses.note(b"".join(job.keys[span.first : span.end]), is_missed)


def _touch(job: _Read, span: _Span) -> None:
    """Note when the shards were used last, and keep their files open until `_let_go`."""
    if job.is_use:
        note_use(job.target, span.slots)
    for _, run in span.runs:
        run.segment.pins += 1


def _let_go(span: _Span) -> None:
    for _, run in span.runs:
        run.segment.pins -= 1


# From files -----------------------------------------------------------------------------------


def _send_from_files(job: _Read, span: _Span) -> Generator[Effect, Any, bool]:
    """Send a span; False if a file could not be read, and so the peer is gone."""
    sent = sum(run.count for _, run in span.runs)
    head = _pack_head(job, span, wire.pack_part(span.first, _join_records(span)), sent)
    if not sent:
        yield Send([head])
        return True
    pieces = [
        (run.segment.descriptor, run.segment.offset(run.first_slot), run.count * job.shard_bytes)
        for _, run in span.runs
    ]
    if job.is_use:
        note_use(job.target, span.slots)
    return (yield from FileAnswer(job.target, head, pieces, span.slots).hold())


def _join_records(span: _Span) -> bytes | memoryview:
    """The PART_RECORDs of a span, of which the columns have those of the shards that are sent."""
    pieces: list[bytes | memoryview] = []
    end = 0
    for row, run in span.runs:
        if row > end:
            pieces.append(_NO_RECORD * (row - end))
        first, end = run.first_slot * _RECORD_BYTES, row + run.count
        pieces.append(run.segment.columns.part_bytes[first : first + run.count * _RECORD_BYTES])
    if end < len(span.locations):
        pieces.append(_NO_RECORD * (len(span.locations) - end))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# Through a buffer -----------------------------------------------------------------------------


def _get_buffer(job: _Read, shards_left: int) -> Generator[Effect, Any, Buffer | None]:
    """Memory for the longest frame that can follow, or None after the refusal was sent."""
    node, request = job.node, job.request
    size_bytes = min(shards_left, _shards_per_buffer(job)) * job.shard_bytes
    if not node.pool.fits(size_bytes):
        yield from refuse(node, request, wire.Status.BUSY, "a part exceeds the node's memory")
        return None
    buffer: Buffer | None = yield NeedBuffer(size_bytes, request.due_s)
    if buffer is None:
        yield from refuse(node, request, wire.Status.BUSY, "no memory within the deadline")
    return buffer


def _send_through_buffer(job: _Read, span: _Span, buffer: Buffer) -> Generator[Effect, Any, bool]:
    """Have a thread read a span, and send it; False after a refusal was sent instead."""
    generations = [
        generation
        for _, run in span.runs
        for generation in run.segment.columns.generation[
            run.first_slot : run.first_slot + run.count
        ].tolist()
    ]
    try:
        failed = yield from _read_span(job, span, buffer)
    except OSError as error:
        job.target.statistics.io_errors += 1
        yield from refuse(job.node, job.request, wire.Status.DISK_ERROR, str(error.strerror))
        return False
    records, views, bad = _choose_good(job, span, generations, failed, buffer)
    yield from free_slots(job.node, job.target, bad)
    body = wire.pack_part(span.first, records)
    yield Send([_pack_head(job, span, body, len(views)), *views])
    return True


def _read_span(job: _Read, span: _Span, buffer: Buffer) -> Generator[Effect, Any, set[int]]:
    """Fill the buffer with the shards of a span; the locations of those that cannot be read."""
    reads = []
    at = 0
    for _, run in span.runs:
        size_bytes = run.count * job.shard_bytes
        reads.append(SlotRead(run, buffer.view[at : at + size_bytes]))
        at += size_bytes
    job.target.statistics.pooled_reads += len(reads)
    _touch(job, span)
    try:
        failed: set[int] = yield Work(partial(read_runs, job.node.disk, reads))
    finally:
        _let_go(span)
    job.target.statistics.io_errors += len(failed)
    return failed


def _choose_good(
    job: _Read, span: _Span, generations: Sequence[int], failed: set[int], buffer: Buffer
) -> tuple[NDArray[Any], list[memoryview], list[int]]:
    """PART_RECORDs of a span, the shards to be sent, and the locations taken out of use.

    A shard that was replaced while the thread read it is left out: its bytes may be those of two.
    """
    target = job.target
    records = np.zeros(len(span.locations), wire.PART_RECORD)
    rows = [row + i for row, run in span.runs for i in range(run.count)]
    views: list[memoryview] = []
    bad: list[int] = []
    for at, (row, generation) in enumerate(zip(rows, generations, strict=True)):
        key, location = job.keys[span.first + row], span.locations[row]
        if location in failed:
            if target.drop_damaged(key, location, generation):
                bad.append(location)
        elif target.holds(key, location, generation):
            segment, slot = target.index.resolve(location)
            records[row] = segment.columns.parts[slot]
            views.append(buffer.view[at * job.shard_bytes : (at + 1) * job.shard_bytes])
        else:
            target.statistics.read_races += 1
    return records, views, bad
