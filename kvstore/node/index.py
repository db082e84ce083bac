"""Key -> location, and back. It has at most one entry a slot, so the target's size bounds it.

Keys stand in the columns of the segments, slot by slot, and a `SlotTable` says where to look. So
keys that were written together are found together: one search for the first, then one comparison of
bytes for those in the slots that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..key import KEY_BYTES
from .segment import ABSENT, LOCATION_BITS, SLOT_MASK, Segment
from .slot_table import NUMBER_BITS, KeyHash, SlotTable, TableCrowded

SMALL_TABLE_KEYS = 1 << 18
"""A table for so many keys is made first, and one for all slots when it is full, which takes some
50 ms: entries lie scattered, so a table takes its whole memory with the first few thousand keys."""
HANDLES_MAX = 1 << (NUMBER_BITS - LOCATION_BITS)
SEARCHES_ONE_BY_ONE = 8
"""After so many searches that found no long run, the keys that are left are sought together."""
MANY_KEYS = 24
"""From so many keys on it is faster to seek them together than one by one."""
CROWDED_MAX = 8
"""Times a table that is too crowded is doubled."""


@dataclass(frozen=True, slots=True)
class TableState:
    """What a table is, apart from the keys: `handles` are its numbers of segments by theirs."""

    seed: int
    keys_max: int
    words: NDArray[np.uint64]
    handles: Mapping[int, int]


Run = tuple[int, int, int]
"""Neighbouring slots that hold keys in the order they were asked for: row of the first key among
those asked for, location of its slot, slots."""


class SlotIndex:
    """Where the shard of each key is. `segments` is the target's, by number, and may grow.

    `slots_max` says how many slots the target can have at most, now. `seed` decides where in the
    table a key is sought; peers should not know it.
    """

    def __init__(
        self, segments: Mapping[int, Segment], *, slots_max: Callable[[], int], seed: int
    ) -> None:
        self._segments = segments
        self._slots_max = slots_max
        self._hash = KeyHash(seed)
        self._count = 0
        self._table = SlotTable(0)
        # The table has no room for a segment's number, so segments have small numbers in it.
        self._handles: dict[int, int] = {}
        self._by_handle: list[Segment | None] = [None]

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) != ABSENT

    # Looking up -----------------------------------------------------------------------------------

    def get(self, key: bytes) -> int:
        """The key's location, or ABSENT."""
        for number in self._table.find(self._hash.one(key)):
            segment = self._by_handle[number >> LOCATION_BITS]
            assert segment is not None
            at = (number & SLOT_MASK) * KEY_BYTES
            if segment.columns.key_bytes[at : at + KEY_BYTES] == key:
                return segment.shape.first_location + (number & SLOT_MASK)
        return ABSENT

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The location of each key, ABSENT where there is none."""
        locations = [ABSENT] * len(keys)
        for row, first, count in self.find_runs(b"".join(keys)):
            locations[row : row + count] = range(first, first + count)
        return locations

    def has_none(self, keys: Sequence[bytes]) -> bool:
        """Whether none of the keys is here."""
        return not self.find_runs(b"".join(keys))

    def contains_each(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether each key is here; shape (len(keys),)."""
        is_here = np.zeros(len(keys), np.bool_)
        for row, _, count in self.find_runs(b"".join(keys)):
            is_here[row : row + count] = True
        return is_here

    def find_runs(self, keys: bytes) -> list[Run]:
        """Where keys are, which stand one after the other in `keys`; rows ascend.

        Keys that are not here are in no run. A run is as long as it can be unless it touches
        another one.
        """
        count = len(keys) // KEY_BYTES
        runs: list[Run] = []
        row = searches = 0
        while row < count:
            if searches >= SEARCHES_ONE_BY_ONE + row // 8 and count - row >= MANY_KEYS:
                words = _as_words(keys, row)
                return runs + self._find_together(keys, row, self._hash.many(words))
            searches += 1
            location = self.get(keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])
            if location == ABSENT:
                row += 1
                continue
            length = self._measure_run(keys, row, count, location)
            runs.append((row, location, length))
            row += length
        return runs

    def _measure_run(self, keys: bytes, row: int, end: int, location: int) -> int:
        """How many keys from `row` on lie in neighbouring slots; that the first does is known."""
        segment, slot = self.resolve(location)
        longest = min(end - row, segment.shape.slot_count - slot)
        if longest == 1 or self._is_run(segment, slot, keys, row, longest):
            return longest
        # Double the step while it fits, then halve it.
        length, step = 1, 1
        while step:
            step = min(step, longest - length)
            if step and self._is_run(segment, slot + length, keys, row + length, step):
                length += step
                step *= 2
            else:
                longest = length + max(step - 1, 0)
                step //= 2
        return length

    @staticmethod
    def _is_run(segment: Segment, slot: int, keys: bytes, row: int, count: int) -> bool:
        """Whether `count` keys are those of the slots from `slot` on, and these are in use."""
        return _has_keys(segment, slot, keys, row, count) and (
            segment.columns.are_indexed(slot, count)
        )

    def _find_together(self, keys: bytes, row: int, hashes: NDArray[np.uint64]) -> list[Run]:
        """`find_runs` for the keys from `row` on, which have these hashes, in arrays."""
        found, is_open = self._table.find_many(hashes)
        runs: list[Run] = []
        doubtful: list[int] = np.flatnonzero(is_open).tolist() if is_open.any() else []
        rows = np.flatnonzero(found)
        if len(rows):
            numbers = found[rows]
            is_next = (rows[1:] == rows[:-1] + 1) & (numbers[1:] == numbers[:-1] + np.uint64(1))
            starts = [0, *(np.flatnonzero(~is_next) + 1).tolist()]
            firsts = zip(rows[starts].tolist(), numbers[starts].tolist(), strict=True)
            for (first, number), (start, end) in zip(
                firsts, pairwise([*starts, len(rows)]), strict=True
            ):
                segment, slot = self._at(number)
                count = end - start
                if _has_keys(segment, slot, keys, row + first, count):
                    runs.append((row + first, segment.shape.first_location + slot, count))
                else:
                    doubtful += range(first, first + count)
        if doubtful:
            runs += self._find_singly(keys, [row + at for at in doubtful])
            runs.sort()
        return runs

    def _find_singly(self, keys: bytes, rows: Sequence[int]) -> list[Run]:
        """What `find_runs` says of the keys at `rows`, each by itself."""
        runs: list[Run] = []
        for row in rows:
            location = self.get(keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])
            if location != ABSENT:
                runs.append((row, location, 1))
        return runs

    # Changing -------------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], segment: Segment, first_slot: int) -> list[int]:
        """Point `keys` to neighbouring slots. Returns the locations that some pointed to before.

        A key may stand in `keys` once.
        """
        joined, count = b"".join(keys), len(keys)
        words = _as_words(joined, 0)
        hashes = self._hash.many(words)
        is_many = count >= MANY_KEYS
        runs = self._find_together(joined, 0, hashes) if is_many else self.find_runs(joined)
        before = self._drop_runs(runs, hashes) if runs else []
        columns = segment.columns
        assert not columns.has_indexed(first_slot, count)
        columns.key_words[first_slot : first_slot + count] = words
        columns.status[first_slot : first_slot + count] = 1
        first = self._handle(segment) << LOCATION_BITS | first_slot
        self._count += count
        is_room = self._count <= self._table.keys_max
        if not is_room or self._table.insert_many(hashes, first) < count:
            # The columns have the keys already.
            self._fill(*self._gather())
        return before

    def drop(self, key: bytes) -> int:
        """Remove the key's entry. Returns the location it pointed to, or ABSENT."""
        location = self.get(key)
        if location != ABSENT:
            segment, slot = self.resolve(location)
            number = self._handle(segment) << LOCATION_BITS | slot
            self._table.remove(self._hash.one(key), number)
            segment.columns.status[slot] = 0
            self._count -= 1
        return location

    def drop_each(self, keys: Sequence[bytes]) -> list[int]:
        """Remove the keys' entries. Returns the location that each pointed to, or ABSENT.

        A key that stands in `keys` again is ABSENT there.
        """
        joined = b"".join(dict.fromkeys(keys))
        runs = self.find_runs(joined)
        if not runs:
            return [ABSENT] * len(keys)
        dropped = self._drop_runs(runs, self._hash.many(_as_words(joined, 0)))
        if runs[0] == (0, dropped[0], len(keys)):
            return dropped
        rows = [row + i for row, _, count in runs for i in range(count)]
        by_key = {
            joined[row * KEY_BYTES : (row + 1) * KEY_BYTES]: location
            for row, location in zip(rows, dropped, strict=True)
        }
        return [by_key.pop(key, ABSENT) for key in keys]

    def _drop_runs(self, runs: Sequence[Run], hashes: NDArray[np.uint64]) -> list[int]:
        """Remove the entries of keys that were found; `hashes` by row. Returns their locations."""
        locations: list[int] = []
        for row, location, count in runs:
            segment, slot = self.resolve(location)
            number = self._handle(segment) << LOCATION_BITS | slot
            numbers = range(number, number + count)
            self._table.remove_many(hashes[row : row + count], numbers)
            segment.columns.status[slot : slot + count] = 0
            locations += range(location, location + count)
        self._count -= len(locations)
        return locations

    def resolve(self, location: int) -> tuple[Segment, int]:
        """Segment and slot of a location."""
        return self._segments[location >> LOCATION_BITS], location & SLOT_MASK

    # All at once ----------------------------------------------------------------------------------

    def rebuild(self) -> list[int]:
        """Make the table anew from the columns, in which each slot with a status of 1 counts.

        Of two slots with one key the one with the higher generation counts. Returns the locations
        of the others, whose status is 0 then.
        """
        hashes, numbers = self._gather()
        losers = self._find_older(hashes, numbers)
        for row in losers:
            segment, slot = self._at(int(numbers[row]))
            segment.columns.status[slot] = 0
        locations = [self._location(int(numbers[row])) for row in losers]
        if losers:
            hashes, numbers = np.delete(hashes, losers), np.delete(numbers, losers)
        self._fill(hashes, numbers)
        return locations

    def export_table(self) -> TableState:
        """The table as it is, for a snapshot. Not a copy."""
        for _, segment in sorted(self._segments.items()):
            self._handle(segment)
        table = self._table
        return TableState(self._hash.seed, table.keys_max, table.entries, self._handles)

    def restore_table(
        self,
        words: Sequence[NDArray[np.uint64]],
        *,
        seed: int,
        keys_max: int,
        handles: Mapping[int, int],
    ) -> None:
        """Take over what `export_table` gave, the words in pieces, together with the columns."""
        self._hash = KeyHash(seed)
        self._table = SlotTable(keys_max)
        at = 0
        for piece in words:
            self._table.entries[at : at + len(piece)] = piece
            at += len(piece)
        assert at == len(self._table.entries)
        self._handles = dict(handles)
        self._by_handle = [None] * (max(handles.values(), default=0) + 1)
        for number, handle in handles.items():
            self._by_handle[handle] = self._segments[number]
        self._count = int(np.count_nonzero(self._table.entries))

    def _gather(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Hash and number of every slot with a status of 1, the segments by their numbers."""
        segments = [segment for _, segment in sorted(self._segments.items())]
        counts = [int(np.count_nonzero(s.columns.status == 1)) for s in segments]
        # In one piece each: pieces by segment would leave the heap full of holes.
        hashes = np.empty(sum(counts), np.uint64)
        numbers = np.empty(sum(counts), np.uint64)
        end = 0
        for segment, count in zip(segments, counts, strict=True):
            start, end = end, end + count
            columns = segment.columns
            slots = np.flatnonzero(columns.status == 1)
            is_full = count == segment.shape.slot_count
            words = columns.key_words if is_full else columns.key_words[slots]
            hashes[start:end] = self._hash.many(words)
            numbers[start:end] = slots
            numbers[start:end] += np.uint64(self._handle(segment) << LOCATION_BITS)
        return hashes, numbers

    def _find_older(self, hashes: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> list[int]:
        """Rows of slots whose key another slot holds in a version that counts instead."""
        ordered = np.sort(hashes)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        older: list[int] = []
        newest: dict[bytes, tuple[int, int]] = {}
        for row in np.flatnonzero(np.isin(hashes, twice)).tolist() if len(twice) else ():
            segment, slot = self._at(int(numbers[row]))
            key = segment.columns.key_at(slot)
            generation = int(segment.columns.generation[slot])
            held = newest.get(key)
            if held is not None and held[0] >= generation:
                older.append(row)
                continue
            if held is not None:
                older.append(held[1])
            newest[key] = generation, row
        return older

    def _fill(self, hashes: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> None:
        self._count = len(numbers)
        keys_max = max(self._slots_max(), self._count)
        if self._count <= SMALL_TABLE_KEYS // 2:
            keys_max = min(keys_max, SMALL_TABLE_KEYS)
        for _ in range(CROWDED_MAX):
            self._table = SlotTable(keys_max)
            try:
                self._table.fill(hashes, numbers)
                return
            except TableCrowded:
                keys_max *= 2
        raise AssertionError("thousands of keys have one hash")

    # Numbers in the table -------------------------------------------------------------------------

    def _handle(self, segment: Segment) -> int:
        """The segment's small number; given to it when it first holds a key."""
        number = segment.shape.number
        handle = self._handles.get(number)
        if handle is None:
            handle = self._free_handle()
            self._handles[number] = handle
            self._by_handle[handle] = segment
        return handle

    def _free_handle(self) -> int:
        """A number that no segment has; those of segments that were removed are given again."""
        for number in [number for number in self._handles if number not in self._segments]:
            handle = self._handles.pop(number)
            self._by_handle[handle] = None
        for handle in range(1, len(self._by_handle)):
            if self._by_handle[handle] is None:
                return handle
        assert len(self._by_handle) < HANDLES_MAX, "more segments than the table can tell apart"
        self._by_handle.append(None)
        return len(self._by_handle) - 1

    def _at(self, number: int) -> tuple[Segment, int]:
        """Segment and slot of a number."""
        segment = self._by_handle[number >> LOCATION_BITS]
        assert segment is not None
        return segment, number & SLOT_MASK

    def _location(self, number: int) -> int:
        segment, slot = self._at(number)
        return segment.shape.first_location + slot


def _as_words(keys: bytes, row: int) -> NDArray[np.uint64]:
    """Joined keys from `row` on as little-endian words, shape (n, 4)."""
    return np.frombuffer(keys, np.uint64, offset=row * KEY_BYTES).reshape(-1, 4)


def _has_keys(segment: Segment, slot: int, keys: bytes, row: int, count: int) -> bool:
    """Whether the keys from `row` on are those in the columns from `slot` on."""
    held = segment.columns.key_bytes[slot * KEY_BYTES : (slot + count) * KEY_BYTES].tobytes()
    return held == keys[row * KEY_BYTES : (row + count) * KEY_BYTES]
