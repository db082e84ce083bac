"""A hash table from keys to numbers in 8 bytes an entry, as one array of words.

Open addressing with linear probing. A word is 0 where nothing is, else

    63        52 51        40 39                    0
    | home mod 4096 | fingerprint | number, not 0   |

where `home` is the word at which the search for a key begins. With its lowest bits at hand an entry
can be moved to a word before it without asking for its key, so removing leaves no gravestones, and
nothing ever has to be cleaned up. The table does not know the keys: two of them may have all the
bits that it keeps in common, and whoever asks compares.

A dict of 32-byte keys takes about 200 bytes a key more; decision 0014 has the figures.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..key import KEY_BYTES

NUMBER_BITS = 40
NUMBER_MASK = (1 << NUMBER_BITS) - 1
TAG_BITS = 64 - NUMBER_BITS
DISTANCE_MAX = 4095
"""How far from its home an entry may lie; 12 bits of the home tell it."""
WORDS, KEYS = 8, 5
"""So many words for so many keys, at most: a key that is not there is ruled out after 4 words."""
WINDOW = 24
"""Words that a search of many keys looks at together; they leave less than one key in a hundred
undecided, and cost as much as three or four cache lines do anyhow."""

_KEY_WORDS = struct.Struct("<4Q")
_MASK_64 = (1 << 64) - 1
_MASK_12 = 4095
_MIX = 0x9E3779B97F4A7C15
assert _KEY_WORDS.size == KEY_BYTES


class TableCrowded(Exception):
    """Too many entries want the same words; a larger table has to take their place."""


class KeyHash:
    """Hashes keys to 64 bits: the sum of their words times secret odd numbers, mixed once more.

    Multiply-shift hashing (Dietzfelbinger and others, 1997): whoever does not know the numbers
    cannot choose keys that meet in one place. The same function over arrays and for one key.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        generator = np.random.Generator(np.random.PCG64(seed))
        odd = generator.integers(0, 1 << 64, 4, np.uint64) | np.uint64(1)
        self._factors = odd
        self._factor_numbers: list[int] = odd.tolist()

    def one(self, key: bytes | memoryview) -> int:
        """The hash of one key of 32 bytes."""
        a, b, c, d = _KEY_WORDS.unpack(key)
        e, f, g, h = self._factor_numbers
        total = (a * e + b * f + c * g + d * h) & _MASK_64
        mixed: int = ((total ^ total >> 32) * _MIX) & _MASK_64
        return mixed

    def many(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The hashes of keys as little-endian words, shape (n, 4); uint64, shape (n,)."""
        total: NDArray[np.uint64] = words @ self._factors
        total ^= total >> np.uint64(32)
        total *= np.uint64(_MIX)
        return total


def table_words(keys_max: int) -> int:
    """Words of a table with room for so many keys."""
    return _homes(keys_max) + DISTANCE_MAX + 1 + WINDOW


def _homes(keys_max: int) -> int:
    return max(keys_max * WORDS // KEYS, 16)


class SlotTable:
    """Numbers by the hash of their key. Has room for `keys_max` of them."""

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        self.homes = _homes(keys_max)
        # Zeroed memory that nobody wrote takes no room. The end catches what the last homes spill.
        self.entries = np.zeros(table_words(keys_max), np.uint64)
        self._windows = np.lib.stride_tricks.sliding_window_view(self.entries, WINDOW)
        self.words = self.entries.data
        """`entries` as Python ints, for those who walk a cluster by themselves."""

    def place(self, key_hash: int) -> tuple[int, int]:
        """Home of a key, and the tag that its word has above its number."""
        home = (key_hash >> 32) * self.homes >> 32
        return home, (home & _MASK_12) << 12 | (key_hash >> 20 & _MASK_12)

    def find(self, key_hash: int) -> list[int]:
        """Numbers that may be the key's; as a rule none or one."""
        home, tag = self.place(key_hash)
        words = self.words
        found = []
        while word := words[home]:
            if word >> NUMBER_BITS == tag:
                found.append(word & NUMBER_MASK)
            home += 1
        return found

    def find_many(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """For each hash the first number that may be its key's, or 0; and where that is not sure.

        Where it is not sure the first words of the search decided nothing; ask `find`.
        """
        homes, tags = self._place_many(hashes)
        windows = self._windows[homes]
        is_end = windows >> np.uint64(NUMBER_BITS) == tags[:, None]
        is_end |= windows == 0
        rows = np.arange(len(hashes))
        ends = is_end.argmax(axis=1)
        found = windows[rows, ends] & np.uint64(NUMBER_MASK)
        is_open = ~is_end[rows, ends]
        found[is_open] = 0
        return found, is_open

    def insert(self, key_hash: int, number: int) -> None:
        """Add an entry; the key must have none. Raises TableCrowded, and changes nothing."""
        assert 0 < number <= NUMBER_MASK
        home, tag = self.place(key_hash)
        self._insert(home, tag << NUMBER_BITS | number)

    def insert_many(self, hashes: NDArray[np.uint64], first_number: int) -> int:
        """Add entries with numbers that count up from the first one; returns how many it took.

        Fewer than all if the table is too crowded for the next one.
        """
        count = len(hashes)
        homes, tags = self._place_many(hashes)
        tags <<= np.uint64(NUMBER_BITS)
        tags |= np.arange(first_number, first_number + count, dtype=np.uint64)
        words = self.words
        for row, (home, word) in enumerate(zip(homes.tolist(), tags.tolist(), strict=True)):
            at = home
            while words[at]:
                at += 1
            if at - home >= DISTANCE_MAX:
                return row
            words[at] = word
        return count

    def remove_many(self, hashes: NDArray[np.uint64], numbers: Sequence[int]) -> None:
        """Take away the entries with these numbers, which must all be there."""
        homes, tags = self._place_many(hashes)
        places = zip(homes.tolist(), tags.tolist(), numbers, strict=True)
        for home, tag, number in places:
            self._remove(home, tag << NUMBER_BITS | number)

    def remove(self, key_hash: int, number: int) -> None:
        """Take away the entry with this number, which must be there."""
        home, tag = self.place(key_hash)
        self._remove(home, tag << NUMBER_BITS | number)

    def fill(self, hashes: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> None:
        """Add all entries to a table that is empty. Raises TableCrowded, and changes nothing."""
        homes, tags = self._place_many(hashes)
        # Sorting words that hold the row as well is seven times as fast as sorting the rows.
        order = np.sort(homes << np.uint64(32) | np.arange(len(homes), dtype=np.uint64))
        rows = order & np.uint64(0xFFFFFFFF)
        order >>= np.uint64(32)
        at = np.arange(len(homes), dtype=np.int64)
        # Each entry goes to its home or behind the one before it, whichever comes later.
        at += np.maximum.accumulate(order.astype(np.int64) - at)
        if len(at) and int((at - order.astype(np.int64)).max()) >= DISTANCE_MAX:
            raise TableCrowded
        self.entries[at] = (tags << np.uint64(NUMBER_BITS) | numbers)[rows]

    def _insert(self, home: int, word: int) -> None:
        words, at = self.words, home
        while words[at]:
            at += 1
        if at - home >= DISTANCE_MAX:
            raise TableCrowded
        words[at] = word

    def _remove(self, home: int, word: int) -> None:
        words, hole = self.words, home
        while (found := words[hole]) != word:
            assert found, "the entry is not there"
            hole += 1
        at = hole + 1
        while word := words[at]:
            # It may move to the hole unless its home lies behind that.
            if (at - (word >> 52)) & _MASK_12 >= at - hole:
                words[hole] = word
                hole = at
            at += 1
        words[hole] = 0

    def _place_many(
        self, hashes: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """`place` for many."""
        homes = hashes >> np.uint64(32)
        homes *= np.uint64(self.homes)
        homes >>= np.uint64(32)
        tags = (homes & np.uint64(_MASK_12)) << np.uint64(12)
        tags |= (hashes >> np.uint64(20)) & np.uint64(_MASK_12)
        return homes, tags
