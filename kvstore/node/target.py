"""A storage target: what it holds, and every change to that.

This is the state that belongs to the event loop; nothing here waits for the disk. `disk_work` has
the blocking parts, the operations put both together, and `target_life` opens and closes a target.
Nothing is evicted here by age or room: `evict_operation` takes out what a worker has chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..event_log import short_key
from ..wire import KEYS_PER_REQUEST_MAX, WriteOutcome
from .access_times import AccessTimes
from .clock import Clock
from .cooldown import Cooldown, RateLimit
from .disk import means_full
from .ghosts import Ghosts, MissCounts, MissReason
from .index import SlotIndex
from .resting import RestingSlots
from .segment import ABSENT, LOCATION_BITS, SLOT_MASK, Segment
from .slot import HeaderScratch, key_words
from .space import SlotRun, SlotSpace
from .statistics import OTHER_NAME, ClassUsage, Evictions, TargetStatistics
from .target_folder import TargetFolder
from .versions import ShardVersion, choose_version
from .waiting import Turn

log = logging.getLogger(__name__)

SLOW_WRITES_S = 10.0
RESTING_SHARE = 16
"""One slot in so many may wait for sendings to end before it is used again."""
DECISECOND_NS = 100_000_000
TTL_CLASSES_MAX = 255
"""Further TTL classes share the last number; their names stand in the slot headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """How a target uses its disk."""

    segment_bytes: int = 256 << 20
    """Length of a new segment file; less for a small target, more for slots that are larger."""
    slots_max: int = 20_000_000
    """Slots of all segments together; each costs about 90 bytes of memory once it is used."""
    refusal_s: float = 5.0
    """After the disk refused a write, for so long no other is tried."""
    reports_per_s: int = 256
    """Reported shards that are read and checked in a second, at most."""
    snapshot_shards_min: int = 100_000
    """With fewer, no snapshot is written: reading the headers takes less time than pyarrow does."""
    hash_seed: int = 0
    """Where in the index keys are sought follows from it; peers should not know it."""


class Target:
    """The shards of one folder. Made by `target_life.open_target`."""

    def __init__(
        self,
        folder: TargetFolder,
        *,
        capacity_bytes: int,
        settings: TargetSettings,
        clock: Clock,
    ) -> None:
        self.folder = folder
        self.name = folder.identity.name
        self.clock = clock
        self.statistics = TargetStatistics()
        self.classes = ClassUsage()
        self.evictions = Evictions()
        self.ghosts = Ghosts()
        self.misses = MissCounts(self.ghosts)
        self.space = SlotSpace(
            capacity_bytes=capacity_bytes,
            segment_bytes=settings.segment_bytes,
            slots_max=settings.slots_max,
        )
        self.snapshot_shards_min = settings.snapshot_shards_min
        self.access_times = AccessTimes(folder.path)
        self.index = SlotIndex(
            self.space.segments, slots_max=self.space.slots_to_index, seed=settings.hash_seed
        )
        self.writing = Turn()
        """Held from choosing slots to the index entry, so that one write at a time is under way."""
        self.write_refusal: Cooldown[WriteOutcome] = Cooldown(clock, settings.refusal_s)
        """Nothing is written: the disk refused a write."""
        self.growth_refusal: Cooldown[WriteOutcome] = Cooldown(clock, settings.refusal_s)
        """No segment is made: the disk refused one. Slots that are there can be written."""
        self.slow_writes: Cooldown[bool] = Cooldown(clock, SLOW_WRITES_S)
        """The device does not keep up: writing may hold up whoever does it."""
        self.reports = RateLimit(clock, settings.reports_per_s)
        self.resting = RestingSlots()
        """Freed slots of which bytes may still be on their way to a peer."""
        self.is_lost = False
        """The folder is not in its place any more: nothing that is written would be found again."""
        self.used_bytes = 0
        self.quarantined: set[int] = set()
        """Locations of slots that are out of use until the process ends."""
        self._last_generation = 0
        self._ttl_classes: dict[bytes, int] = {}
        self._has_unnumbered = False

    @cached_property
    def header_scratch(self) -> HeaderScratch:
        """For the write whose turn it is; made with the first one."""
        return HeaderScratch(KEYS_PER_REQUEST_MAX)

    # Reading --------------------------------------------------------------------------------------

    def generation(self, location: int) -> int:
        """The generation of the shard at a location that is in the index."""
        segment, slot = self.index.resolve(location)
        return int(segment.columns.generation[slot])

    def key_at(self, location: int) -> bytes | None:
        """The key of the shard at a location, or None if the index points to none there."""
        segment = self.space.segments.get(location >> LOCATION_BITS)
        slot = location & SLOT_MASK
        if segment is None or slot >= segment.shape.slot_count:
            return None
        return segment.columns.key_at(slot) if segment.columns.status[slot] == 1 else None

    def slots_possible(self) -> int:
        """Slots that the target can have at most, with the smallest slots that it has now."""
        return self.space.slots_possible()

    @property
    def ttl_class_names(self) -> list[str]:
        """Names of the TTL classes by their numbers in the columns.

        The last of 256 stands for all that came when there were no numbers left.
        """
        names = [name.decode("latin-1") for name in self._ttl_classes]
        return names if len(names) < TTL_CLASSES_MAX else [*names, OTHER_NAME]

    def holds(self, key: bytes, location: int, generation: int) -> bool:
        """Whether the key still points to that shard, so that its slot was not reused."""
        return self.index.get(key) == location and self.generation(location) == generation

    def drop_damaged(self, key: bytes, location: int, generation: int) -> bool:
        """Take a shard that proved bad out of the index and its slot out of use.

        False, and nothing is done, if the key does not point to that shard any more: then the slot
        was reused in the meantime and nothing is damaged.
        """
        if not self.holds(key, location, generation):
            self.statistics.read_races += 1
            return False
        self.unlink([key])
        self.quarantined.add(location)
        self.ghosts.remember([key], MissReason.REJECTED)
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

    def write_refusal_now(self) -> WriteOutcome | None:
        """What to answer to every write, if nothing is to be written now."""
        return WriteOutcome.FAILED if self.is_lost else self.write_refusal.current()

    def note_write_error(self, error: OSError) -> WriteOutcome:
        """The disk refused a write: count it, stop writing for a while, and say what to answer."""
        outcome = self._note_refusal("write", error)
        self.write_refusal.begin(outcome)
        return outcome

    def note_growth_error(self, error: OSError) -> None:
        """The disk refused a new segment: count it, and ask for none for a while."""
        self.growth_refusal.begin(self._note_refusal("segment", error))

    def _note_refusal(self, what: str, error: OSError) -> WriteOutcome:
        outcome = WriteOutcome.FULL if means_full(error) else WriteOutcome.FAILED
        if outcome is WriteOutcome.FAILED:
            self.statistics.io_errors += 1
        log.error("disk refused a %s target=%s: %s", what, self.name, error)
        return outcome

    def judge(self, keys: Sequence[bytes], block_xxh3: Sequence[int], shard: int) -> list[int]:
        """What is to become of each offered shard: a WriteOutcome, STORED for one to be written."""
        now_ns = self.clock.unix_ns()
        outcomes: list[int] = [WriteOutcome.STORED] * len(keys)
        if self.index.has_none(keys):
            return outcomes
        for row, location in enumerate(self.index.find(keys)):
            if location != ABSENT:
                offered = ShardVersion(block_xxh3[row], shard)
                outcomes[row] = self._judge_one(location, offered, now_ns)
        return outcomes

    def _judge_one(self, location: int, offered: ShardVersion, now_ns: int) -> WriteOutcome:
        segment, slot = self.index.resolve(location)
        columns = segment.columns
        held = ShardVersion(int(columns.block_xxh3[slot]), int(columns.shard[slot]))
        age_ds = (now_ns // DECISECOND_NS - int(columns.created_ds[slot])) & 0xFFFFFFFF
        created_ns = now_ns - age_ds * DECISECOND_NS
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
        """Enter the shards of a run that is on the disk; `headers` and `keys` slot by slot.

        Returns the locations of shards that were replaced; the caller is to free them.
        """
        slots = slice(run.first_slot, run.first_slot + run.count)
        # One request, one TTL class.
        ttl_class = self._ttl_class_number(headers["ttl_class"][0].item())
        self._fill_columns(run.segment, slots, headers, ttl_class)
        self.statistics.shards_written += run.count
        self.statistics.written_bytes += run.count * run.segment.shape.geometry.payload_bytes
        return self._enter(keys, run.segment, run.first_slot)

    def load(self, segment: Segment, slots: NDArray[np.int64], headers: NDArray[Any]) -> None:
        """Note shards that an earlier process left; `headers` (dtype SLOT_HEADER) slot by slot.

        They are here after `enter_loaded`.
        """
        if not len(slots):
            return
        # Asking which names there are takes longer than all else here, and as a rule there is one.
        names = headers["ttl_class"]
        ttl_class: int | NDArray[np.uint8] = self._ttl_class_number(names[0].item())
        if not (names == names[0]).all():
            different, rows = np.unique(names, return_inverse=True)
            numbers = [self._ttl_class_number(name) for name in different.tolist()]
            ttl_class = np.array(numbers, np.uint8)[rows]
        first, count = int(slots[0]), len(slots)
        where = slice(first, first + count) if slots[-1] - first == count - 1 else slots
        self._fill_columns(segment, where, headers, ttl_class)
        columns = segment.columns
        columns.key_words[where] = key_words(headers)
        columns.status[where] = 1
        self._last_generation = max(self._last_generation, int(headers["generation"].max()))

    def enter_loaded(self) -> list[int]:
        """Enter in the index whatever the columns of the segments have; once, at the start.

        Returns the locations of shards that a newer one of the same key has replaced; the caller is
        to free them.
        """
        replaced = self.index.rebuild()
        self.note_entered()
        return replaced

    def restore(self, *, last_generation: int, ttl_classes: Sequence[str]) -> None:
        """Go on with the numbers that an earlier process gave; `ttl_classes` by number."""
        self._last_generation = last_generation
        for name in ttl_classes:
            self._ttl_class_number(name.encode("latin-1"))

    @property
    def last_generation(self) -> int:
        """The largest generation that was given."""
        return self._last_generation

    def note_entered(self) -> None:
        """Count what the columns say is in the index; once, at the start."""
        for segment in self.space.segments.values():
            numbers = segment.columns.ttl_class[segment.columns.status == 1]
            if len(numbers):
                slot_bytes = segment.shape.geometry.slot_bytes
                self.used_bytes += len(numbers) * slot_bytes
                self.classes.enter(numbers, slot_bytes)

    def _enter(self, keys: Sequence[bytes], segment: Segment, first_slot: int) -> list[int]:
        """Point keys to neighbouring slots. Returns the locations that some pointed to before."""
        before = self.index.put(keys, segment, first_slot)
        slot_bytes = segment.shape.geometry.slot_bytes
        self.used_bytes += len(keys) * slot_bytes
        numbers = segment.columns.ttl_class[first_slot : first_slot + len(keys)]
        self.classes.enter(numbers, slot_bytes)
        for location in before:
            self._note_left(location)
        return before

    def _note_left(self, location: int) -> None:
        """The shard at a location is out of the index; its columns still tell what it was."""
        segment, slot = self.index.resolve(location)
        slot_bytes = segment.shape.geometry.slot_bytes
        self.used_bytes -= slot_bytes
        self.classes.leave(int(segment.columns.ttl_class[slot]), slot_bytes)

    def _fill_columns(
        self,
        segment: Segment,
        slots: slice | NDArray[np.int64],
        headers: NDArray[Any],
        ttl_class: int | NDArray[np.uint8],
    ) -> None:
        """Note what the slots' headers say (dtype SLOT_HEADER, slot by slot)."""
        columns = segment.columns
        parts = columns.parts
        # Before the generation: `access_times` copies both meanwhile.
        columns.last_used_s[slots] = headers["created_ns"] // np.uint64(1_000_000_000)
        for field in ("shard", "payload_bytes", "generation", "payload_xxh3", "block_xxh3"):
            parts[field][slots] = headers[field]
        columns.created_ds[slots] = headers["created_ns"] // np.uint64(DECISECOND_NS)
        columns.block_index[slots] = headers["block_index"]
        columns.ttl_class[slots] = ttl_class

    def can_number_class(self, name: bytes) -> bool:
        """Whether a TTL class has a number of its own, or would get one."""
        return name in self._ttl_classes or len(self._ttl_classes) < TTL_CLASSES_MAX

    def _ttl_class_number(self, name: bytes) -> int:
        number = self._ttl_classes.get(name)
        if number is None:
            number = min(len(self._ttl_classes), TTL_CLASSES_MAX)
            if number < TTL_CLASSES_MAX:
                self._ttl_classes[name] = number
            elif not self._has_unnumbered:
                self._has_unnumbered = True
                text = "more than %d TTL classes target=%s: the further ones, as %r, are kept as %r"
                log.warning(text, TTL_CLASSES_MAX, self.name, name.decode("latin-1"), OTHER_NAME)
        return number

    # Forgetting -----------------------------------------------------------------------------------

    def unlink(self, keys: Iterable[bytes]) -> list[int]:
        """Take keys out of the index. Returns where each pointed to, or ABSENT.

        The slots stay in use until the caller has freed them.
        """
        locations = self.index.drop_each(list(keys))
        for location in locations:
            if location != ABSENT:
                self._note_left(location)
        return locations

    def release_runs(self, cleared: Iterable[SlotRun], failed: Iterable[SlotRun]) -> None:
        """Make cleared slots free; take those whose header could not be cleared out of use."""
        self._give(self.resting.rest(list(cleared), self.space.slot_count // RESTING_SHARE))
        for run in failed:
            self.statistics.io_errors += 1
            self.quarantined.update(run.locations)

    def end_sending(self, phase: int) -> None:
        """Bytes of slots, sent since `resting.begin_sending`, have all left."""
        self._give(self.resting.end_sending(phase))

    def _give(self, runs: Iterable[SlotRun]) -> None:
        for run in runs:
            if self.quarantined.isdisjoint(run.locations):
                self.space.give(run.segment, run.first_slot, run.count)
                continue
            for location in run.locations:
                if location not in self.quarantined:
                    self.space.give(*self.index.resolve(location))

    # Description ----------------------------------------------------------------------------------

    def take_dirty(self) -> list[Segment]:
        """Segments written since the last call, to be synced."""
        dirty = [segment for segment in self.space.segments.values() if segment.is_dirty]
        for segment in dirty:
            segment.is_dirty = False
        return dirty

    def note_place(self, problem: str | None) -> None:
        """What `TargetFolder.find_problem` found; logged when it changes."""
        if problem is not None and not self.is_lost:
            log.error("target lost name=%s path=%s: %s", self.name, self.folder.path, problem)
        elif problem is None and self.is_lost:
            log.info("target is back name=%s path=%s", self.name, self.folder.path)
        self.is_lost = problem is not None

    def describe(self) -> dict[str, Any]:
        """What STAT shows of this target; see `node.describe_node`."""
        counters = self.statistics
        return {
            "name": self.name,
            "blocks": len(self.index),
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.space.capacity_bytes,
            "segments": len(self.space.segments),
            "segment_bytes": self.space.segment_bytes_wanted,
            "quarantined": len(self.quarantined),
            "is_lost": self.is_lost,
            **self.space.describe(),
            "slots_total": self.slots_possible(),
            "slots_used": len(self.index),
            "ttl_classes": self.ttl_class_names,
            **self.classes.describe(self.ttl_class_names),
            **self.evictions.describe(),
            "misses_by_reason": self.misses.describe(),
            **{name: getattr(counters, name) for name in counters.__slots__},
        }
