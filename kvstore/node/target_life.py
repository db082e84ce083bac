"""Opens a target, with all that an earlier process left there, and closes it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from ..errors import TargetDamaged, TargetError
from .clock import Clock
from .disk import Disk
from .disk_work import clear_runs, sync_segments
from .recovery import scan_segment
from .segment import Segment, TargetIdentity, find_segment_files, open_segment
from .space import plan_runs
from .target import Target, TargetSettings
from .target_folder import claim_folder

log = logging.getLogger(__name__)


def open_target(
    path: Path,
    identity: TargetIdentity,
    *,
    capacity_bytes: int,
    settings: TargetSettings,
    disk: Disk,
    clock: Clock,
    pid: int,
) -> Target:
    """Claim the folder and rebuild the index from the slots; blocks.

    Raises TargetError (TargetLocked, TargetMismatch, TargetDamaged); nothing is held or changed
    then. The folder is made if it is not there.
    """
    started_s = clock.monotonic_s()
    folder = claim_folder(path, identity, pid=pid, now_ns=clock.unix_ns())
    target = Target(folder, capacity_bytes=capacity_bytes, settings=settings, clock=clock)
    segments: list[Segment] = []
    try:
        segments += _open_segments(path, identity, disk)
        _load(target, segments, disk)
    except BaseException as error:
        for segment in segments:
            segment.close(disk)
        folder.release()
        if isinstance(error, OSError):
            raise TargetError(path, f"cannot be read: {error.strerror or error}") from error
        raise
    log.info(
        "target open name=%s path=%s segments=%d shards=%d seconds=%.3f",
        identity.name,
        path,
        len(segments),
        len(target.index),
        clock.monotonic_s() - started_s,
    )
    return target


def close_target(target: Target, disk: Disk) -> None:
    """Put everything on the disk and give the folder back; blocks.

    Errors of the disk are logged: at this point there is nobody left to tell.
    """
    for error in sync_segments(disk, target.take_dirty()):
        log.error("sync failed target=%s: %s", target.name, error)
    for segment in target.space.segments.values():
        segment.close(disk)
    target.folder.release()


def _open_segments(path: Path, identity: TargetIdentity, disk: Disk) -> list[Segment]:
    """All segments of the folder, or TargetDamaged with everything that is wrong with them."""
    paths, unfinished = find_segment_files(path)
    segments: list[Segment] = []
    problems = []
    for file in paths:
        try:
            segments.append(open_segment(disk, file, identity))
        except (ValueError, OSError) as error:
            problems.append(f"{file.name} {error}")
    if problems:
        for segment in segments:
            segment.close(disk)
        raise TargetDamaged(path, f"{len(problems)} segment(s) do not fit: {'; '.join(problems)}")
    for file in unfinished:
        log.info("unfinished segment removed file=%s", file)
        disk.remove(file)
    return segments


def _load(target: Target, segments: list[Segment], disk: Disk) -> None:
    losers: list[int] = []
    for segment in segments:
        losers += _load_segment(target, segment, disk)
    if losers:
        # A crash while a version was replaced. The newer one counts, as it did before.
        runs = [target.space.run_at(at, count) for _, at, count in plan_runs(sorted(losers))]
        failed = clear_runs(disk, runs)
        target.release_runs([run for run in runs if run not in failed], failed)
        log.info("older versions freed target=%s shards=%d", target.name, len(losers))


def _load_segment(target: Target, segment: Segment, disk: Disk) -> list[int]:
    """Enter what a segment holds. Returns the locations of shards that a newer one has replaced."""
    losers: list[int] = []
    is_free = np.ones(segment.shape.slot_count, np.bool_)
    target.space.add(segment, [])
    for found in scan_segment(disk, segment):
        is_free[found.slots] = False
        losers += target.load(segment, found.slots, found.headers)
        for slot in found.unreadable:
            is_free[slot] = False
            target.quarantined.add(segment.shape.first_location + slot)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_free, [False])))).tolist()
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        target.space.give(segment, first, end - first)
    return losers
