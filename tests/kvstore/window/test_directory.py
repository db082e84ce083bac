"""A part of the directory: who has what, how long, what is forgotten when, and a plain model."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import InvalidArgument
from kvstore.window.directory import HOSTS_PER_KEY_MAX, DirectoryPart

SIZE_BYTES = 1_415_040
TTL_MS = 180_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 5_000.25

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def part(clock: Clock) -> DirectoryPart:
    return DirectoryPart(clock)


def key_of(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


def announce(part: DirectoryPart, host: str, *numbers: int, ttl_ms: int = TTL_MS) -> int:
    return part.announce(host, [(key_of(number), SIZE_BYTES, ttl_ms) for number in numbers])


def hosts_of(part: DirectoryPart, number: int) -> tuple[str, ...]:
    return part.look_up([key_of(number)])[0]


# --- who has what


def test_host_is_told_for_what_it_announced_and_nothing_else(part: DirectoryPart) -> None:
    assert announce(part, "a:1", 1, 2) == 2
    assert announce(part, "b:1", 3) == 1
    keys = [key_of(number) for number in (1, 2, 3, 4)]
    assert part.look_up(keys) == [("a:1",), ("a:1",), ("b:1",), ()]
    assert part.look_up([]) == []
    assert (part.counters.hits, part.counters.misses) == (3, 1)
    assert part.size_of("a:1", key_of(1)) == SIZE_BYTES
    assert part.size_of("b:1", key_of(1)) is None
    assert part.size_of("c:1", key_of(1)) is None


def test_host_that_announced_last_is_told_first(part: DirectoryPart) -> None:
    for host in ("a:1", "b:1", "c:1"):
        announce(part, host, 1)
    assert hosts_of(part, 1) == ("c:1", "b:1", "a:1")
    announce(part, "b:1", 1)
    assert hosts_of(part, 1) == ("b:1", "c:1", "a:1")
    assert len(part) == 3
    assert (part.counters.announced, part.counters.renewed) == (3, 1)


def test_fifth_host_of_a_key_takes_the_place_of_the_oldest(part: DirectoryPart) -> None:
    for host in ("a:1", "b:1", "c:1", "d:1", "e:1"):
        announce(part, host, 1)
    assert hosts_of(part, 1) == ("e:1", "d:1", "c:1", "b:1")
    assert len(part) == HOSTS_PER_KEY_MAX
    assert (part.count_of("a:1"), part.counters.crowded_out) == (0, 1)


def test_withdrawn_record_is_not_told_and_other_hosts_are(part: DirectoryPart) -> None:
    for host in ("a:1", "b:1", "c:1"):
        announce(part, host, 1, 2)
    assert part.withdraw("b:1", [key_of(1), key_of(9)]) == 1
    assert part.withdraw("b:1", [key_of(1)]) == 0
    assert part.withdraw("nobody:1", [key_of(1)]) == 0
    assert hosts_of(part, 1) == ("c:1", "a:1")
    assert hosts_of(part, 2) == ("c:1", "b:1", "a:1")
    assert part.counters.withdrawn == 1


def test_keys_that_agree_in_sixty_bits_are_one_to_the_directory(part: DirectoryPart) -> None:
    """What it says is a hint: the host compares the whole key."""
    key = bytearray(key_of(1))
    key[0] ^= 0x0F  # the lowest four bits of the first word are not kept
    key[31] ^= 0xFF
    announce(part, "a:1", 1)
    assert part.look_up([bytes(key)]) == [("a:1",)]
    key[0] ^= 0x10
    assert part.look_up([bytes(key)]) == [()]


# --- time


def test_entry_is_told_until_its_time_is_over_and_kept_until_it_is_cleared(
    part: DirectoryPart, clock: Clock
) -> None:
    announce(part, "a:1", 1, ttl_ms=1_500)
    announce(part, "b:1", 1, ttl_ms=3_000)
    clock.now_s += 1.499
    assert hosts_of(part, 1) == ("b:1", "a:1")
    clock.now_s += 0.001
    assert hosts_of(part, 1) == ("b:1",)
    assert part.size_of("a:1", key_of(1)) is None
    assert len(part) == 2
    clock.now_s += 1.0
    assert part.expire() == 1
    clock.now_s += 2.0
    assert part.expire() == 1
    assert (len(part), part.counters.expired, part.counts()) == (0, 2, {})


def test_announcement_replaces_the_time_that_was_said_before(
    part: DirectoryPart, clock: Clock
) -> None:
    announce(part, "a:1", 1, ttl_ms=2_000)
    announce(part, "a:1", 1, ttl_ms=60_000)
    announce(part, "a:1", 2, ttl_ms=60_000)
    announce(part, "a:1", 2, ttl_ms=2_000)
    clock.now_s += 10.0
    assert part.expire() == 1
    assert (hosts_of(part, 1), hosts_of(part, 2)) == (("a:1",), ())


def test_looking_up_gives_no_entry_a_longer_life(part: DirectoryPart, clock: Clock) -> None:
    announce(part, "a:1", 1, ttl_ms=3_000)
    for _ in range(3):
        assert hosts_of(part, 1) == ("a:1",)
        clock.now_s += 1.0
    assert hosts_of(part, 1) == ()


def test_ttl_over_a_day_counts_as_a_day(part: DirectoryPart, clock: Clock) -> None:
    announce(part, "a:1", 1, ttl_ms=2**32 - 1)
    clock.now_s += 86_399.0
    assert hosts_of(part, 1) == ("a:1",)
    clock.now_s += 1.0
    assert hosts_of(part, 1) == ()


def test_ttl_of_nothing_is_refused(part: DirectoryPart) -> None:
    with pytest.raises(InvalidArgument, match="TTL of a record"):
        part.announce("a:1", [(key_of(1), SIZE_BYTES, TTL_MS), (key_of(2), SIZE_BYTES, 0)])
    assert (hosts_of(part, 1), hosts_of(part, 2)) == (("a:1",), ())


def test_expiry_goes_in_steps(part: DirectoryPart, clock: Clock) -> None:
    announce(part, "a:1", *range(100), ttl_ms=1_000)
    clock.now_s += 5.0
    assert [part.expire(40) for _ in range(4)] == [40, 40, 20, 0]
    assert part.describe()["entries"] == 0


# --- hosts


def test_forgotten_host_is_told_no_more_and_its_entries_go_in_their_time(
    part: DirectoryPart, clock: Clock
) -> None:
    announce(part, "a:1", 1, 2)
    announce(part, "b:1", 2)
    assert part.forget_host("a:1") == 2
    assert part.forget_host("a:1") == 0
    assert (hosts_of(part, 1), hosts_of(part, 2)) == ((), ("b:1",))
    assert (len(part), part.count_of("a:1"), part.counts()) == (3, 0, {"b:1": 1})
    clock.now_s += 181.0
    part.expire()
    assert len(part) == 0


def test_forgotten_host_that_comes_back_is_told_for_what_is_new_only(part: DirectoryPart) -> None:
    announce(part, "a:1", 1, 2)
    part.forget_host("a:1")
    announce(part, "a:1", 2, 3)
    assert [hosts_of(part, number) for number in (1, 2, 3)] == [(), ("a:1",), ("a:1",)]
    assert part.count_of("a:1") == 2
    assert part.withdraw("a:1", [key_of(1), key_of(2)]) == 1


def test_hosts_are_counted(part: DirectoryPart) -> None:
    announce(part, "a:1", 1, 2, 3)
    announce(part, "b:1", 3)
    part.withdraw("a:1", [key_of(1)])
    assert part.counts() == {"a:1": 2, "b:1": 1}
    assert (part.count_of("a:1"), part.count_of("c:1")) == (2, 0)
    about = part.describe()
    assert (about["entries"], about["keys"], about["hosts"]) == (3, 2, 2)


def test_one_host_too_many_is_refused_until_another_has_nothing_left(clock: Clock) -> None:
    part = DirectoryPart(clock, hosts_max=2)
    announce(part, "a:1", 1)
    announce(part, "b:1", 2)
    assert announce(part, "c:1", 3, 4) == 0
    assert (hosts_of(part, 3), part.counters.refused) == ((), 2)
    part.withdraw("a:1", [key_of(1)])
    assert announce(part, "c:1", 3) == 1
    assert part.counts() == {"b:1": 1, "c:1": 1}


def test_numbers_of_hosts_never_run_out_when_hosts_come_and_go(clock: Clock) -> None:
    part = DirectoryPart(clock, hosts_max=4)
    for number in range(70_000):
        host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1"
        assert part.announce(host, [(key_of(1), SIZE_BYTES, TTL_MS)]) == 1
        part.forget_host(host)
    assert len(part) <= HOSTS_PER_KEY_MAX


# --- room


def test_entry_that_expires_next_goes_when_all_is_full(clock: Clock) -> None:
    part = DirectoryPart(clock, entries_max=3)
    announce(part, "a:1", 1, ttl_ms=60_000)
    announce(part, "a:1", 2, ttl_ms=20_000)
    announce(part, "b:1", 3, ttl_ms=90_000)
    announce(part, "b:1", 4, ttl_ms=70_000)
    assert [bool(hosts_of(part, number)) for number in (1, 2, 3, 4)] == [True, False, True, True]
    announce(part, "b:1", 4)
    assert (len(part), part.counters.crowded_out) == (3, 1)
    # One that has expired already goes for no want of room.
    clock.now_s += 60.5
    announce(part, "b:1", 5)
    assert (len(part), part.counters.crowded_out, part.counters.expired) == (3, 1, 1)


def test_host_lives_through_an_announcement_that_crowds_out_its_only_entry(clock: Clock) -> None:
    part = DirectoryPart(clock, entries_max=1)
    assert announce(part, "a:1", 1, 2, 3) == 3
    assert (hosts_of(part, 3), part.counts()) == (("a:1",), {"a:1": 1})
    assert announce(part, "b:1", 4) == 1
    assert part.counts() == {"b:1": 1}


@pytest.mark.parametrize(
    ("entries_max", "hosts_max"), [(0, 1), (2**32 - 1, 1), (1, 0), (1, 40_000)]
)
def test_bounds_out_of_reason_are_refused(clock: Clock, entries_max: int, hosts_max: int) -> None:
    with pytest.raises(InvalidArgument):
        DirectoryPart(clock, entries_max=entries_max, hosts_max=hosts_max)


def test_memory_stays_when_entries_come_and_go_for_ever(clock: Clock) -> None:
    part = DirectoryPart(clock, entries_max=2_000)

    def go_round(first: int) -> None:
        for number in range(first, first + 4_000):
            part.announce("a:1", [(number.to_bytes(8, "little") * 4, SIZE_BYTES, TTL_MS)])
            if number % 3 == 0:
                part.withdraw("a:1", [number.to_bytes(8, "little") * 4])
            clock.now_s += 0.01
        part.expire()

    go_round(1 << 20)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for turn in range(2, 6):
            go_round(turn << 20)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What the first round allocated is not traced, so this is what came on top of it or in its
    # place: at most the entries of one round, and not those of four.
    assert after - before <= 2_000 * 200


# --- against a model


@dataclass
class Entry:
    number: int
    host: str
    is_forgotten: bool
    size_bytes: int
    ends_at_s: float

    @property
    def second(self) -> int:
        return int(self.ends_at_s) + 1


class DirectoryMachine(RuleBasedStateMachine):
    """The part does what a list of entries does, whatever comes."""

    ENTRIES_MAX = 9
    HOSTS = ("a:1", "b:1", "c:1", "d:1", "e:1", "f:1")
    HOSTS_MAX = 5
    numbers = st.integers(0, 5)
    hosts = st.sampled_from(HOSTS)

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.part = DirectoryPart(
            self.clock, entries_max=self.ENTRIES_MAX, hosts_max=self.HOSTS_MAX
        )
        self.entries: list[Entry] = []  # in the order of their announcements

    def is_told(self, entry: Entry) -> bool:
        return not entry.is_forgotten and entry.ends_at_s > self.clock.now_s

    @rule(
        host=hosts,
        said=st.lists(st.tuples(numbers, st.sampled_from([500, 1_000, 9_000, 30_000])), max_size=4),
    )
    def announce(self, host: str, said: list[tuple[int, int]]) -> None:
        taken = self.part.announce(
            host, [(key_of(number), 1_024 + ttl_ms, ttl_ms) for number, ttl_ms in said]
        )
        known = {entry.host for entry in self.entries if not entry.is_forgotten}
        if host not in known and len(known) == self.HOSTS_MAX:
            assert taken == 0
            return
        assert taken == len(said)
        for number, ttl_ms in said:
            self.take(host, number, ttl_ms)

    def take(self, host: str, number: int, ttl_ms: int) -> None:
        of_key = [entry for entry in self.entries if entry.number == number]
        own = [entry for entry in of_key if entry.host == host and not entry.is_forgotten]
        if own:
            self.entries.remove(own[0])
        elif len(of_key) == HOSTS_PER_KEY_MAX:
            self.entries.remove(of_key[0])
        if len(self.entries) == self.ENTRIES_MAX:
            # Of those of one second the one that was announced last; nobody relies on that.
            self.entries.remove(min(reversed(self.entries), key=lambda entry: entry.second))
        ends_at_s = self.clock.now_s + ttl_ms / 1e3
        self.entries.append(Entry(number, host, False, 1_024 + ttl_ms, ends_at_s))

    @rule(host=hosts, withdrawn=st.lists(numbers, max_size=4))
    def withdraw(self, host: str, withdrawn: list[int]) -> None:
        gone = [
            entry
            for entry in self.entries
            if entry.host == host and not entry.is_forgotten and entry.number in withdrawn
        ]
        assert self.part.withdraw(host, [key_of(number) for number in withdrawn]) == len(gone)
        for entry in gone:
            self.entries.remove(entry)

    @rule(host=hosts)
    def forget_host(self, host: str) -> None:
        gone = [entry for entry in self.entries if entry.host == host and not entry.is_forgotten]
        assert self.part.forget_host(host) == len(gone)
        for entry in gone:
            entry.is_forgotten = True

    @rule(entries_max=st.integers(1, 20))
    def expire(self, entries_max: int) -> None:
        due = [entry for entry in self.entries if entry.second <= int(self.clock.now_s)]
        # Which of those of one second go first is not said, so all or as many as asked for.
        expired = self.part.expire(entries_max if entries_max >= len(due) else len(due))
        assert expired == len(due)
        self.entries = [entry for entry in self.entries if entry not in due]

    @rule(passed_s=st.sampled_from([0.25, 0.5, 1.0, 8.75, 29.5]))
    def wait(self, passed_s: float) -> None:
        self.clock.now_s += passed_s

    @invariant()
    def tells_what_the_model_tells(self) -> None:
        keys = [key_of(number) for number in range(6)]
        for number, told in enumerate(self.part.look_up(keys)):
            expected = [e for e in self.entries if e.number == number and self.is_told(e)]
            assert told == tuple(entry.host for entry in reversed(expected))
            for entry in expected:
                assert self.part.size_of(entry.host, keys[number]) == entry.size_bytes

    @invariant()
    def counts_what_the_model_holds(self) -> None:
        kept = [entry for entry in self.entries if not entry.is_forgotten]
        assert self.part.counts() == Counter(entry.host for entry in kept)
        assert len(self.part) == len(self.entries) <= self.ENTRIES_MAX
        assert self.part.describe()["keys"] == len({entry.number for entry in self.entries})


DirectoryMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestDirectoryMachine = DirectoryMachine.TestCase
