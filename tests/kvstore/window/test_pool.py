"""The window pool: budget, LRU, time to live, buffers that are used again, and a plain model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import InvalidArgument
from kvstore.layout import BlockLayout, Section
from kvstore.window.pool import WindowPool

KIB = 1024
LAYOUT = BlockLayout((Section("swa", KIB),))
LARGE = BlockLayout((Section("swa", 3 * KIB),))
NAMESPACE = b"n" * 16
OTHER_NAMESPACE = b"o" * 16


class Times:
    """A clock and a TTL that the test sets."""

    def __init__(self, ttl_s: float = 180.0) -> None:
        self.now_s = 1000.0
        self.ttl_s = ttl_s

    def pool(self, memory_bytes: int = 8 * KIB) -> WindowPool:
        return WindowPool(memory_bytes, lambda: self.ttl_s, lambda: self.now_s)


def key_of(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


def data_of(number: int, layout: BlockLayout = LAYOUT) -> bytes:
    return sha256(f"data {number}".encode()).digest() * (layout.block_bytes // 32)


def put(pool: WindowPool, number: int, layout: BlockLayout = LAYOUT) -> list[int] | None:
    """Put record `number`; the numbers below 100 of the records that went for it."""
    gone = pool.put(key_of(number), NAMESPACE, layout, data_of(number, layout))
    numbers = {key_of(other): other for other in range(100)}
    return None if gone is None else [numbers[key] for key in gone]


def held(pool: WindowPool) -> set[int]:
    return {number for number in range(100) if key_of(number) in pool}


# --- put and get


def test_record_comes_back_as_it_was_put() -> None:
    pool = Times().pool()
    assert put(pool, 1) == []
    record = pool.get(key_of(1))
    assert record is not None
    assert bytes(record.view) == data_of(1)
    assert record.is_of(NAMESPACE, LAYOUT.fingerprint[:16], KIB)
    assert record.is_intact()
    assert record.is_held
    assert pool.get(key_of(2)) is None
    assert (pool.counters.hits, pool.counters.misses) == (1, 1)


def test_put_keeps_a_copy_of_its_own() -> None:
    pool, data = Times().pool(), bytearray(data_of(1))
    pool.put(key_of(1), NAMESPACE, LAYOUT, data)
    data[0] ^= 1
    record = pool.get(key_of(1))
    assert record is not None
    assert bytes(record.view) == data_of(1)


def test_bytes_of_a_record_cannot_be_written_by_its_reader() -> None:
    pool = Times().pool()
    put(pool, 1)
    record = pool.get(key_of(1))
    assert record is not None
    with pytest.raises(TypeError, match="read-only"):
        record.view[0] = 1


def test_any_contiguous_buffer_is_taken_by_its_bytes() -> None:
    pool = Times().pool()
    words = np.arange(KIB // 8, dtype=np.uint64).reshape(16, 8)
    assert pool.put(key_of(1), NAMESPACE, LAYOUT, words.data) == []
    record = pool.get(key_of(1))
    assert record is not None
    assert bytes(record.view) == words.tobytes()


def test_second_put_of_a_key_takes_the_place_of_the_first() -> None:
    times = Times()
    pool = times.pool()
    put(pool, 1)
    times.now_s += 100.0
    assert pool.put(key_of(1), OTHER_NAMESPACE, LARGE, data_of(7, LARGE)) == []
    record = pool.get(key_of(1))
    assert record is not None
    assert bytes(record.view) == data_of(7, LARGE)
    assert record.is_of(OTHER_NAMESPACE, LARGE.fingerprint[:16], 3 * KIB)
    assert (len(pool), pool.used_bytes) == (1, 3 * KIB)
    times.now_s += 100.0
    assert key_of(1) in pool, "it lives from the second put on"


@pytest.mark.parametrize(
    ("key", "namespace_id", "data", "what"),
    [
        (b"short", NAMESPACE, data_of(1), "key of a window record"),
        (bytearray(32), NAMESPACE, data_of(1), "key of a window record"),
        (key_of(1), b"n" * 15, data_of(1), "namespace id"),
        (key_of(1), NAMESPACE, data_of(1)[:-1], "bytes of a window record"),
        (key_of(1), NAMESPACE, data_of(1, LARGE), "bytes of a window record"),
        (key_of(1), NAMESPACE, memoryview(bytes(2 * KIB))[::2], "not contiguous"),
    ],
)
def test_put_is_refused_when_it_breaks_a_rule(
    key: bytes, namespace_id: bytes, data: bytes, what: str
) -> None:
    pool = Times().pool()
    put(pool, 5)
    with pytest.raises(InvalidArgument, match=what):
        pool.put(key, namespace_id, LAYOUT, data)
    assert (held(pool), pool.used_bytes) == ({5}, KIB)


# --- room


def test_record_used_longest_ago_goes_when_there_is_no_room() -> None:
    pool = Times().pool(3 * KIB)
    for number in (1, 2, 3):
        put(pool, number)
    assert pool.get(key_of(1)) is not None
    assert put(pool, 4) == [2]
    assert put(pool, 5) == [3]
    assert held(pool) == {1, 4, 5}
    assert pool.counters.evicted == 2


def test_probe_is_no_use() -> None:
    pool = Times().pool(2 * KIB)
    put(pool, 1)
    put(pool, 2)
    assert key_of(1) in pool
    assert pool.peek(key_of(1)) is not None
    assert put(pool, 3) == [1]
    assert (pool.counters.hits, pool.counters.misses) == (0, 0)


def test_large_record_takes_the_room_of_several_small_ones() -> None:
    pool = Times().pool(4 * KIB)
    for number in range(4):
        put(pool, number)
    assert put(pool, 10, LARGE) == [0, 1, 2]
    assert held(pool) == {3, 10}
    assert pool.held_bytes == pool.used_bytes == 4 * KIB


def test_record_larger_than_the_pool_is_refused_and_nothing_goes() -> None:
    pool = Times().pool(2 * KIB)
    put(pool, 1)
    assert put(pool, 1, LARGE) is None
    assert held(pool) == {1}
    assert pool.counters.refused == 1


def test_pool_without_memory_keeps_nothing() -> None:
    pool = Times().pool(0)
    assert put(pool, 1) is None
    assert pool.get(key_of(1)) is None
    with pytest.raises(InvalidArgument, match="window memory"):
        Times().pool(-1)


def test_expired_record_goes_before_one_that_is_only_older_in_use() -> None:
    times = Times()
    pool = times.pool(2 * KIB)
    put(pool, 1)
    times.now_s += 100.0
    put(pool, 2)
    assert pool.get(key_of(1)) is not None  # 2 is the one that was used longest ago
    times.now_s += 100.0
    assert put(pool, 3) == [1]
    assert (pool.counters.expired, pool.counters.evicted) == (1, 0)


# --- time to live


def test_record_lives_its_time_from_the_put_on_whether_used_or_not() -> None:
    times = Times(ttl_s=180.0)
    pool = times.pool()
    put(pool, 1)
    put(pool, 2)
    for _ in range(179):
        times.now_s += 1.0
        assert pool.get(key_of(1)) is not None
    times.now_s += 1.0
    assert pool.get(key_of(1)) is None
    assert held(pool) == set()
    assert sorted(pool.expire()) == sorted([key_of(1), key_of(2)])
    assert (len(pool), pool.used_bytes, pool.counters.expired) == (0, 0, 2)


def test_change_of_the_ttl_is_obeyed_at_once_by_records_that_are_here() -> None:
    times = Times(ttl_s=180.0)
    pool = times.pool()
    put(pool, 1)
    times.now_s += 60.0
    times.ttl_s = 60.0
    assert key_of(1) not in pool
    times.ttl_s = 90.0
    record = pool.peek(key_of(1))
    assert record is not None
    assert pool.ttl_left_s(record) == pytest.approx(30.0)


def test_expiry_goes_in_steps_oldest_first() -> None:
    times = Times()
    pool = times.pool(64 * KIB)
    for number in range(50):
        put(pool, number)
        times.now_s += 1.0
    times.now_s = 1000.0 + 180.0 + 39.5
    assert pool.expire(30) == [key_of(number) for number in range(30)]
    assert pool.expire(30) == [key_of(number) for number in range(30, 40)]
    assert pool.expire(30) == []
    assert pool.keys() == [key_of(number) for number in range(40, 50)]


def test_removed_record_is_gone() -> None:
    pool = Times().pool()
    put(pool, 1)
    assert pool.remove(key_of(1))
    assert not pool.remove(key_of(1))
    assert (held(pool), pool.used_bytes, pool.counters.removed) == (set(), 0, 1)


# --- memory that is used again


def test_freed_memory_is_used_by_the_next_record_of_its_size() -> None:
    pool = Times().pool(2 * KIB)
    put(pool, 1)
    put(pool, 2)
    old = pool.peek(key_of(1))
    assert old is not None
    address = np.frombuffer(old.view, np.uint8).ctypes.data
    assert put(pool, 3) == [1]
    new = pool.peek(key_of(3))
    assert new is not None
    assert np.frombuffer(new.view, np.uint8).ctypes.data == address
    # Who still reads the old record must find that it is another one now.
    assert not old.is_held
    assert not old.is_intact()
    assert new.is_held


def test_memory_kept_for_one_size_is_given_back_when_another_needs_it() -> None:
    pool = Times().pool(4 * KIB)
    for number in range(4):
        put(pool, number)
        pool.remove(key_of(number))
    put(pool, 4)
    assert (pool.used_bytes, pool.held_bytes) == (KIB, KIB)
    for number in range(5, 8):
        put(pool, number)
    for number in range(5, 8):
        pool.remove(key_of(number))
    assert pool.held_bytes == 4 * KIB
    assert put(pool, 10, LARGE) == []
    assert (pool.used_bytes, pool.held_bytes) == (4 * KIB, 4 * KIB)


def spoil(pool: WindowPool, number: int) -> None:
    """Memory forgets: one bit of a record changes behind the pool's back."""
    record = pool.peek(key_of(number))
    assert record is not None
    buffer = record.view.obj
    assert isinstance(buffer, bytearray)
    buffer[KIB // 2] ^= 4


def test_spoilt_record_is_let_go_when_it_is_verified() -> None:
    pool = Times().pool()
    put(pool, 1)
    put(pool, 2)
    spoil(pool, 1)
    spoilt, whole = pool.get(key_of(1)), pool.get(key_of(2))
    assert spoilt is not None
    assert whole is not None
    assert not pool.verify(spoilt)
    assert pool.verify(whole)
    assert (held(pool), pool.counters.rejected) == ({2}, 1)


def test_spoilt_record_does_not_fit_the_checksum_that_its_reader_has() -> None:
    pool = Times().pool()
    put(pool, 1)
    spoil(pool, 1)
    record = pool.get(key_of(1))
    assert record is not None
    assert not record.is_intact()


def test_status_says_what_is_here_and_what_happened() -> None:
    pool = Times().pool(2 * KIB)
    for number in (1, 2, 3):
        put(pool, number)
    pool.get(key_of(3))
    assert pool.describe() == {
        "memory_bytes": 2 * KIB,
        "used_bytes": 2 * KIB,
        "held_bytes": 2 * KIB,
        "records": 2,
        "puts": 3,
        "put_bytes": 3 * KIB,
        "hits": 1,
        "misses": 0,
        "evicted": 1,
        "expired": 0,
        "removed": 0,
        "refused": 0,
        "rejected": 0,
    }


# --- against a model


class PoolMachine(RuleBasedStateMachine):
    """The pool does what lists do, whatever comes."""

    MEMORY_BYTES = 7 * KIB

    @initialize()
    def begin(self) -> None:
        self.times = Times(ttl_s=30.0)
        self.pool = self.times.pool(self.MEMORY_BYTES)
        self.by_use: list[int] = []
        self.put_at_s: dict[int, float] = {}  # in the order of puts
        self.size: dict[int, int] = {}
        self.data: dict[int, bytes] = {}

    def is_expired(self, number: int) -> bool:
        return self.put_at_s[number] + self.times.ttl_s <= self.times.now_s

    def let_go(self, number: int) -> None:
        self.by_use.remove(number)
        for table in (self.put_at_s, self.size, self.data):
            table.pop(number)

    @rule(number=st.integers(0, 9), kib=st.sampled_from([1, 1, 1, 2, 3, 8]), salt=st.integers(0, 3))
    def put(self, number: int, kib: int, salt: int) -> None:
        layout = BlockLayout((Section("swa", kib * KIB),))
        data = data_of(100 * number + salt, layout)
        gone = self.pool.put(key_of(number), NAMESPACE, layout, data)
        if kib * KIB > self.MEMORY_BYTES:
            assert gone is None
            return
        expected = []
        if number in self.put_at_s:
            self.let_go(number)
        while sum(self.size.values()) + kib * KIB > self.MEMORY_BYTES:
            oldest = next(iter(self.put_at_s))
            victim = oldest if self.is_expired(oldest) else self.by_use[0]
            self.let_go(victim)
            expected.append(key_of(victim))
        assert gone == expected
        self.by_use.append(number)
        self.put_at_s[number] = self.times.now_s
        self.size[number] = kib * KIB
        self.data[number] = data

    @rule(number=st.integers(0, 9))
    def get(self, number: int) -> None:
        record = self.pool.get(key_of(number))
        if number not in self.put_at_s or self.is_expired(number):
            assert record is None
            return
        assert record is not None
        assert bytes(record.view) == self.data[number]
        self.by_use.remove(number)
        self.by_use.append(number)

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        assert self.pool.remove(key_of(number)) == (number in self.put_at_s)
        if number in self.put_at_s:
            self.let_go(number)

    @rule(records_max=st.integers(0, 5))
    def expire(self, records_max: int) -> None:
        due = [number for number in self.put_at_s if self.is_expired(number)][:records_max]
        assert self.pool.expire(records_max) == [key_of(number) for number in due]
        for number in due:
            self.let_go(number)

    @rule(passed_s=st.sampled_from([0.5, 5.0, 29.0]))
    def wait(self, passed_s: float) -> None:
        self.times.now_s += passed_s

    @rule(ttl_s=st.sampled_from([10.0, 30.0, 60.0]))
    def change_ttl(self, ttl_s: float) -> None:
        self.times.ttl_s = ttl_s

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.pool.keys() == [key_of(number) for number in self.put_at_s]
        assert self.pool.used_bytes == sum(self.size.values())
        assert self.pool.used_bytes <= self.pool.held_bytes <= self.MEMORY_BYTES
        for number, data in self.data.items():
            record = self.pool.peek(key_of(number))
            assert (record is None) == self.is_expired(number)
            assert record is None or (record.is_held and bytes(record.view) == data)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase


def test_work_of_each_operation_does_not_grow_with_the_pool() -> None:
    """Counts what Python calls, not seconds: the same for twenty times the records."""
    small, large = calls_with(100), calls_with(2_000)
    assert small == large
    assert max(small) < 200


def calls_with(record_count: int) -> list[int]:
    """Calls made by one put that evicts, one get, and by the expiry of eight records."""
    times = Times()
    pool = times.pool(record_count * KIB)
    for number in range(record_count):
        put_quickly(pool, number)
    counts = [count_calls(lambda: put_quickly(pool, record_count))]
    counts.append(count_calls(lambda: pool.get(record_count.to_bytes(32, "little"))))
    times.now_s += 200.0
    return [*counts, count_calls(lambda: pool.expire(8))]


def put_quickly(pool: WindowPool, number: int) -> None:
    pool.put(number.to_bytes(32, "little"), NAMESPACE, LAYOUT, bytes(KIB))


def count_calls(action: Callable[[], object]) -> int:
    """Function calls, of Python and of C, that an action makes."""
    calls = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    # A collection calls those who listen to it (hypothesis does): these calls are not the pool's.
    gc.disable()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls
