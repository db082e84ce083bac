"""Clears slots that nothing points to any more, and only then lets them be used again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .disk_work import clear_slots
from .effects import Operation, Work
from .node import Node
from .target import Target


def free_slots(node: Node, target: Target, locations: Sequence[int]) -> Operation:
    """Zero the headers of slots that are out of the index, then make the slots free.

    Quarantined ones are cleared too, so that they are not found again after a restart, but stay out
    of use. The order matters: docs/formats/slot.md.
    """
    if not locations:
        return
    slots = [target.index.resolve(location) for location in locations]
    failed = set((yield Work(partial(clear_slots, node.disk, slots))))
    for segment, _ in slots:
        segment.is_dirty = True
    target.release_slots([at for at in locations if at not in failed], failed)
