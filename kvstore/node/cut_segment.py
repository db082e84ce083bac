"""Segment files that somebody cut short while no process served them: they lose what is gone.

No write of ours shortens a file, so this is an accident of others: a file system that was repaired,
a copy that did not finish. The shards behind the end are lost; those before it are not.
"""

from __future__ import annotations

import logging
from pathlib import Path

from .disk import Disk
from .segment import (
    FREE_HEADERS,
    HEADERS_OFFSET,
    Segment,
    SegmentCut,
    TargetIdentity,
    open_segment,
)
from .slot import HEADER_BYTES

log = logging.getLogger(__name__)


def find_first_missing(cut: SegmentCut) -> int:
    """The first slot of which bytes are missing."""
    shape = cut.shape
    assert shape is not None
    payloads_bytes = max(cut.size_bytes - shape.payload_offset, 0)
    return payloads_bytes // shape.geometry.payload_bytes


def count_missing(cut: SegmentCut) -> int:
    """Slots of which bytes are missing, as far as the file still says."""
    return cut.shape.slot_count - find_first_missing(cut) if cut.shape is not None else 0


def open_cut_segment(disk: Disk, cut: SegmentCut, identity: TargetIdentity) -> tuple[Segment, int]:
    """Open a segment that is too short, made as long as it was if the disk allows; blocks.

    Returns the first slot that must stay out of use, which is its slot_count if it could be mended.
    Raises OSError if it cannot be opened any more.
    """
    assert cut.shape is not None
    first_missing, slot_count = find_first_missing(cut), cut.shape.slot_count
    log.error(
        "segment cut short file=%s bytes=%d expected=%d slots_lost=%d",
        cut.path,
        cut.size_bytes,
        cut.shape.file_bytes,
        count_missing(cut),
    )
    try:
        _mend(disk, cut, first_missing)
    except OSError as error:
        log.error("segment not mended file=%s: %s", cut.path, error)
        return open_segment(disk, cut.path, identity, may_be_short=True), first_missing
    return open_segment(disk, cut.path, identity), slot_count


def remove_empty_segment(disk: Disk, path: Path, size_bytes: int) -> None:
    """Remove a file that has not even its own header left, and so no shard; blocks."""
    log.error("segment cut short file=%s bytes=%d: removed, nothing is left", path, size_bytes)
    disk.remove(path)


def _mend(disk: Disk, cut: SegmentCut, first_missing: int) -> None:
    """Give the file its length back, the missing slots free."""
    shape = cut.shape
    assert shape is not None
    descriptor = disk.open(cut.path)
    try:
        headers_end = HEADERS_OFFSET + shape.slot_count * HEADER_BYTES
        end = min(headers_end, cut.size_bytes)
        for at in range(HEADERS_OFFSET + first_missing * HEADER_BYTES, end, len(FREE_HEADERS)):
            disk.write(descriptor, [FREE_HEADERS[: end - at]], at)
        # These first: with room behind them they would be headers of whole slots again.
        disk.sync(descriptor)
        disk.allocate(descriptor, shape.file_bytes)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
