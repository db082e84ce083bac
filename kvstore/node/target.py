"""A storage target: what it holds, and every change to that.

This is the state that belongs to the event loop. Nothing here waits for the disk, except `open_target`
and `Target.close`, which run before and after serving: `disk_work` has the blocking parts and
`operations` puts both together. Evicting by age or room is not done here; it needs `index`, the
columns of the segments and `unlink`, then `disk_work.clear_slots`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import TargetDamaged, TargetError
from ..wire import WriteOutcome
from .clock import Clock
from .disk import Disk, means_full
from .event_log import short_key
from .index import ABSENT, SlotIndex
from .recovery import scan_segment
from .segment import (
    LOCATION_BITS,
    Segment,
    TargetIdentity,
    find_segment_files,
    open_segment,
)
from .slot import SlotGeometry
from .space import SlotRun, SlotSpace
from .statistics import TargetStatistics
from .target_folder import TargetFolder, claim_folder
from .versions import ShardVersion, choose_version
from .waiting import Turn

log = logging.getLogger(__name__)

TTL_CLASSES_MAX = 255
"""Further TTL classes share the last number; their names stand in the slot headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """How a target uses its disk."""

    segment_bytes: int = 256 << 20
    """Length of a new segment file; less for a small target or large slots."""
    slots_max: int = 20_000_000
    """Slots of all segments together; each costs about 250 bytes of memory once it is used."""
    refusal_s: float = 5.0
    """After the disk refused a write, for so long no other is tried."""


class Target:
    """The shards of one folder. Made by `open_target`."""

    def __init__(
        self,
        folder: TargetFolder,
        *,
        number: int,
        capacity_bytes: int,
        settings: TargetSettings,
        disk: Disk,
        clock: Clock,
    ) -> None:
        self.folder = folder
        self.name = folder.identity.name
        self.number = number
        self.settings = settings
        self.disk = disk
        self.clock = clock
        self.statistics = TargetStatistics()
        self.space = SlotSpace(
            capacity_bytes=capacity_bytes,
            segment_bytes=settings.segment_bytes,
            slots_max=settings.slots_max,
        )
        self.index = SlotIndex(self.space.segments)
        self.writing = Turn()
        """Held from choosing slots to the index entry, so that one write at a time is under way."""
        self.used_bytes = 0
        self.quarantined: set[int] = set()
        self._last_generation = 0
        self._ttl_classes: dict[bytes, int] = {}
        self._refusal = WriteOutcome.FULL
        self._refusal_until_s = float("-inf")

    # Reading --------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], shard_bytes: int) -> NDArray[np.int64]:
        """Locations of the keys' shards, ABSENT for none of this length; shape (len(keys),)."""
        locations = self.index.find(keys)
        numbers = np.unique(locations >> LOCATION_BITS)
        for number in numbers[numbers >= 0].tolist():
            if self.space.segments[number].shape.geometry.payload_bytes != shard_bytes:
                locations[locations >> LOCATION_BITS == number] = ABSENT
        return locations

    def drop_damaged(self, key: bytes, location: int) -> bool:
        """Take a shard that proved bad out of the index and its slot out of use.

        False, and nothing is done, if the key does not point there any more: then the slot was
        reused in the meantime and nothing is damaged.
        """
        if self.index.get(key) != location:
            self.statistics.read_races += 1
            return False
        self._unlink_one(key)
        self.quarantined.add(location)
        self.statistics.rejected_shards += 1
        segment, slot = self.index.resolve(location)
        log.error(
            "damaged shard target=%s key=%s file=%s slot=%d",
            self.name,
            short_key(key),
            segment.path.name,
            slot,
        )
        return True

    # Writing --------------------------------------------------------------------------------------

    def refusal(self) -> WriteOutcome | None:
        """FULL or FAILED while the disk is left in peace after it refused a write."""
        return self._refusal if self.clock.monotonic_s() < self._refusal_until_s else None

    def note_write_error(self, error: OSError) -> WriteOutcome:
        """Count a failed write, begin the time without writes, and say what to answer."""
        self._refusal = WriteOutcome.FULL if means_full(error) else WriteOutcome.FAILED
        self._refusal_until_s = self.clock.monotonic_s() + self.settings.refusal_s
        if self._refusal is WriteOutcome.FAILED:
            self.statistics.io_errors += 1
        log.error(
            "write refused by the disk target=%s outcome=%s: %s",
            self.name,
            self._refusal.name,
            error,
        )
        return self._refusal

    def judge(self, keys: Sequence[bytes], block_xxh3: Sequence[int], shard: int) -> list[int]:
        """What is to become of each offered shard: a WriteOutcome, STORED for those to be written."""
        now_ns = self.clock.unix_ns()
        return [
            self._judge_one(key, ShardVersion(version, shard), now_ns)
            for key, version in zip(keys, block_xxh3, strict=True)
        ]

    def _judge_one(self, key: bytes, offered: ShardVersion, now_ns: int) -> int:
        location = self.index.get(key)
        if location == ABSENT:
            return WriteOutcome.STORED
        segment, slot = self.index.resolve(location)
        columns = segment.columns
        held = ShardVersion(int(columns.block_xxh3[slot]), int(columns.shard[slot]))
        created_ns = int(columns.created_ns[slot])
        return choose_version(held, offered, held_created_ns=created_ns, now_ns=now_ns)

    def next_generations(self, count: int) -> NDArray[np.uint64]:
        """`count` numbers, each larger than every generation this target ever gave.

        They follow the clock where it is ahead, so that a number given before a crash, for a shard
        that was lost in it, is not given to another shard.
        """
        first = max(self._last_generation + 1, self.clock.unix_ns())
        self._last_generation = first + count - 1
        return np.arange(first, first + count, dtype=np.uint64)

    def commit(self, run: SlotRun, headers: NDArray[Any], keys: Sequence[bytes]) -> list[int]:
        """Enter the shards of a run that is on the disk; `headers` and `keys` row by row.

        Returns the locations of shards that were replaced. They are the caller's to clear.
        """
        segment, slots = run.segment, slice(run.first_slot, run.first_slot + run.count)
        self._fill_columns(segment, slots, headers)
        replaced = []
        for slot, key in enumerate(keys, run.first_slot):
            before = self.index.put(key, segment, slot)
            if before != ABSENT:
                replaced.append(before)
                self.used_bytes -= self._slot_bytes(before)
        self.used_bytes += run.count * segment.shape.geometry.slot_bytes
        return replaced

    def _fill_columns(
        self, segment: Segment, slots: slice | NDArray[np.int64], headers: NDArray[Any]
    ) -> None:
        columns = segment.columns
        columns.generation[slots] = headers["generation"]
        columns.created_ns[slots] = headers["created_ns"]
        columns.block_xxh3[slots] = headers["block_xxh3"]
        columns.block_index[slots] = headers["block_index"]
        columns.shard[slots] = headers["shard"]
        columns.last_used_s[slots] = headers["created_ns"] // 1_000_000_000
        columns.ttl_class[slots] = [
            self._ttl_class_number(name) for name in headers["ttl_class"].tolist()
        ]

    def _ttl_class_number(self, name: bytes) -> int:
        number = self._ttl_classes.get(name)
        if number is None:
            number = min(len(self._ttl_classes), TTL_CLASSES_MAX)
            if number < TTL_CLASSES_MAX:
                self._ttl_classes[name] = number
        return number

    # Forgetting -----------------------------------------------------------------------------------

    def unlink(self, keys: Iterable[bytes]) -> list[int]:
        """Take keys out of the index. Returns the locations of their slots, to be cleared."""
        locations = [self._unlink_one(key) for key in keys]
        return [location for location in locations if location != ABSENT]

    def _unlink_one(self, key: bytes) -> int:
        location = self.index.drop(key)
        if location != ABSENT:
            self.used_bytes -= self._slot_bytes(location)
        return location

    def release_slots(self, cleared: Iterable[int], failed: Iterable[int]) -> None:
        """Make cleared slots free; keep those whose header could not be cleared out of use."""
        for location in cleared:
            if location not in self.quarantined:
                segment, slot = self.index.resolve(location)
                self.space.give(segment, slot)
        for location in failed:
            self.statistics.io_errors += 1
            self.quarantined.add(location)

    def _slot_bytes(self, location: int) -> int:
        segment, _ = self.index.resolve(location)
        return segment.shape.geometry.slot_bytes

    # Life -----------------------------------------------------------------------------------------

    def take_dirty(self) -> list[Segment]:
        """Segments written since the last call, to be synced."""
        dirty = [segment for segment in self.space.segments.values() if segment.is_dirty]
        for segment in dirty:
            segment.is_dirty = False
        return dirty

    def describe(self) -> dict[str, Any]:
        """What STAT shows of this target; see `operations.describe_node`."""
        counters = self.statistics
        return {
            "name": self.name,
            "blocks": len(self.index),
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.space.capacity_bytes,
            "segments": len(self.space.segments),
            "quarantined": len(self.quarantined),
            **{name: getattr(counters, name) for name in counters.__slots__},
        }

    def shards_by_ttl_class(self) -> dict[str, int]:
        """How many shards of each TTL class are held; looks at every used slot."""
        names = {number: name.decode() for name, number in self._ttl_classes.items()}
        found: Counter[str] = Counter()
        for segment in self.space.segments.values():
            is_used = np.array([key is not None for key in segment.columns.keys], np.bool_)
            counts = np.bincount(segment.columns.ttl_class[is_used])
            for number in np.flatnonzero(counts).tolist():
                found[names.get(number, "other")] += int(counts[number])
        return dict(found)

    def close(self) -> None:
        """Put everything on the disk and give the folder back. Raises OSError if that fails."""
        try:
            for segment in self.take_dirty():
                self.disk.sync(segment.descriptor)
        finally:
            for segment in self.space.segments.values():
                self.disk.close(segment.descriptor)
            self.folder.release()

    # Start ----------------------------------------------------------------------------------------

    def load(self, segment: Segment) -> list[int]:
        """Enter what a segment on the disk holds; blocks. Returns older shards of a known key."""
        losers: list[int] = []
        is_free = np.ones(segment.shape.slot_count, np.bool_)
        self.space.add(segment, [])
        for found in scan_segment(self.disk, segment):
            is_free[found.slots] = False
            is_free[list(found.unreadable)] = False
            for slot in found.unreadable:
                self.quarantined.add(segment.shape.first_location + slot)
            self._fill_columns(segment, found.slots, found.headers)
            losers += self._load_keys(segment, found.slots, found.headers)
        self._free_runs(segment, is_free)
        return losers

    def _load_keys(
        self, segment: Segment, slots: NDArray[np.int64], headers: NDArray[Any]
    ) -> list[int]:
        losers = []
        slot_bytes = segment.shape.geometry.slot_bytes
        rows = zip(
            slots.tolist(), headers["key"].tolist(), headers["generation"].tolist(), strict=True
        )
        for slot, key, generation in rows:
            self._last_generation = max(self._last_generation, generation)
            before = self.index.get(key)
            if before != ABSENT:
                held, held_slot = self.index.resolve(before)
                if int(held.columns.generation[held_slot]) >= generation:
                    losers.append(segment.shape.first_location + slot)
                    continue
                losers.append(before)
                self.used_bytes -= held.shape.geometry.slot_bytes
            self.index.put(key, segment, slot)
            self.used_bytes += slot_bytes
        return losers

    def _free_runs(self, segment: Segment, is_free: NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_free, [False])))).tolist()
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            self.space.give(segment, first, last - first)
