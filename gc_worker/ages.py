"""How long ago the shards of a node were used, by class: what people ask before they change a TTL.

Pure. The counts are made from the columns that eviction looks at anyway, so they are as old as its
last scan and hold the shards of its own node only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .columns import TargetColumns

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
AGE_BOUNDS_S = (
    *(10 * MINUTE_S, HOUR_S, 6 * HOUR_S),
    *(days * DAY_S for days in (1, 2, 3, 5, 7, 14)),
)
"""Upper bounds of the groups, inclusive; one more group is above all of them."""
GROUPS = len(AGE_BOUNDS_S) + 1
ROWS_PER_PIECE = 1 << 18
UNNAMED = "(unnamed)"


def note_ages(
    before: Mapping[str, Any] | None, target: str, columns: TargetColumns, *, now_s: int
) -> dict[str, Any]:
    """The report `before`, with what was just seen of `target` in place of what it said of it.

    Of all targets together, as JSON shows it: `by_class[name][i]` is how many shards were used at
    most `bounds_s[i]` seconds before `now_s`, and longer ago than the bound before; the last one
    counts the rest. A use that lies in the future counts as now. `at_s` is `now_s`.
    """
    by_target = {**(before or {}).get("by_target", {}), target: count_ages(columns, now_s=now_s)}
    by_class: dict[str, list[int]] = {}
    for counted in by_target.values():
        for name, counts in counted.items():
            sums = by_class.get(name, [0] * len(counts))
            by_class[name] = [a + b for a, b in zip(sums, counts, strict=True)]
    return {
        "at_s": now_s,
        "bounds_s": list(AGE_BOUNDS_S),
        "by_class": dict(sorted(by_class.items())),
        "by_target": by_target,
    }


def count_ages(columns: TargetColumns, *, now_s: int) -> dict[str, list[int]]:
    """Shards of one target by class and age group, as `note_ages` describes them."""
    by_class: dict[str, list[int]] = {}
    for number, counts in _count_target(columns, now_s).items():
        is_named = number < len(columns.class_names)
        # All numbers without a name are one class.
        name = columns.class_names[number] if is_named else UNNAMED
        sums = by_class.get(name, [0] * GROUPS)
        by_class[name] = [a + b for a, b in zip(sums, counts.tolist(), strict=True)]
    return by_class


def _count_target(columns: TargetColumns, now_s: int) -> dict[int, NDArray[np.int64]]:
    """Shards of one target: class number to counts of int64 [GROUPS]."""
    # The least last use that is still within each bound, ascending.
    edges = np.sort(now_s - np.array(AGE_BOUNDS_S, np.int64))
    table = np.zeros((256, GROUPS), np.int64)
    for first in range(0, len(columns), ROWS_PER_PIECE):
        piece = slice(first, first + ROWS_PER_PIECE)
        last_used_s = columns.last_used_s[piece].astype(np.int64)
        group = GROUPS - 1 - np.searchsorted(edges, last_used_s, side="right")
        cell = columns.ttl_class[piece].astype(np.int64) * GROUPS + group
        table += np.bincount(cell, minlength=table.size).reshape(table.shape)
    return {int(number): table[number] for number in np.flatnonzero(table.any(axis=1))}
