"""Which shards go: a pure decision over columns, vectorised.

Order of victims. First those whose TTL has passed, then the least recently used ones until there
is room enough. Within each: the oldest first, and of equally old ones the deepest in its chain, so
that a block does not go before one that is of no use without it.

*Equally old* means: last used in the same bucket of `bucket_s` seconds. A fetch of a long chain,
or a request that fetches a prompt and saves its answer a little later, uses parents some seconds
before their children; by exact seconds the parents would go first. Only where a use lies across the
border of two buckets a parent may still go before its child, which then is among the next to go:
nothing lies between them but what was used in the same two buckets. The TTL takes whole buckets for
the same reason, and so comes up to `bucket_s` late, never early.

The rows are gone through piece by piece, so that the memory for 10^7 rows is little more than that
for their victims; two passes over the rows find the bucket at which to stop and then the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.wire import EvictReason

from .columns import TargetColumns

BUCKET_S = 60
"""See above. Coarser by far than a request takes, and finer by far than any TTL."""
BUCKETS_PER_SPAN = 128
"""A target that turns over within minutes has shorter buckets: at least so many from its least
recent use until now, or the order within them would be all there is."""
BUCKETS_MAX = 1 << 21
"""What is older than so many buckets counts as equally old: four years of 60 s."""
VICTIMS_MAX = 1 << 22
"""Victims of one plan, so that it has a bound; the next plan goes on. Each takes 9 bytes."""
ROWS_PER_PIECE = 1 << 18
NEVER_S = 0xFFFFFFFF
"""A TTL longer than that does not end before the column of last uses does, in the year 2106."""
_EXPIRED = int(EvictReason.EXPIRED)
_LEAST_USED = int(EvictReason.LEAST_USED)


@dataclass(frozen=True, slots=True)
class Room:
    """What is to be made free: both at least, counting what expires."""

    slots: int = 0
    slot_bytes: int = 0

    def __bool__(self) -> bool:
        return self.slots > 0 or self.slot_bytes > 0


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Victims in the order in which they are to go.

    `rows` (int64) are rows of the columns, `reasons` (uint8) the EvictReason of each. `freed_bytes`
    is what their slots take. `is_cut`: there were more victims than a plan may have.
    """

    rows: NDArray[np.int64]
    reasons: NDArray[np.uint8]
    freed_bytes: int
    is_cut: bool

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRules:
    """What `plan_eviction` obeys. `ttl_s` by class name; a class that is not there has `ttl_s_else`
    seconds."""

    ttl_s: Mapping[str, int]
    ttl_s_else: int
    bucket_s: int = BUCKET_S
    victims_max: int = VICTIMS_MAX

    def ttl_of(self, class_names: tuple[str, ...], number: int) -> int:
        """Seconds that a class is kept, by its number in `class_names`."""
        name = class_names[number] if number < len(class_names) else ""
        return min(self.ttl_s.get(name, self.ttl_s_else), NEVER_S)

    def cutoffs(self, class_names: tuple[str, ...], now_s: int) -> NDArray[np.int64]:
        """For each class number (0 to 255): the first bucket that is *not* expired."""
        ttl_s = np.array([self.ttl_of(class_names, number) for number in range(256)], np.int64)
        return (now_s - ttl_s) // self.bucket_s


def choose_bucket_s(columns: TargetColumns, rules: EvictionRules, *, now_s: int) -> int:
    """Length of a bucket for these rows, 1 to `rules.bucket_s` seconds: shorter where ages, or the
    shortest TTL, are a matter of minutes."""
    oldest_s = int(columns.last_used_s.min()) if len(columns) else now_s
    shortest_ttl_s = min([rules.ttl_s_else, *rules.ttl_s.values()])
    span_s = min(max(now_s - oldest_s, 0), shortest_ttl_s)
    return min(max(span_s // BUCKETS_PER_SPAN, 1), rules.bucket_s)


def order_rows(
    columns: TargetColumns, rows: NDArray[np.int64], *, now_s: int, bucket_s: int, oldest: int = 0
) -> NDArray[np.int64]:
    """`rows` in the order in which they go: oldest bucket first, deepest first in it, then by place
    on the disk. Buckets before `oldest` count as that one."""
    used_s = np.minimum(columns.last_used_s[rows], now_s)
    order = np.maximum(used_s.astype(np.int64) // bucket_s, oldest) << 32
    order |= NEVER_S - columns.block_index[rows].astype(np.int64)
    # Stable: rows stand in the order of the disk, and neighbours are cleared in one call.
    return rows[np.argsort(order, kind="stable")]


def plan_eviction(
    columns: TargetColumns, rules: EvictionRules, *, now_s: int, room: Room
) -> EvictionPlan:
    """The victims of one target: all expired ones, then the least used until `room` is made.

    `now_s`: Unix time; what claims to be used later counts as used now.
    """
    selection = _Selection(columns, rules, now_s)
    expired = selection.choose(
        Room(len(columns), 0), is_expired=True, victims_max=rules.victims_max
    )
    slots_left = max(room.slots - len(expired), 0)
    bytes_left = max(room.slot_bytes - selection.bytes_of(expired), 0)
    victims_left = rules.victims_max - len(expired)
    least_used = np.zeros(0, np.int64)
    # What expired and did not fit the plan is older than all that is least used.
    is_expired_cut = victims_left == 0
    if (slots_left or bytes_left) and not is_expired_cut:
        wanted = Room(slots_left, bytes_left)
        least_used = selection.choose(wanted, is_expired=False, victims_max=victims_left)
    rows = np.concatenate((expired, least_used))
    reasons = np.full(len(rows), _LEAST_USED, np.uint8)
    reasons[: len(expired)] = _EXPIRED
    return EvictionPlan(
        rows, reasons, selection.bytes_of(rows), is_cut=len(rows) >= rules.victims_max
    )


def find_next_expiry_s(columns: TargetColumns, rules: EvictionRules, now_s: int) -> int | None:
    """Unix time at which the first row expires that is not expired at `now_s`, unless it is used
    again; None if there is no such row."""
    cutoffs = rules.cutoffs(columns.class_names, now_s)
    oldest: dict[int, int] = {}
    for piece in _pieces(len(columns)):
        numbers = columns.ttl_class[piece]
        buckets = columns.last_used_s[piece] // rules.bucket_s
        is_kept = buckets >= cutoffs[numbers]
        for number in np.flatnonzero(np.bincount(numbers[is_kept], minlength=1)).tolist():
            bucket = int(buckets[is_kept & (numbers == number)].min())
            oldest[number] = min(oldest.get(number, bucket), bucket)
    return min(
        (
            (bucket + 1) * rules.bucket_s + rules.ttl_of(columns.class_names, number)
            for number, bucket in oldest.items()
        ),
        default=None,
    )


class _Selection:
    """Buckets of the rows of one target at one moment."""

    def __init__(self, columns: TargetColumns, rules: EvictionRules, now_s: int) -> None:
        self._columns = columns
        self._bucket_s = rules.bucket_s
        self._newest = now_s // rules.bucket_s
        self._now_s = now_s
        used_s = int(columns.last_used_s.min()) if len(columns) else now_s
        oldest = min(used_s, now_s) // rules.bucket_s
        self._oldest = max(self._newest - BUCKETS_MAX + 1, oldest)
        self._cutoffs = rules.cutoffs(columns.class_names, now_s)

    def bytes_of(self, rows: NDArray[np.int64]) -> int:
        return int(self._columns.slot_bytes[rows].sum(dtype=np.int64))

    def choose(self, room: Room, *, is_expired: bool, victims_max: int) -> NDArray[np.int64]:
        """Rows that make `room`, in order, of those that are expired or of those that are not."""
        last, whole = self._find_last_bucket(room, is_expired, victims_max)
        rows = self._rows_until(last, is_expired)
        if not len(rows):
            return rows
        rows = self._sort(rows)
        if not whole:
            rows = rows[: self._count_needed(rows, room, victims_max)]
        return rows

    def _find_last_bucket(self, room: Room, is_expired: bool, victims_max: int) -> tuple[int, bool]:
        """The bucket in which enough is reached, counted from the oldest; whether all may go."""
        slots = np.zeros(self._newest - self._oldest + 1, np.int64)
        sizes = np.zeros(len(slots), np.float64)
        for piece in _pieces(len(self._columns)):
            buckets, is_meant = self._buckets(piece, is_expired)
            chosen = buckets[is_meant]
            if not len(chosen):
                continue
            first = int(chosen.min())
            counts = np.bincount(chosen - first)
            slots[first : first + len(counts)] += counts
            weights = np.bincount(chosen - first, self._columns.slot_bytes[piece][is_meant])
            sizes[first : first + len(counts)] += weights
        np.cumsum(slots, out=slots)
        np.cumsum(sizes, out=sizes)
        total = int(slots[-1])
        enough = max(
            int(np.searchsorted(slots, min(room.slots, total))),
            int(np.searchsorted(sizes, min(float(room.slot_bytes), sizes[-1]))),
        )
        full = int(np.searchsorted(slots, victims_max)) if total > victims_max else len(slots)
        last = min(enough, full, len(slots) - 1)
        return last, room.slots >= total <= victims_max

    def _rows_until(self, last: int, is_expired: bool) -> NDArray[np.int64]:
        found = []
        for piece in _pieces(len(self._columns)):
            buckets, is_meant = self._buckets(piece, is_expired)
            is_meant &= buckets <= last
            rows = np.flatnonzero(is_meant)
            if len(rows):
                rows += piece.start
                found.append(rows)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _sort(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return order_rows(
            self._columns, rows, now_s=self._now_s, bucket_s=self._bucket_s, oldest=self._oldest
        )

    def _count_needed(self, rows: NDArray[np.int64], room: Room, victims_max: int) -> int:
        """How many of the ordered `rows` make `room`."""
        sizes = np.cumsum(self._columns.slot_bytes[rows], dtype=np.int64)
        by_size = int(np.searchsorted(sizes, room.slot_bytes)) + 1 if room.slot_bytes else 0
        return min(max(room.slots, by_size), len(rows), victims_max)

    def _buckets(
        self, piece: slice, is_expired: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Bucket of each row of a piece, counted from the oldest; which of them are meant."""
        buckets = np.minimum(self._columns.last_used_s[piece], self._now_s).astype(np.int64)
        buckets //= self._bucket_s
        is_meant = buckets < self._cutoffs[self._columns.ttl_class[piece]]
        if not is_expired:
            np.logical_not(is_meant, out=is_meant)
        np.maximum(buckets, self._oldest, out=buckets)
        buckets -= self._oldest
        return buckets, is_meant


def _pieces(rows: int) -> Iterator[slice]:
    for first in range(0, rows, ROWS_PER_PIECE):
        yield slice(first, min(first + ROWS_PER_PIECE, rows))
