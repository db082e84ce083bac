"""Offers of runs: each is taken once or free again, in time, and never too many of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.agent.leases import Lease, RunState
from kvstore.agent.offers import OfferBook, OfferedRun
from kvstore.agent.replies import RequestRefused
from kvstore.arena.run_layout import RunLayout
from kvstore.window.record import layout_prefix_of

from .test_leases import ARENA_BYTES, LAYOUT, OWNERS, Time, lease, new_book

NAMESPACE = bytes(range(16))
PREFIX = layout_prefix_of(LAYOUT)
RUNS_MAX = 6
BLOCKS_MAX = 5
DESK_BYTES = 1 << 20
assert 2 * RUNS_MAX * RunLayout(LAYOUT, BLOCKS_MAX).run_bytes < DESK_BYTES, "a gap for each"


class Tickets:
    """16 bytes that count."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self) -> bytes:
        self.given += 1
        return self.given.to_bytes(16, "little")


class Desk:
    """A lease book with its offers, and what has become free."""

    def __init__(self, *, bytes_max: int = ARENA_BYTES, offers_max: int = 8) -> None:
        self.time = Time()
        self.freed: list[Lease] = []
        self.leases = new_book(self.time, self.freed, size_bytes=DESK_BYTES)
        self.offers = OfferBook(
            self.leases,
            clock=lambda: self.time.now_s,
            make_ticket=Tickets(),
            bytes_max=bytes_max,
            offers_max=offers_max,
        )

    def offer(self, blocks: int = 2, *, ttl_s: float = 30.0) -> tuple[Lease, OfferedRun]:
        found = lease(self.leases, 1, blocks)
        ticket = self.offers.offer(found, NAMESPACE, ttl_s)
        return found, OfferedRun(ticket, NAMESPACE, PREFIX, blocks)

    def take(self, wanted: OfferedRun) -> Lease | None:
        return self.offers.take(wanted, owner=2, namespace=5)


def test_run_is_taken_once() -> None:
    desk = Desk()
    found, wanted = desk.offer()
    assert desk.take(wanted) is found
    assert (found.owner, found.namespace, found.state) == (2, 5, RunState.LEASED)
    assert desk.take(wanted) is None
    assert not desk.offers.give_away(wanted)
    assert not desk.offers.withdraw(wanted.ticket)
    assert desk.freed == []


def test_run_is_free_when_another_host_takes_it() -> None:
    desk = Desk()
    found, wanted = desk.offer()
    assert desk.offers.find(wanted) is found
    assert desk.offers.give_away(wanted)
    assert desk.freed == [found]
    assert not desk.offers.give_away(wanted)
    assert desk.take(wanted) is None


def test_run_is_free_when_its_offer_is_withdrawn() -> None:
    desk = Desk()
    found, wanted = desk.offer()
    assert desk.offers.withdraw(wanted.ticket)
    assert desk.freed == [found]
    assert desk.take(wanted) is None


def test_run_cannot_be_taken_when_its_time_is_up_and_is_free_at_the_next_look() -> None:
    desk = Desk()
    found, wanted = desk.offer(ttl_s=3.0)
    _, later = desk.offer(ttl_s=4.0)
    desk.time.now_s += 2.9
    desk.offers.expire()
    assert desk.offers.find(wanted) is found
    desk.time.now_s += 0.2
    assert desk.take(wanted) is None
    assert not desk.offers.give_away(wanted)
    assert desk.freed == []
    desk.offers.expire()
    assert desk.freed == [found]
    assert desk.take(later) is not None


@pytest.mark.parametrize(
    "lie",
    [
        lambda offer: offer._replace(ticket=bytes(16)),
        lambda offer: offer._replace(namespace_id=bytes(16)),
        lambda offer: offer._replace(layout_prefix=bytes(16)),
        lambda offer: offer._replace(blocks=3),
    ],
    ids=["ticket", "namespace", "layout", "blocks"],
)
def test_nothing_is_found_by_one_who_is_wrong_about_the_offer(
    lie: Callable[[OfferedRun], OfferedRun],
) -> None:
    desk = Desk()
    found, wanted = desk.offer()
    other = lie(wanted)
    assert desk.offers.find(other) is None
    assert desk.take(other) is None
    assert not desk.offers.give_away(other)
    assert desk.take(wanted) is found


def test_offer_is_refused_and_the_run_stays_leased_when_there_are_too_many() -> None:
    desk = Desk(offers_max=2)
    _, first = desk.offer(1)
    desk.offer(1)
    found = lease(desk.leases, 1, 1)
    with pytest.raises(RequestRefused, match="2 runs are offered already"):
        desk.offers.offer(found, NAMESPACE, 30.0)
    assert desk.leases.find(1, found.number) is found
    assert desk.offers.counters.refused == 1
    assert desk.take(first) is not None
    assert desk.offers.offer(found, NAMESPACE, 30.0)


def test_offer_is_refused_when_those_beside_the_largest_would_have_too_many_bytes() -> None:
    run_bytes = RunLayout(LAYOUT, 4).run_bytes
    desk = Desk(bytes_max=run_bytes)
    desk.offer(4)
    desk.offer(4)
    for blocks in (1, 5):  # smaller or larger: there are two of more together then
        found = lease(desk.leases, 1, blocks)
        with pytest.raises(
            RequestRefused,
            match=f"{2 * run_bytes} bytes of runs are offered already, at most {run_bytes} beside",
        ):
            desk.offers.offer(found, NAMESPACE, 30.0)
        assert found.state is RunState.LEASED
        desk.leases.release(found)


@pytest.mark.parametrize("is_large_first", [False, True])
def test_two_runs_of_a_long_sequence_are_on_offer_together_in_any_order(
    is_large_first: bool,
) -> None:
    """Blocks of more bytes than allowed, and its state: else it could not be handed over."""
    desk = Desk(bytes_max=RunLayout(LAYOUT, 1).run_bytes)
    sizes = (10, 1) if is_large_first else (1, 10)
    offers = [desk.offer(blocks) for blocks in sizes]
    assert [desk.take(wanted) for _, wanted in offers] == [found for found, _ in offers]


def test_offers_are_described_with_what_became_of_them() -> None:
    desk = Desk()
    wanted = [desk.offer(1, ttl_s=5.0)[1] for _ in range(5)]
    desk.take(wanted[0])
    desk.offers.give_away(wanted[1])
    desk.offers.withdraw(wanted[2].ticket)
    run_bytes = desk.leases.leased_bytes // 3
    assert desk.offers.describe() == {
        "open": 2,
        "open_bytes": 2 * run_bytes,
        "made": 5,
        "refused": 0,
        "taken": 1,
        "sent": 1,
        "withdrawn": 1,
        "expired": 0,
    }
    desk.time.now_s += 5.0
    desk.offers.expire()
    assert desk.offers.describe()["expired"] == 2
    assert desk.offers.describe()["open_bytes"] == 0


class OfferMachine(RuleBasedStateMachine):
    """Any order of calls: every run is in one hand, and no byte is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(offers_max=4)
        self.open: dict[OfferedRun, tuple[Lease, float]] = {}
        self.gone: list[OfferedRun] = []
        self.leased: dict[int, Lease] = {}
        self.quarantined: list[Lease] = []

    def any_offer(self, data: st.DataObject) -> OfferedRun | None:
        known = [*self.open, *self.gone]
        return data.draw(st.sampled_from(known)) if known else None

    def close(self, wanted: OfferedRun) -> Lease | None:
        """The run if it was to be had."""
        if wanted not in self.open:
            return None
        found, until_s = self.open[wanted]
        if until_s <= self.desk.time.now_s:
            return None
        del self.open[wanted]
        self.gone.append(wanted)
        return found

    def is_freed(self, expected: Lease) -> bool:
        freed, self.desk.freed[:] = list(self.desk.freed), []
        return freed == [expected]

    @rule(owner=OWNERS, blocks=st.integers(1, BLOCKS_MAX))
    def lease_run(self, owner: int, blocks: int) -> None:
        if self.desk.leases.runs < RUNS_MAX:
            found = lease(self.desk.leases, owner, blocks)
            self.leased[found.number] = found

    @rule(data=st.data(), ttl_s=st.sampled_from([0.5, 1.0, 10.0]))
    def offer(self, data: st.DataObject, ttl_s: float) -> None:
        if not self.leased:
            return
        number = data.draw(st.sampled_from(sorted(self.leased)))
        found = self.leased[number]
        if len(self.open) == 4:
            with pytest.raises(RequestRefused):
                self.desk.offers.offer(found, NAMESPACE, ttl_s)
            return
        ticket = self.desk.offers.offer(found, NAMESPACE, ttl_s)
        wanted = OfferedRun(ticket, NAMESPACE, PREFIX, found.layout.blocks)
        self.open[wanted] = (self.leased.pop(number), self.desk.time.now_s + ttl_s)

    @rule(data=st.data(), owner=OWNERS)
    def take(self, data: st.DataObject, owner: int) -> None:
        if (wanted := self.any_offer(data)) is not None:
            expected = self.close(wanted)
            assert self.desk.offers.take(wanted, owner=owner, namespace=1) is expected
            if expected is not None:
                assert expected.owner == owner
                self.leased[expected.number] = expected

    @rule(data=st.data())
    def give_away(self, data: st.DataObject) -> None:
        if (wanted := self.any_offer(data)) is not None:
            expected = self.close(wanted)
            assert self.desk.offers.give_away(wanted) is (expected is not None)
            assert expected is None or self.is_freed(expected)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if (wanted := self.any_offer(data)) is not None:
            expected = self.close(wanted)
            assert self.desk.offers.withdraw(wanted.ticket) is (expected is not None)
            assert expected is None or self.is_freed(expected)

    @rule(owner=OWNERS)
    def end_session(self, owner: int) -> None:
        for number in [one.number for one in self.leased.values() if one.owner == owner]:
            self.quarantined.append(self.leased.pop(number))
        self.desk.leases.end_owner(owner)
        assert self.desk.freed == []

    @rule(seconds=st.sampled_from([0.2, 0.7, 3.0]))
    def wait(self, seconds: float) -> None:
        self.desk.time.now_s += seconds
        self.desk.offers.expire()
        due = [one for one, (_, until_s) in self.open.items() if until_s <= self.desk.time.now_s]
        freed = [self.open.pop(wanted)[0] for wanted in due]
        assert self.desk.freed == freed
        self.desk.freed.clear()
        self.gone += due
        self.desk.leases.end_quarantine()
        while self.desk.freed:
            self.quarantined.remove(self.desk.freed.pop())

    @invariant()
    def everything_adds_up(self) -> None:
        offered_runs = [found for found, _ in self.open.values()]
        runs = [*self.leased.values(), *self.quarantined, *offered_runs]
        assert self.desk.leases.runs == len(runs)
        assert self.desk.leases.leased_bytes == sum(one.layout.run_bytes for one in runs)
        states = self.desk.leases.states()
        assert states["offered"] == len(self.open)
        described = self.desk.offers.describe()
        assert described["open"] == len(self.open)
        offered = [found.layout.run_bytes for found in offered_runs]
        assert described["open_bytes"] == sum(offered)
        counters = self.desk.offers.counters
        ended = counters.taken + counters.sent + counters.withdrawn + counters.expired
        assert counters.made == ended + len(self.open)


OfferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOfferMachine = OfferMachine.TestCase
