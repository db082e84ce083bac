"""Opens a target, with all that an earlier process left there, and closes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import TargetDamaged, TargetError
from .clock import Clock
from .cut_segment import count_missing, open_cut_segment, remove_empty_segment
from .disk import Disk
from .disk_work import clear_runs, sync_segments
from .recovery import HeaderScanner
from .segment import Segment, SegmentCut, TargetIdentity, find_segment_files, open_segment
from .snapshot import Snapshot, SnapshotUnfit, take_snapshot
from .space import give_slots_without, plan_runs
from .target import Target, TargetSettings
from .target_folder import claim_folder
from .target_snapshot import restore_snapshot, save_snapshot

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
        opened = _open_segments(path, identity, disk)
        segments += opened.segments
        target.statistics.cut_slots += opened.cut_slots
        source = _load(target, opened, disk)
    except BaseException as error:
        for segment in segments:
            segment.close(disk)
        folder.release()
        if isinstance(error, OSError):
            raise TargetError(path, f"cannot be read: {error.strerror or error}") from error
        raise
    log.info(
        "target open name=%s path=%s from=%s segments=%d shards=%d seconds=%.3f",
        identity.name,
        path,
        source,
        len(segments),
        len(target.index),
        clock.monotonic_s() - started_s,
    )
    return target


def close_target(target: Target, disk: Disk) -> None:
    """Put everything on the disk and give the folder back; blocks.

    Errors of the disk are logged: at this point there is nobody left to tell.
    """
    errors = sync_segments(disk, target.take_dirty())
    for error in errors:
        log.error("sync failed target=%s: %s", target.name, error)
    if not target.is_lost:
        target.access_times.write(disk, target.space.segments.values())
    # After the shards are on the disk, so that no power cut leaves a snapshot of less.
    if not errors and len(target.index) >= target.snapshot_shards_min:
        save_snapshot(target, disk)
    for segment in target.space.segments.values():
        segment.close(disk)
    target.folder.release()


@dataclass(frozen=True, slots=True)
class _Opened:
    """The segments of a folder. `first_unusable` is by the numbers of those that are cut short."""

    segments: list[Segment]
    first_unusable: dict[int, int]
    is_whole: bool
    """None was found cut short."""
    cut_slots: int
    """Slots of which bytes are missing."""


def _open_segments(path: Path, identity: TargetIdentity, disk: Disk) -> _Opened:
    """All segments of the folder, or TargetDamaged with everything that is wrong with them."""
    paths, unfinished = find_segment_files(path)
    segments: list[Segment] = []
    cuts: list[SegmentCut] = []
    problems = []
    for file in paths:
        try:
            segments.append(open_segment(disk, file, identity))
        except SegmentCut as error:
            cuts.append(error)
        except (ValueError, OSError) as error:
            problems.append(f"{file.name} {error}")
    cut_slots = sum(count_missing(cut) for cut in cuts)
    opened = _Opened(segments, {}, is_whole=not cuts, cut_slots=cut_slots)
    try:
        if problems:
            text = f"{len(problems)} segment(s) do not fit: {'; '.join(problems)}"
            raise TargetDamaged(path, text)
        for cut in cuts:
            _open_cut(opened, cut, identity, disk)
        for file in unfinished:
            log.info("unfinished segment removed file=%s", file)
            disk.remove(file)
    except BaseException:
        for segment in segments:
            segment.close(disk)
        raise
    segments.sort(key=lambda segment: segment.shape.number)
    return opened


def _open_cut(opened: _Opened, cut: SegmentCut, identity: TargetIdentity, disk: Disk) -> None:
    """Add what is left of a segment, if anything is."""
    if cut.shape is None:
        remove_empty_segment(disk, cut.path, cut.size_bytes)
        return
    segment, first_unusable = open_cut_segment(disk, cut, identity)
    opened.segments.append(segment)
    opened.first_unusable[segment.shape.number] = first_unusable


def _load(target: Target, opened: _Opened, disk: Disk) -> str:
    """Make the target hold what its segments do; returns what told it."""
    with take_snapshot(disk, target.folder.path) as snapshot:
        if snapshot is not None and _restore(target, opened, snapshot):
            return "snapshot"
    scanner = HeaderScanner(disk)
    for segment in opened.segments:
        first_unusable = opened.first_unusable.get(segment.shape.number, segment.shape.slot_count)
        _load_segment(target, segment, scanner, first_unusable)
    losers = target.enter_loaded()
    target.access_times.read(disk, opened.segments)
    if losers:
        # A crash while a version was replaced. The newer one counts, as it did before.
        runs = [target.space.run_at(at, count) for _, at, count in plan_runs(sorted(losers))]
        failed = clear_runs(disk, runs)
        target.release_runs([run for run in runs if run not in failed], failed)
        log.info("older versions freed target=%s shards=%d", target.name, len(losers))
    return "headers"


def _restore(target: Target, opened: _Opened, snapshot: Snapshot) -> bool:
    """Whether the snapshot could be used."""
    try:
        if not opened.is_whole:
            raise SnapshotUnfit("is of whole segments")
        restore_snapshot(target, opened.segments, snapshot)
    except SnapshotUnfit as error:
        log.error("snapshot not used target=%s: %s", target.name, error)
        return False
    return True


def _load_segment(
    target: Target, segment: Segment, scanner: HeaderScanner, first_unusable: int
) -> None:
    """Note what a segment holds; slots from `first_unusable` on are not to be used."""
    target.space.add(segment, [])
    out_of_use = list(range(first_unusable, segment.shape.slot_count))
    for found in scanner.scan(segment):
        end = int(np.searchsorted(found.slots, first_unusable))
        target.load(segment, found.slots[:end], found.headers[:end])
        out_of_use += [slot for slot in found.unreadable if slot < first_unusable]
    target.quarantined.update(segment.shape.first_location + slot for slot in out_of_use)
    give_slots_without(target.space, segment, segment.columns.status == 1, out_of_use)
