"""What of a target goes into a snapshot, and how a target is made from one."""

from __future__ import annotations

import logging

from .disk import Disk
from .segment import Segment
from .slot_table import table_words
from .snapshot import (
    QUARANTINED,
    Snapshot,
    SnapshotHead,
    SnapshotUnfit,
    find_misfit,
    write_snapshot,
)
from .space import give_slots_without
from .target import Target

log = logging.getLogger(__name__)


def save_snapshot(target: Target, disk: Disk) -> None:
    """Write the snapshot of a target that nobody uses any more; blocks.

    None is written if it cannot be or would not be true, and the reason is logged: then the next
    start reads the headers.
    """
    problem = find_snapshot_problem(target)
    if problem is not None:
        log.warning("no snapshot target=%s: %s", target.name, problem)
        return
    segments = [segment for _, segment in sorted(target.space.segments.items())]
    for location in target.quarantined:
        segment, slot = target.index.resolve(location)
        segment.columns.status[slot] = QUARANTINED
    table = target.index.export_table()
    identity = target.folder.identity
    head = SnapshotHead(
        cluster=identity.cluster.hex(),
        target=identity.name,
        segments=[
            [s.shape.number, s.payload_bytes, s.shape.slot_count, table.handles[s.shape.number]]
            for s in segments
        ],
        shards=len(target.index),
        last_generation=target.last_generation,
        ttl_classes=target.ttl_class_names,
        table_seed=table.seed,
        table_keys_max=table.keys_max,
    )
    try:
        path = write_snapshot(disk, target.folder.path, head, segments, table.words)
    except OSError as error:
        log.warning("no snapshot target=%s: %s", target.name, error)
        return
    log.info("snapshot written file=%s shards=%d", path, len(target.index))


def find_snapshot_problem(target: Target) -> str | None:
    """Why a snapshot would not be true, if that is so.

    A slot that is neither in the index nor free nor out of use is one that a thread still writes or
    clears: nobody knows what its header will say.
    """
    if target.is_lost:
        return "its folder is lost"
    space, quarantined = target.space, target.quarantined
    resting = sum(
        location not in quarantined for run in target.resting.runs() for location in run.locations
    )
    known = len(target.index) + space.free_slots + resting + len(quarantined)
    if known != space.slot_count:
        return f"{space.slot_count - known} slots are still being written or cleared"
    return None


def restore_snapshot(target: Target, segments: list[Segment], snapshot: Snapshot) -> None:
    """Make a new target hold what a snapshot says of its segments.

    Raises SnapshotUnfit if it is not one of them; then nothing of the target was changed.
    """
    head = snapshot.head
    problem = find_misfit(head, target.folder.identity, segments)
    if problem is not None:
        raise SnapshotUnfit(problem)
    words = sum(len(piece) for piece in snapshot.table)
    if words != table_words(head.table_keys_max):
        raise SnapshotUnfit(f"has a table of {words} words for {head.table_keys_max} keys")
    handles = {number: handle for number, _, _, handle in head.segments}
    by_number = {segment.shape.number: segment for segment in segments}
    for position, number in enumerate(handles):
        segment = by_number[number]
        quarantined = snapshot.fill(segment, position)
        target.space.add(segment, [])
        give_slots_without(target.space, segment, segment.columns.status == 1, quarantined)
        first = segment.shape.first_location
        target.quarantined.update((quarantined + first).tolist())
    target.restore(last_generation=head.last_generation, ttl_classes=head.ttl_classes)
    target.index.restore_table(
        snapshot.table, seed=head.table_seed, keys_max=head.table_keys_max, handles=handles
    )
    target.note_entered()
    assert len(target.index) == head.shards
