"""READ when nothing is to be waited for: every shard is here, in memory, and fits one frame; or
only heads were asked for.

Nearly every READ is of this kind. Twelve nodes on a few cores empty each other's caches, so the
same Python costs three times what it costs in a loop, and what counts is how little of it runs for
one request: no operation is begun unless the socket is full. All other READs are for
`read_operation`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import wire
from .answers import Request
from .effects import Effect, FileUnreadable, Operation, Send, SendFile
from .node import Node
from .read_heads import describe_heads, find_read_mistake
from .segment import ReadWay, Segment
from .socket_transfer import SocketTransfer
from .target import Target

COPIED_BYTES_MAX = 128 << 10
"""So much is copied and sent with one call, which costs less than asking first whether it is in
memory and then sending it from the file."""
_RECORD_BYTES = wire.PART_RECORD.itemsize


@dataclass(slots=True)
class CopiedAnswer:
    """A frame in memory of its own."""

    views: Sequence[memoryview]

    def begin(self, transfer: SocketTransfer) -> None:
        """Hand the socket what it takes."""
        transfer.begin_send(self.views)

    def hold(self) -> Operation:
        """Sends the frame; what the operation is if the socket does not take all at once."""
        yield Send(self.views)


@dataclass(slots=True)
class FileAnswer:
    """A frame whose payload is sent from files: `head`, and for each run of neighbouring slots
    (segment, first slot, slots) a piece (descriptor, offset, size in bytes)."""

    target: Target
    head: memoryview
    pieces: Sequence[tuple[int, int, int]]
    runs: Sequence[tuple[Segment, int, int]]

    def begin(self, transfer: SocketTransfer) -> None:
        """Hand the socket what it takes. Raises FileUnreadable."""
        try:
            transfer.begin_send_file(self.head, self.pieces)
        except FileUnreadable as error:
            self._note_unreadable(error)
            raise

    def hold(self) -> Generator[Effect, Any, bool]:
        """Sends the frame. Until all of it has left, files stay open and slots that are freed are
        not used again. False if a file could not be read, and so the peer is gone."""
        phase = self.target.resting.begin_sending()
        for segment, _, _ in self.runs:
            segment.pins += 1
        try:
            yield SendFile(self.head, self.pieces)
        except FileUnreadable as error:
            self._note_unreadable(error)
            return False
        finally:
            self.target.end_sending(phase)
            for segment, _, _ in self.runs:
                segment.pins -= 1
        return True

    def _note_unreadable(self, error: FileUnreadable) -> None:
        self.target.statistics.io_errors += 1
        for segment, _, _ in self.runs:
            segment.is_suspect |= segment.descriptor == error.descriptor


def plan_read_at_once(
    node: Node, target: Target, request: Request
) -> CopiedAnswer | FileAnswer | None:
    """The answer to a READ as one frame, counted; None if it cannot be one."""
    count = request.header.count
    shard_bytes, flags, keys = wire.parse_joined_read(request.body)
    payload_bytes = count * shard_bytes
    if flags > wire.READ_IS_NO_USE:
        if not flags & wire.READ_HEADS or find_read_mistake(shard_bytes, flags):
            return None
        return CopiedAnswer([describe_heads(node, target, request, shard_bytes, keys)])
    if not 0 < payload_bytes <= wire.PAYLOAD_BYTES_MAX:
        return None
    end = 0
    runs: list[tuple[Segment, int, int]] = []
    pieces: list[tuple[int, int, int]] = []
    records: list[bytes | memoryview] = [wire.pack_part(0, b"")]
    for row, location, length in target.index.find_runs(keys):
        if row != end:
            return None
        end += length
        segment, slot = target.index.resolve(location)
        if segment.payload_bytes != shard_bytes:
            return None
        runs.append((segment, slot, length))
        pieces.append((segment.descriptor, segment.offset(slot), length * shard_bytes))
        first = slot * _RECORD_BYTES
        records.append(segment.columns.part_bytes[first : first + length * _RECORD_BYTES])
    if end != count:
        return None
    copies = _copy_all(node, runs, pieces) if payload_bytes <= COPIED_BYTES_MAX else []
    if not copies and not all(run[0].can_send(node.disk, *run[1:]) for run in runs):
        return None
    if not flags:
        note_use(target, runs)
    target.statistics.reads += 1
    target.statistics.shards_read += count
    target.statistics.read_bytes += payload_bytes
    head = _pack_head(node, request, b"".join(records), payload_bytes)
    return CopiedAnswer([head, *copies]) if copies else FileAnswer(target, head, pieces, runs)


def _copy_all(
    node: Node, runs: Sequence[tuple[Segment, int, int]], pieces: Sequence[tuple[int, int, int]]
) -> list[memoryview]:
    """Copies of the pieces of `runs`; none if one of them cannot be had without waiting."""
    copies: list[memoryview] = []
    for (segment, _, _), (descriptor, offset, size_bytes) in zip(runs, pieces, strict=True):
        copy = bytearray(size_bytes)
        if segment.is_suspect or segment.read_way is ReadWay.THREAD:
            return []
        if not node.disk.read_cached(descriptor, copy, offset):
            return []
        copies.append(memoryview(copy))
    return copies


def note_use(target: Target, runs: Sequence[tuple[Segment, int, int]]) -> None:
    """Note that the shards of `runs` are used now."""
    now_s = target.clock.unix_ns() // 1_000_000_000
    for segment, slot, count in runs:
        columns = segment.columns
        columns.last_used_s[slot : slot + count] = now_s
        target.classes.note_reads(columns.ttl_class[slot : slot + count])


def _pack_head(node: Node, request: Request, body: bytes, payload_bytes: int) -> memoryview:
    header = request.header
    frame = wire.pack_frame(
        wire.Op.READ,
        wire.KIND_RESPONSE,
        request_id=header.request_id,
        body=body,
        count=header.count,
        payload_bytes=payload_bytes,
        epoch=node.epoch,
        target=header.target,
    )
    return memoryview(frame)
