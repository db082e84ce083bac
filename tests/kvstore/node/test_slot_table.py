"""The hash table of the index, by hashes that are chosen so that entries meet."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.node.slot_table import DISTANCE_MAX, KeyHash, SlotTable, TableCrowded

KEYS_MAX = 40
# Few homes, few fingerprints, and one hash that is at the very end of the table.
hashes = st.one_of(
    st.builds(lambda home, mark: home << 58 | mark << 20, st.integers(0, 63), st.integers(0, 2)),
    st.just((1 << 64) - 1),
)


class SlotTableMachine(RuleBasedStateMachine):
    """Entries of a table against a list of (hash, number)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(KEYS_MAX)
        self.entries: list[tuple[int, int]] = []
        self.next_number = 1

    @rule(key_hash=hashes)
    def insert(self, key_hash: int) -> None:
        if len(self.entries) < KEYS_MAX:
            self.table.insert(key_hash, self.next_number)
            self.entries.append((key_hash, self.next_number))
            self.next_number += 1

    @rule(offered=st.lists(hashes, min_size=1, max_size=12))
    def insert_many(self, offered: list[int]) -> None:
        if len(self.entries) + len(offered) <= KEYS_MAX:
            done = self.table.insert_many(np.array(offered, np.uint64), self.next_number)
            assert done == len(offered)
            self.entries += zip(offered, range(self.next_number, 1 << 40), strict=False)
            self.next_number += len(offered)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.entries:
            entry = data.draw(st.sampled_from(self.entries))
            self.entries.remove(entry)
            self.table.remove(*entry)

    @rule(data=st.data())
    def remove_many(self, data: st.DataObject) -> None:
        if self.entries:
            gone = data.draw(st.lists(st.sampled_from(self.entries), min_size=1, unique=True))
            self.entries = [entry for entry in self.entries if entry not in gone]
            numbers = [number for _, number in gone]
            self.table.remove_many(np.array([one for one, _ in gone], np.uint64), numbers)

    @rule(asked=st.lists(hashes, min_size=1, max_size=20))
    def find_many(self, asked: list[int]) -> None:
        found, is_open = self.table.find_many(np.array(asked, np.uint64))
        for one, number, is_unsure in zip(asked, found.tolist(), is_open.tolist(), strict=True):
            candidates = self.table.find(one)
            assert number in candidates or (number == 0 and (is_unsure or not candidates))

    @rule()
    def fill_another(self) -> None:
        """A table that is filled at once holds what one that grew holds."""
        table = SlotTable(KEYS_MAX)
        by_hash = np.array([one for one, _ in self.entries], np.uint64)
        table.fill(by_hash, np.array([number for _, number in self.entries], np.uint64))
        self.table = table

    @invariant()
    def finds_every_entry_and_nothing_else(self) -> None:
        for key_hash in {one for one, _ in self.entries}:
            home, tag = self.table.place(key_hash)
            alike = [n for one, n in self.entries if self.table.place(one) == (home, tag)]
            assert set(alike) <= set(self.table.find(key_hash))
        used = [word for word in self.table.words.tolist() if word]
        assert len(used) == len(self.entries)


TestSlotTableMachine = SlotTableMachine.TestCase
TestSlotTableMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(0, 1 << 63), st.lists(st.binary(min_size=32, max_size=32), min_size=1))
def test_hash_is_the_same_for_one_key_and_for_many(seed: int, keys: list[bytes]) -> None:
    key_hash = KeyHash(seed)
    words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
    assert key_hash.many(words).tolist() == [key_hash.one(key) for key in keys]


def test_hash_depends_on_the_seed_and_on_each_byte(rng: random.Random) -> None:
    key = rng.randbytes(32)
    assert KeyHash(1).one(key) != KeyHash(2).one(key)
    for i in range(32):
        other = bytearray(key)
        other[i] ^= 1 << rng.randrange(8)
        assert KeyHash(1).one(bytes(other)) != KeyHash(1).one(key)


@pytest.mark.parametrize("shift", [0, 64, 128, 192])
def test_clusters_stay_short_when_keys_only_count_up(shift: int) -> None:
    count = 20_000
    keys = b"".join((i << shift).to_bytes(32, "little") for i in range(count))
    table = SlotTable(count)
    words = np.frombuffer(keys, np.uint64).reshape(-1, 4)
    table.fill(KeyHash(7).many(words), np.arange(1, count + 1, dtype=np.uint64))
    used = np.flatnonzero(np.array(table.words))
    longest = max(map(len, np.split(used, np.flatnonzero(np.diff(used) > 1) + 1)))
    assert longest < 300


def test_table_refuses_what_lies_too_far_from_its_home_and_stays_as_it_was() -> None:
    table = SlotTable(10_000)
    hashes = np.full(DISTANCE_MAX, 5 << 40, np.uint64)
    assert table.insert_many(hashes, 1) == DISTANCE_MAX
    with pytest.raises(TableCrowded):
        table.insert(5 << 40, DISTANCE_MAX + 1)
    assert table.insert_many(hashes[:3], DISTANCE_MAX + 1) == 0
    assert table.find(5 << 40) == list(range(1, DISTANCE_MAX + 1))
    with pytest.raises(TableCrowded):
        SlotTable(10_000).fill(
            np.full(DISTANCE_MAX + 1, 5 << 40, np.uint64),
            np.arange(1, DISTANCE_MAX + 2, dtype=np.uint64),
        )
