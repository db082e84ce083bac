"""What a plan would evict, by class, reason and age: said to people before it goes. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from .ages import AGE_BOUNDS_S, UNNAMED
from .target_look import TargetLook
from .victims import reason_name


def summarise_look(look: TargetLook, *, high: float, low: float) -> dict[str, Any]:
    """One target's plan as JSON shows it.

    `groups`: for each class, reason and group of ages (`age_max_s` None: above the last bound) the
    `shards` that would go and the `bytes` of their slots.
    """
    columns, plan = look.columns, look.plan
    ages_s = look.now_s - columns.last_used_s[plan.rows].astype(np.int64)
    group = np.searchsorted(np.array(AGE_BOUNDS_S), np.maximum(ages_s, 0))
    numbers = columns.ttl_class[plan.rows].astype(np.int64)
    cell = (numbers * 256 + plan.reasons) * (len(AGE_BOUNDS_S) + 1) + group
    cells, at, counts = np.unique(cell, return_inverse=True, return_counts=True)
    sizes = np.bincount(at, columns.slot_bytes[plan.rows], len(cells)).astype(np.int64)
    groups = []
    for cell_number, count, size in zip(
        cells.tolist(), counts.tolist(), sizes.tolist(), strict=True
    ):
        number_and_reason, age = divmod(cell_number, len(AGE_BOUNDS_S) + 1)
        number, reason = divmod(number_and_reason, 256)
        is_named = number < len(columns.class_names)
        groups.append(
            {
                "class": columns.class_names[number] if is_named else UNNAMED,
                "reason": reason_name(reason),
                "age_min_s": AGE_BOUNDS_S[age - 1] if age else 0,
                "age_max_s": AGE_BOUNDS_S[age] if age < len(AGE_BOUNDS_S) else None,
                "shards": count,
                "bytes": size,
            }
        )
    return {
        "target": look.target.name,
        "fill": round(look.usage.fraction, 6),
        "decided_by": look.usage.decided_by,
        "high": high,
        "low": low,
        "shards_held": len(columns),
        "shards": len(plan),
        "bytes": plan.freed_bytes,
        "is_cut": plan.is_cut,
        "groups": groups,
    }
