"""Clears slots that nothing points to any more, and only then lets them be used again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .disk_work import clear_runs
from .effects import Operation, Work
from .node import Node
from .space import plan_runs
from .target import Target


def free_slots(node: Node, target: Target, locations: Sequence[int]) -> Operation:
    """Zero the headers of slots that are out of the index, then make the slots free.

    Quarantined ones are cleared too, so that they are not found again after a restart, but stay out
    of use. The order matters: docs/formats/slot.md.
    """
    if not locations:
        return
    runs = [target.space.run_at(at, count) for _, at, count in plan_runs(sorted(locations))]
    failed = yield Work(partial(clear_runs, node.disk, runs))
    for run in runs:
        run.segment.is_dirty = True
    target.release_runs([run for run in runs if run not in failed], failed)
