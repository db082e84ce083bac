"""SCAN: what the slots of one segment are, for the worker that chooses what goes.

The answer is a copy of columns that are in memory anyway; no disk is touched. It takes about as
long as sending it, so a worker that looks at all slots of a target disturbs its traffic little.
"""

from __future__ import annotations

import numpy as np

from .. import wire
from .answers import Request, answer, refuse
from .buffers import Buffer
from .effects import NeedBuffer, Operation, Send
from .node import Node
from .segment import Segment
from .target import Target

_ROW_BYTES = wire.SCAN_ROW.itemsize
_NOTHING = wire.ScanHead(0, 0, 0, 0, 0, 0, is_end=True)


def scan(node: Node, target: Target, request: Request) -> Operation:
    """Answer a SCAN."""
    number, first_slot, slots_max = wire.parse_scan(request.body)
    if not 0 < slots_max <= wire.SCAN_SLOTS_MAX:
        text = f"{slots_max} slots, expected 1 to {wire.SCAN_SLOTS_MAX}"
        yield from refuse(node, request, wire.Status.BAD_REQUEST, text)
        return
    slots_max = min(slots_max, max(node.pool.limit_bytes // 2 // _ROW_BYTES, 1))
    buffer: Buffer | None = yield NeedBuffer(slots_max * _ROW_BYTES, request.due_s)
    if buffer is None:
        yield from refuse(node, request, wire.Status.BUSY, "no memory within the deadline")
        return
    try:
        # Looked up only now: segments may have come and gone while memory was waited for.
        segment, first_slot = _find_start(target, number, first_slot)
        head = _NOTHING if segment is None else _plan_head(target, segment, first_slot, slots_max)
        rows = buffer.view[: head.slots * _ROW_BYTES]
        if segment is not None:
            _fill_rows(np.frombuffer(rows, wire.SCAN_ROW), segment, first_slot)
        target.statistics.scanned_slots += head.slots
        body = wire.pack_scan_head(head)
        frame = answer(node, request, body=body, count=head.slots, payload_bytes=len(rows))
        yield Send([frame, rows] if rows else [frame])
    finally:
        buffer.release()


def pack_empty_scan() -> bytes:
    """Body of the answer of a target without segments."""
    return wire.pack_scan_head(_NOTHING)


def _find_start(target: Target, number: int, first_slot: int) -> tuple[Segment | None, int]:
    """The segment to describe, and from which slot on; None if there is none further."""
    segment = target.space.segments.get(number)
    if segment is not None and first_slot < segment.shape.slot_count:
        return segment, first_slot
    later = _next_number(target, number if segment is None else number + 1)
    return (None, 0) if later is None else (target.space.segments[later], 0)


def _next_number(target: Target, number: int) -> int | None:
    """The lowest number of a segment that is at least `number`."""
    return min((one for one in target.space.segments if one >= number), default=None)


def _plan_head(target: Target, segment: Segment, first_slot: int, slots_max: int) -> wire.ScanHead:
    """Which slots are described, and where the next SCAN is to go on."""
    shape = segment.shape
    slots = min(slots_max, shape.slot_count - first_slot)
    next_number: int | None = shape.number
    next_slot = first_slot + slots
    if next_slot == shape.slot_count:
        next_number, next_slot = _next_number(target, shape.number + 1), 0
    return wire.ScanHead(
        segment=shape.number,
        first_slot=first_slot,
        slots=slots,
        payload_bytes=segment.payload_bytes,
        next_segment=next_number or 0,
        next_slot=next_slot,
        is_end=next_number is None,
    )


def _fill_rows(rows: np.ndarray[tuple[int], np.dtype[np.void]], segment: Segment, at: int) -> None:
    """Describe neighbouring slots from `at` on; rows of slots that hold nothing are zeros."""
    columns, slots = segment.columns, slice(at, at + len(rows))
    rows["generation"] = columns.generation[slots]
    rows["last_used_s"] = columns.last_used_s[slots]
    rows["block_index"] = columns.block_index[slots]
    rows["status"] = columns.status[slots]
    rows["ttl_class"] = columns.ttl_class[slots]
    rows["shard"] = columns.shard[slots]
    rows["zero"] = np.zeros((), wire.SCAN_ROW)["zero"]
    rows[rows["status"] == 0] = np.zeros((), wire.SCAN_ROW)
