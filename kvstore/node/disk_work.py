"""The parts of an operation that wait for the disk. They run in threads.

Each function works on what it is given and changes nothing that the event loop owns: it reads
geometry and descriptors, which never change while a segment is open.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from .disk import Disk, FileEnds, means_damage
from .segment import Segment, TargetIdentity, create_segment
from .space import Growth, SlotRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotRead:
    """Read the payloads of `run` into `into`."""

    run: SlotRun
    into: memoryview


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """Write to `run`: the payloads one after the other, and the headers likewise."""

    run: SlotRun
    payloads: Sequence[memoryview]
    headers: memoryview


@dataclass(frozen=True, slots=True)
class SlotCheck:
    """Does the slot hold the bytes that were written as `generation` of `key`?"""

    segment: Segment
    slot: int
    key: bytes
    generation: int
    payload_xxh3: int


def read_runs(disk: Disk, reads: Sequence[SlotRead]) -> set[int]:
    """Fill the views of `reads`; returns the locations of slots whose bytes cannot be read.

    Raises OSError if the failure concerns the disk as a whole: another one than of bytes that are
    gone or unreadable, or if the beginning of a file cannot be read either.
    """
    failed: set[int] = set()
    broken: dict[int, Segment] = {}
    last_error: OSError | None = None
    for read in reads:
        segment = read.run.segment
        offset = segment.offset(read.run.first_slot)
        try:
            disk.read(segment.descriptor, read.into, offset)
        except OSError as error:
            log.error("read failed file=%s offset=%d: %s", segment.path, offset, error)
            if not means_damage(error):
                raise
            last_error = error
            broken[segment.shape.number] = segment
            failed |= _read_one_by_one(disk, read)
    # Where one shard can be read the device works; where none can, the table of slots tells.
    is_none_good = len(failed) == sum(read.run.count for read in reads)
    if last_error is not None and is_none_good and any(_is_lost(disk, s) for s in broken.values()):
        raise last_error
    return failed


def _read_one_by_one(disk: Disk, read: SlotRead) -> set[int]:
    """A bad sector spoils one slot; its neighbours can still be read."""
    segment, failed = read.run.segment, set()
    payload_bytes = segment.payload_bytes
    for i in range(read.run.count):
        into = read.into[i * payload_bytes : (i + 1) * payload_bytes]
        try:
            disk.read(segment.descriptor, into, segment.offset(read.run.first_slot + i))
        except OSError as error:
            if not means_damage(error):
                raise
            failed.add(read.run.first_location + i)
    return failed


def _is_lost(disk: Disk, segment: Segment) -> bool:
    """Whether not even the beginning of the file can be read, although the file has one."""
    try:
        disk.read(segment.descriptor, memoryview(bytearray(1)), 0)
    except FileEnds:
        return False
    except OSError:
        return True
    return False


def write_runs(disk: Disk, writes: Sequence[SlotWrite], *, is_synced: bool) -> list[OSError | None]:
    """Write each run, and sync the files if so wanted; returns an error or None for each run."""
    results: list[OSError | None] = []
    for write in writes:
        try:
            write.run.segment.write_slots(disk, write.run.first_slot, write.payloads, write.headers)
            results.append(None)
        except OSError as error:
            results.append(error)
    if is_synced:
        segments = {write.run.segment.shape.number: write.run.segment for write in writes}
        errors = {number: _sync(disk, segment) for number, segment in segments.items()}
        for i, write in enumerate(writes):
            results[i] = results[i] or errors[write.run.segment.shape.number]
    return results


def _sync(disk: Disk, segment: Segment) -> OSError | None:
    try:
        disk.sync(segment.descriptor)
    except OSError as error:
        return error
    return None


def sync_segments(disk: Disk, segments: Sequence[Segment]) -> list[OSError]:
    """Put all written bytes of the segments on the disk; returns what failed."""
    errors = [_sync(disk, segment) for segment in segments]
    return [error for error in errors if error is not None]


def clear_runs(disk: Disk, runs: Sequence[SlotRun]) -> list[SlotRun]:
    """Clear the headers of slots, which frees them; returns the runs where that failed."""
    failed = []
    for run in runs:
        try:
            run.segment.clear_headers(disk, run.first_slot, run.count)
        except OSError as error:
            path = run.segment.path
            log.error("%d slots not cleared file=%s: %s", run.count, path, error)
            failed.append(run)
    return failed


def apply_growth(disk: Disk, folder: Path, identity: TargetIdentity, growth: Growth) -> Segment:
    """Delete the segments that are to go, then make the new one. OSError if that fails."""
    for segment in growth.removed:
        segment.close(disk)
        disk.remove(segment.path)
        log.info("segment removed file=%s", segment.path)
    segment = create_segment(disk, folder, identity, growth.shape)
    log.info(
        "segment made file=%s slots=%d slot_bytes=%d",
        segment.path,
        growth.shape.slot_count,
        growth.shape.geometry.slot_bytes,
    )
    return segment


def check_slots(disk: Disk, checks: Sequence[SlotCheck], scratch: memoryview) -> list[bool]:
    """For each slot whether its shard is good, by its checksum; reads it into `scratch`."""
    return [_check_slot(disk, check, scratch) for check in checks]


def _check_slot(disk: Disk, check: SlotCheck, scratch: memoryview) -> bool:
    into = scratch[: check.segment.payload_bytes]
    try:
        disk.read(check.segment.descriptor, into, check.segment.offset(check.slot))
    except OSError as error:
        if error.errno != errno.EIO:
            log.error("read failed file=%s: %s", check.segment.path, error)
        return False
    return xxh3_64_intdigest(into) == check.payload_xxh3
