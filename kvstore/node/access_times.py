"""When each shard was last used, in a small file beside each segment, for a start after a crash.

Soft state: a kill costs at most what was used since the last round, and a file that is missing,
damaged or of other shards costs the time of use of those, which count as used when they were
written. Nothing here belongs to the event loop: a round runs in a thread and copies the columns,
a segment at a time. The layout stands in docs/formats/snapshot.md.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from .disk import Disk
from .segment import TEMPORARY_SUFFIX, Segment
from .snapshot import remove_if_there

log = logging.getLogger(__name__)

MAGIC = b"CACHUSED"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIQ32x")
HEADER_BYTES = _HEADER.size
"""64: magic, version, segment, slot_count, zero, checksum of the rest, zeros."""
_NAME = re.compile(r"segment-(\d{6,})\.used")


class AccessTimes:
    """The files of one target. One round at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # By segment: the checksum of the times in its file.
        self._written: dict[int, int] = {}

    def write(self, disk: Disk, segments: Iterable[Segment]) -> int:
        """Write what has changed since the last round; returns how many files. Blocks.

        An error of the disk is logged and ends the round: the next one tries again.
        """
        numbers = set()
        count = 0
        try:
            for segment in segments:
                numbers.add(segment.shape.number)
                count += self._write_one(disk, segment)
        except OSError as error:
            log.warning("access times not written folder=%s: %s", self._folder, error)
            return count
        for number in self._written.keys() - numbers:
            del self._written[number]
            remove_if_there(disk, self._path(number))
        return count

    def read(self, disk: Disk, segments: Iterable[Segment]) -> None:
        """Bring the times of shards that are still those up to date; blocks.

        Files of segments that are gone are removed.
        """
        by_number = {segment.shape.number: segment for segment in segments}
        for path in self._folder.glob(f"segment-*.used{TEMPORARY_SUFFIX}"):
            disk.remove(path)
        for path in sorted(self._folder.glob("segment-*.used")):
            name = _NAME.fullmatch(path.name)
            segment = by_number.get(int(name[1])) if name else None
            if segment is None:
                disk.remove(path)
                continue
            try:
                _apply(_read_file(disk, path, segment), segment)
                self._written[segment.shape.number] = _digest(segment)
            except (OSError, ValueError) as error:
                log.error("access times not used file=%s: %s", path, error)

    def _write_one(self, disk: Disk, segment: Segment) -> bool:
        number = segment.shape.number
        digest = _digest(segment)
        if self._written.get(number) == digest:
            return False
        # First the times, then the generations: a slot that is written in between has a time that
        # is too old, and no shard counts as older than it is.
        times_s = segment.columns.last_used_s.tobytes()
        body = times_s + segment.columns.generation.astype(np.uint32).tobytes()
        slot_count = segment.shape.slot_count
        head = _HEADER.pack(MAGIC, VERSION, number, slot_count, 0, xxh3_64_intdigest(body))
        temporary = self._path(number).with_suffix(f".used{TEMPORARY_SUFFIX}")
        remove_if_there(disk, temporary)
        descriptor = disk.create(temporary)
        try:
            disk.write(descriptor, [memoryview(head), memoryview(body)], 0)
            disk.rename(temporary, self._path(number))
        except OSError:
            remove_if_there(disk, temporary)
            raise
        finally:
            disk.close(descriptor)
        self._written[number] = xxh3_64_intdigest(times_s)
        return True

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:06d}.used"


def _digest(segment: Segment) -> int:
    return xxh3_64_intdigest(segment.columns.last_used_s.data)


def _read_file(disk: Disk, path: Path, segment: Segment) -> bytearray:
    """The body of a file; ValueError if it does not fit its checksum and the segment."""
    slot_count = segment.shape.slot_count
    data = bytearray(HEADER_BYTES + 8 * slot_count)
    descriptor = disk.open(path)
    try:
        size_bytes = disk.size(descriptor)
        if size_bytes != len(data):
            raise ValueError(f"is {size_bytes} bytes long, expected {len(data)}")
        disk.read(descriptor, memoryview(data), 0)
    finally:
        disk.close(descriptor)
    magic, version, number, count, _, check = _HEADER.unpack_from(data)
    expected = (MAGIC, VERSION, segment.shape.number, slot_count)
    if (magic, version, number, count) != expected:
        raise ValueError(f"begins with {(magic, version, number, count)}, expected {expected}")
    body = data[HEADER_BYTES:]
    if xxh3_64_intdigest(body) != check:
        raise ValueError("does not fit its checksum")
    return body


def _apply(body: bytearray, segment: Segment) -> None:
    columns, slot_count = segment.columns, segment.shape.slot_count
    times_s = np.frombuffer(body, np.uint32, slot_count)
    generations = np.frombuffer(body, np.uint32, slot_count, 4 * slot_count)
    is_same = columns.generation.astype(np.uint32) == generations
    is_same &= columns.status == 1
    np.maximum(columns.last_used_s, times_s, out=columns.last_used_s, where=is_same)
