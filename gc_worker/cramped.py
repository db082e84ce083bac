"""Room for another slot size: which segment is to be emptied. Pure.

Slots serve one size of shards. When writers bring another size and the target has only free slots
of the old one, spread over its segments, evicting the least used shards one by one makes more
of what nobody asks for. Then the segment goes whose shards were used longest ago: the node
gives a segment without shards to whichever size asks first.
"""

from __future__ import annotations

import numpy as np

from kvstore.node.segment import LOCATION_BITS
from kvstore.wire import EvictReason

from .columns import TargetColumns
from .plan import EvictionPlan, order_rows

CRAMPED_LOOKS = 2
"""So many looks in a row must have found refused writers and room at once: a single one is what
an eviction leaves that has just ended."""


def plan_segment_eviction(columns: TargetColumns, *, now_s: int, bucket_s: int) -> EvictionPlan:
    """All shards of the segment that was used longest ago on average; none without shards."""
    if not len(columns):
        return EvictionPlan(np.zeros(0, np.int64), np.zeros(0, np.uint8), 0, is_cut=False)
    numbers, places = np.unique(columns.location >> LOCATION_BITS, return_inverse=True)
    used_s = np.minimum(columns.last_used_s, now_s).astype(np.float64)
    means = np.bincount(places, used_s, len(numbers)) / np.bincount(places, minlength=len(numbers))
    rows = np.flatnonzero(places == int(np.argmin(means)))
    rows = order_rows(columns, rows, now_s=now_s, bucket_s=bucket_s)
    reasons = np.full(len(rows), int(EvictReason.LEAST_USED), np.uint8)
    freed_bytes = int(columns.slot_bytes[rows].sum(dtype=np.int64))
    return EvictionPlan(rows, reasons, freed_bytes, is_cut=False)
