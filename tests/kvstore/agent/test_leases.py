"""Leases: runs never overlap, none is freed under a job or under a process that lost its session a
moment ago, nobody is overtaken in a first second."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.agent.leases import (
    PATIENCE_S,
    QUARANTINE_S,
    Lease,
    LeaseBook,
    LeaseRequest,
    RunState,
    choose_blocks_that_fit,
)
from kvstore.arena.allocator import RangeAllocator
from kvstore.arena.run_layout import RunLayout
from kvstore.layout import BlockLayout, Section

LAYOUT = BlockLayout((Section("a", 3_000), Section("b", 5_192)))
ARENA_BYTES = 256 << 10
OWNERS = st.integers(1, 3)


def book_of(size_bytes: int = ARENA_BYTES, *, runs_max: int = 64) -> tuple[LeaseBook, list[Lease]]:
    freed: list[Lease] = []
    return new_book(Time(), freed, runs_max=runs_max, size_bytes=size_bytes), freed


class Time:
    """It passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_000.0


def new_book(
    time: Time, freed: list[Lease], *, runs_max: int = 64, size_bytes: int = ARENA_BYTES
) -> LeaseBook:
    allocator = RangeAllocator(size_bytes)
    return LeaseBook(allocator, freed.append, clock=lambda: time.now_s, runs_max=runs_max)


def request_of(owner: int, blocks: int, layout: BlockLayout = LAYOUT) -> LeaseRequest:
    return LeaseRequest(owner=owner, layout=layout, blocks=blocks, namespace=0, is_window=False)


def ask(book: LeaseBook, owner: int, blocks: int) -> LeaseRequest:
    request = request_of(owner, blocks)
    book.ask(request)
    return request


def lease(book: LeaseBook, owner: int, blocks: int) -> Lease:
    request = ask(book, owner, blocks)
    assert request.lease is not None
    return request.lease


def quarantined(book: LeaseBook, lease: Lease) -> bool:
    return lease.state is RunState.QUARANTINED and book.states()["quarantined"] > 0


def never() -> None:
    raise AssertionError("nothing was to be cancelled")


@given(
    sizes=st.lists(st.integers(1, 9_000), min_size=1, max_size=5),
    blocks=st.integers(1, 300),
    room_bytes=st.integers(0, 1 << 20),
)
def test_chosen_blocks_are_the_most_that_fit(
    sizes: list[int], blocks: int, room_bytes: int
) -> None:
    sections = [Section(f"s{index}", size) for index, size in enumerate(sizes)]
    layout = BlockLayout((*sections, Section("rest", 1_024)))
    found = choose_blocks_that_fit(layout, blocks, room_bytes)
    assert 0 <= found <= blocks
    if found:
        assert RunLayout(layout, found).run_bytes <= room_bytes
    if found < blocks:
        assert RunLayout(layout, found + 1).run_bytes > room_bytes


def test_request_is_made_as_small_as_the_arena_when_it_is_larger() -> None:
    book, _ = book_of()
    found = lease(book, 1, 60_000)
    assert found.layout.blocks == choose_blocks_that_fit(LAYOUT, 60_000, ARENA_BYTES)


def test_request_gets_nothing_at_once_when_not_even_one_block_can_ever_fit() -> None:
    book, _ = book_of(8_192)
    request = ask(book, 1, 3)
    assert request.is_settled
    assert request.lease is None


def test_small_request_waits_behind_a_large_one_when_there_is_room_for_it_alone() -> None:
    book, _ = book_of()
    first = lease(book, 1, 20)
    large, small = ask(book, 2, 20), ask(book, 3, 1)
    assert book.waiting == 2
    told: list[str] = []
    large.on_settled.append(lambda: told.append("large"))
    small.on_settled.append(lambda: told.append("small"))
    book.release(first)
    assert told == ["large", "small"]
    assert book.waiting == 0


def test_request_gets_what_fits_when_its_time_is_up() -> None:
    book, _ = book_of()
    lease(book, 1, 20)
    request = ask(book, 2, 20)
    room_bytes = book.largest_free_bytes
    book.settle(request)
    assert request.lease is not None
    assert request.lease.layout.blocks == choose_blocks_that_fit(LAYOUT, 20, room_bytes)


def test_request_gets_nothing_when_its_time_is_up_and_the_arena_is_full() -> None:
    book, _ = book_of()
    lease(book, 1, 60_000)
    request = ask(book, 2, 1)
    book.settle(request)
    assert request.is_settled
    assert request.lease is None
    assert book.waiting == 0


def test_next_in_line_is_served_when_the_one_before_gives_up() -> None:
    book, _ = book_of()
    lease(book, 1, 20)
    ask(book, 2, 25)
    small = ask(book, 3, 1)
    book.end_owner(2)
    assert small.lease is not None


def test_run_is_free_a_while_after_the_end_of_its_session() -> None:
    """A process that lost its connection may be in the middle of a copy."""
    time, freed = Time(), list[Lease]()
    book = new_book(time, freed)
    first, later = lease(book, 1, 60_000 // 2), ask(book, 2, 60_000)
    book.end_owner(1)
    assert quarantined(book, first)
    assert (book.runs_of(1), book.find(1, first.number)) == (0, None)
    time.now_s += QUARANTINE_S - 0.01
    book.end_quarantine()
    assert (freed, later.lease) == ([], None)
    time.now_s += 0.01
    book.end_quarantine()
    assert freed == [first]
    assert later.lease is not None, "who waits gets it then"


def test_run_that_its_session_gives_back_is_free_at_once() -> None:
    book, freed = book_of()
    found = lease(book, 1, 4)
    book.release(found)
    assert freed == [found]


def test_runs_are_freed_one_after_the_other_as_their_sessions_ended() -> None:
    time, freed = Time(), list[Lease]()
    book = new_book(time, freed)
    runs = [lease(book, owner, 1) for owner in (1, 2)]
    book.end_owner(1)
    time.now_s += 1.0
    book.end_owner(2)
    time.now_s += QUARANTINE_S - 1.0
    book.end_quarantine()
    assert freed == runs[:1]
    time.now_s += 1.0
    book.end_quarantine()
    assert freed == runs
    assert book.leased_bytes == 0


def test_run_is_freed_only_after_the_end_of_its_fetch_when_its_session_ends() -> None:
    time, freed = Time(), list[Lease]()
    book = new_book(time, freed)
    found = lease(book, 1, 4)
    cancelled: list[bool] = []
    book.begin_fetch(found, lambda: cancelled.append(True))
    book.end_owner(1)
    assert cancelled == [True]
    time.now_s += QUARANTINE_S
    book.end_quarantine()
    assert (freed, book.runs) == ([], 1)
    assert book.find(1, found.number) is None
    book.end_fetch(found)
    assert quarantined(book, found), "its process may still read what the job had brought"
    time.now_s += QUARANTINE_S
    book.end_quarantine()
    assert freed == [found]
    assert book.leased_bytes == 0


def test_run_stays_with_its_session_when_its_fetch_has_ended() -> None:
    book, freed = book_of()
    found = lease(book, 1, 4)
    book.begin_fetch(found, never)
    book.end_fetch(found)
    assert book.find(1, found.number) is found
    assert freed == []


def test_run_that_is_saved_outlives_its_session() -> None:
    book, freed = book_of()
    found = lease(book, 1, 4)
    book.begin_store(found)
    assert book.runs_of(1) == 0
    book.end_owner(1)
    assert freed == []
    book.end_store(found)
    assert freed == [found]


def test_run_that_is_offered_outlives_its_session_and_is_the_takers_then() -> None:
    book, freed = book_of()
    found = lease(book, 1, 4)
    book.begin_offer(found)
    assert book.runs_of(1) == 0
    book.end_owner(1)
    assert freed == []
    book.take(found, owner=2, namespace=7)
    assert (book.find(2, found.number), found.namespace) == (found, 7)
    book.end_owner(2)
    assert quarantined(book, found)


def test_run_that_nobody_takes_is_free_at_the_end_of_its_offer() -> None:
    book, freed = book_of()
    found = lease(book, 1, 60_000)
    book.begin_offer(found)
    waiting = ask(book, 2, 1)
    assert waiting.lease is None
    book.end_offer(found)
    assert freed == [found]
    assert waiting.lease is not None


def test_request_waits_when_there_are_as_many_runs_as_allowed() -> None:
    book, _ = book_of(runs_max=2)
    first, _ = lease(book, 1, 1), lease(book, 1, 1)
    third = ask(book, 2, 1)
    assert third.lease is None
    book.release(first)
    assert third.lease is not None


def test_run_belongs_to_nobody_but_its_session() -> None:
    book, _ = book_of()
    found = lease(book, 1, 1)
    assert book.find(2, found.number) is None
    assert book.find(1, found.number + 1) is None


def test_request_that_fits_overtakes_one_that_has_waited_for_a_second() -> None:
    """One giant wish with an hour to wait held up everybody beside a nearly empty arena."""
    time = Time()
    book = new_book(time, [])
    first = lease(book, 1, 1)
    giant = ask(book, 2, 60_000)
    time.now_s += PATIENCE_S - 0.01
    small = ask(book, 3, 1)
    assert small.lease is None
    time.now_s += 0.02
    book.serve_line()
    assert small.lease is not None
    later = ask(book, 4, 1)
    assert later.lease is not None
    assert not giant.is_settled
    for one in (first, small.lease, later.lease):
        book.release(one)
    assert giant.lease is not None, "it still gets what it wants when that fits"


def test_line_moves_when_it_is_looked_at_after_a_second() -> None:
    time = Time()
    book = new_book(time, [])
    lease(book, 1, 1)
    ask(book, 2, 60_000)
    small = ask(book, 3, 1)
    book.serve_line()
    assert small.lease is None
    time.now_s += PATIENCE_S
    book.serve_line()
    assert small.lease is not None


def test_second_giant_request_keeps_its_own_first_second() -> None:
    time = Time()
    book = new_book(time, [])
    lease(book, 1, 1)
    ask(book, 2, 60_000)
    time.now_s += PATIENCE_S
    ask(book, 2, 60_000)
    small = ask(book, 3, 1)
    assert small.lease is None
    time.now_s += PATIENCE_S
    book.serve_line()
    assert small.lease is not None


class LeaseMachine(RuleBasedStateMachine):
    """Any order of calls, against what must be true of every book."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[Lease] = []
        self.time = Time()
        self.book = new_book(self.time, self.freed, runs_max=8)
        self.live: dict[int, Lease] = {}
        self.busy: set[int] = set()
        self.waiting: list[LeaseRequest] = []
        self.orphans: dict[int, float] = {}
        """When the sessions of runs ended that had them then."""

    def take_in(self) -> None:
        """Note what has been granted and freed since the last look."""
        for request in [one for one in self.waiting if one.is_settled]:
            self.waiting.remove(request)
            self.note(request)
        while self.freed:
            lease = self.freed.pop()
            assert lease.number not in self.busy, "freed under a job"
            ended_s = self.orphans.pop(lease.number, -QUARANTINE_S)
            assert self.time.now_s - ended_s >= QUARANTINE_S, "freed under a process"
            del self.live[lease.number]

    def note(self, request: LeaseRequest) -> None:
        if request.lease is not None:
            self.live[request.lease.number] = request.lease

    def pick(self, data: st.DataObject, *states: RunState) -> Lease | None:
        found = [one for one in self.live.values() if one.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(owner=OWNERS, blocks=st.integers(1, 40))
    def ask(self, owner: int, blocks: int) -> None:
        request = request_of(owner, blocks)
        self.book.ask(request)
        # Before him in line is who was granted by the same call.
        self.take_in()
        if request.is_settled:
            assert all(map(self.is_patient, self.waiting)), "somebody was overtaken"
            self.note(request)
        else:
            self.waiting.append(request)
            request.on_settled.append(lambda: self.check_turn(request))

    def is_patient(self, request: LeaseRequest) -> bool:
        return self.time.now_s - request.asked_s >= PATIENCE_S

    def check_turn(self, request: LeaseRequest) -> None:
        """Called when somebody in line gets a run."""
        before = self.waiting[: self.waiting.index(request)]
        overtaken = [one for one in before if not one.is_settled]
        assert all(map(self.is_patient, overtaken)), "somebody was overtaken"

    @rule(seconds=st.sampled_from([0.1, 0.5, PATIENCE_S]))
    def wait(self, seconds: float) -> None:
        """As whoever waits does: looks at the line when his first second is over. And as the agent
        does: at the runs whose quarantine is over."""
        self.time.now_s += seconds
        self.book.end_quarantine()
        self.book.serve_line()
        self.take_in()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.book.settle(request)
        assert request.is_settled
        self.take_in()

    @rule(data=st.data())
    def begin_fetch(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.LEASED)
        if lease is not None:
            self.book.begin_fetch(lease, lambda: None)
            self.busy.add(lease.number)

    @rule(data=st.data())
    def end_fetch(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.FETCHING, RunState.RELEASING)
        if lease is not None:
            self.busy.remove(lease.number)
            self.book.end_fetch(lease)
            self.take_in()

    @rule(data=st.data())
    def begin_store(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.LEASED)
        if lease is not None:
            self.book.begin_store(lease)
            self.busy.add(lease.number)

    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.STORING)
        if lease is not None:
            self.busy.remove(lease.number)
            self.book.end_store(lease)
            self.take_in()

    @rule(data=st.data())
    def begin_offer(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.LEASED)
        if lease is not None:
            self.book.begin_offer(lease)
            self.busy.add(lease.number)

    @rule(data=st.data(), owner=OWNERS)
    def take(self, data: st.DataObject, owner: int) -> None:
        lease = self.pick(data, RunState.OFFERED)
        if lease is not None:
            self.busy.remove(lease.number)
            self.book.take(lease, owner=owner, namespace=3)
            assert self.book.find(owner, lease.number) is lease

    @rule(data=st.data())
    def end_offer(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.OFFERED)
        if lease is not None:
            self.busy.remove(lease.number)
            self.book.end_offer(lease)
            self.take_in()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.pick(data, RunState.LEASED, RunState.FETCHING)
        if lease is not None:
            self.book.release(lease)
            self.take_in()

    @rule(owner=OWNERS)
    def end_owner(self, owner: int) -> None:
        for lease in self.live.values():
            if lease.owner == owner:
                self.orphans[lease.number] = self.time.now_s
        self.book.end_owner(owner)
        self.take_in()
        assert self.book.runs_of(owner) == 0

    @invariant()
    def runs_do_not_overlap(self) -> None:
        ranges = sorted((one.offset, one.layout.run_bytes) for one in self.live.values())
        for (first, length), (second, _) in pairwise(ranges):
            assert first + length <= second
        assert self.book.leased_bytes == sum(length for _, length in ranges)
        assert self.book.runs == len(ranges) <= 8

    @invariant()
    def runs_are_in_quarantine_after_their_sessions_only(self) -> None:
        for lease in self.live.values():
            if lease.state is RunState.QUARANTINED:
                assert lease.number in self.orphans

    def teardown(self) -> None:
        """No run stays in quarantine."""
        self.time.now_s += QUARANTINE_S
        self.book.end_quarantine()
        self.take_in()
        assert self.book.states()["quarantined"] == 0

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        """Who may have a run has one: the patient ones, and the first who is not."""
        assert self.book.waiting == len(self.waiting)
        if self.book.runs == 8:
            return
        for one in self.waiting:
            run_bytes = RunLayout(LAYOUT, one.blocks).run_bytes
            assert run_bytes > self.book.largest_free_bytes
            if not self.is_patient(one):
                break


LeaseMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
