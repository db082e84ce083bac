"""Whom a client asks next, and what. No sockets, no clock."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client import EnginePlaces
from engine.client.answer import AnswerProgress, WorkerAbsent, WorkerLost
from engine.client.route import Route, choose_worker
from engine.client.trials import KEPT_MAX, Trials
from engine.errors import EnginesUnavailable
from engine.sampling import GREEDY
from engine.worker.address import WorkerAddress
from engine.worker.messages import Failed, HandedOver, Refused, Resume, Submit

P1, P2, D1, D2 = (WorkerAddress(host=name, port=1) for name in ("p1", "p2", "d1", "d2"))
NOBODY: Counter[WorkerAddress] = Counter()


def progress_of() -> AnswerProgress:
    return AnswerProgress(
        prompt_ids=(1, 2),
        max_tokens=10,
        sampling=GREEDY,
        stop_ids=frozenset(),
        ttl_class="chat",
    )


def route_of(*, faults_max: int = 6) -> Route:
    places = EnginePlaces(prefill=(P1, P2), decode=(D1, D2))
    return Route(places=places, faults_max=faults_max)


def busy() -> Refused:
    return Refused(reason="busy", cause="busy")


def hand_over(route: Route, place: WorkerAddress, ticket: bytes | None) -> None:
    route.note_progress(1)
    route.note_hand_over(place, HandedOver(ticket=ticket), has_grown=True)


def test_prompt_goes_to_a_prefill_worker_and_its_ticket_to_a_decode_worker() -> None:
    route, progress = route_of(), progress_of()
    assert route.next_worker(NOBODY) == P1
    assert isinstance(route.next_message(progress), Submit)
    hand_over(route, P1, b"t")
    assert route.next_worker(NOBODY) == D1
    assert route.next_message(progress) == Resume(ticket=b"t")
    assert route.moves == 1


def test_worker_with_the_fewest_requests_is_asked_and_a_lost_one_last() -> None:
    assert route_of().next_worker(Counter({P1: 2, P2: 1})) == P2
    assert route_of().next_worker(Counter({P2: 5}), {P1}) == P2
    route = route_of()
    route.note_fault(P1, WorkerLost("gone"), was_begun=False)
    assert route.next_worker(Counter({P2: 5}), {P2}) == P2


def test_ticket_stays_good_when_the_worker_was_busy_or_never_answered() -> None:
    route, progress = route_of(), progress_of()
    hand_over(route, P1, b"t")
    route.note_refusal(D1, busy())
    assert route.next_worker(NOBODY) == D2
    route.note_fault(D2, WorkerLost("no connection"), was_begun=False)
    assert route.next_worker(NOBODY) == D1
    assert isinstance(route.next_message(progress), Resume)


@pytest.mark.parametrize("how", ["lost", "failed", "refused"])
def test_request_is_run_again_when_its_ticket_is_no_good(how: str) -> None:
    route, progress = route_of(), progress_of()
    hand_over(route, P1, b"t")
    if how == "refused":
        route.note_refusal(D1, Refused(reason="used", cause="ticket"))
    else:
        error = WorkerLost("gone") if how == "lost" else Failed(reason="drained")
        route.note_fault(D1, error, was_begun=True)
    assert route.next_worker(NOBODY) in (P1, P2)
    assert isinstance(route.next_message(progress), Submit)


def test_worker_that_sends_a_sequence_away_is_not_the_first_to_get_it_back() -> None:
    route = route_of()
    hand_over(route, P1, b"t")
    hand_over(route, D1, b"u")
    assert route.next_worker(Counter({D2: 9})) == D2


def test_decode_worker_takes_the_prompt_when_it_cannot_be_handed_over() -> None:
    route, progress = route_of(), progress_of()
    hand_over(route, P1, None)
    assert route.next_worker(NOBODY) == D1
    assert isinstance(route.next_message(progress), Submit)


def test_decode_worker_takes_the_prompt_when_all_prefill_workers_are_lost() -> None:
    route = route_of()
    for place in (P1, P2):
        route.note_fault(place, WorkerLost("gone"), was_begun=False)
    assert route.next_worker(NOBODY) == D1


def test_decode_worker_takes_the_prompt_when_all_prefill_workers_drain() -> None:
    route = route_of()
    route.note_fault(P1, WorkerLost("gone"), was_begun=False)
    route.note_refusal(P2, busy())
    assert route.next_worker(NOBODY) == P2
    route.note_refusal(P2, Refused(reason="the worker is draining", cause="draining"))
    assert route.next_worker(NOBODY) == D1


def test_nobody_is_waited_for_until_all_were_asked_in_vain() -> None:
    route = route_of()
    rounds = []
    for refuse in (P1, P2, P1):
        route.note_refusal(refuse, busy())
        rounds.append(route.vain_rounds)
    hand_over(route, P1, b"t")
    route.note_fault(D1, WorkerLost("gone"), was_begun=False)
    assert (rounds, route.vain_rounds) == ([0, 1, 2], 0)


def test_request_that_is_only_passed_on_is_given_up() -> None:
    route = route_of(faults_max=4)
    said = ((P1, None, "arena is full"), (D1, b"t", ""), (D2, None, ""), (D2, b"u", ""))
    for place, ticket, reason in said:
        route.next_worker(NOBODY)
        route.note_hand_over(place, HandedOver(ticket=ticket, reason=reason), has_grown=False)
    with pytest.raises(EnginesUnavailable) as caught:
        route.next_worker(NOBODY)
    assert caught.value.tried == [
        "p1:1: not handed over: arena is full",
        "d1:1: handed over without a token",
        "d2:1: not handed over: it does not say why",
        "d2:1: handed over without a token",
    ]


def test_request_is_given_up_after_too_many_faults_and_says_what_was_tried() -> None:
    route = route_of(faults_max=2)
    route.note_refusal(P1, busy())
    route.note_fault(P1, WorkerLost("gone"), was_begun=False)
    route.note_fault(P2, Failed(reason="no room"), was_begun=True)
    with pytest.raises(EnginesUnavailable, match="answers after 2 faults: p1:1: busy") as caught:
        route.next_worker(NOBODY)
    assert caught.value.tried == ["p1:1: busy", "p1:1: gone", "p2:1: no room"]


def test_absent_workers_are_no_fault_of_the_request_and_are_named_once() -> None:
    route = route_of(faults_max=2)
    for _ in range(40):
        for place in (D1, D2):
            route.note_fault(place, WorkerAbsent("no connection"), was_begun=False)
    assert route.next_worker(NOBODY) in (P1, P2)
    assert route.trials.total == 80
    assert route.trials.describe() == tuple(
        f"{place}: no connection (40 times)" for place in (D1, D2)
    )


def test_faults_are_forgotten_when_a_worker_goes_on_with_the_answer_and_not_for_one_token() -> None:
    """A prefill worker that is the only one to do anything computes the prompt for each token."""
    route = route_of(faults_max=2)
    route.note_fault(D1, WorkerLost("gone"), was_begun=True)
    route.note_progress(2)
    for _ in range(2):
        route.next_worker(NOBODY)
        route.note_progress(1)
        route.note_refusal(D1, Refused(reason="no room", cause="ticket"))
    with pytest.raises(EnginesUnavailable, match="no room"):
        route.next_worker(NOBODY)


def test_what_was_tried_is_bounded() -> None:
    trials = Trials()
    for number in range(1000):
        trials.note(P1, f"fault {number}")
    trials.note(P1, "fault 990")
    assert trials.total == 1001
    assert len(trials.describe()) == KEPT_MAX
    assert trials.describe()[-1] == "p1:1: fault 990 (2 times)"


@given(
    st.dictionaries(st.sampled_from([P1, P2, D1]), st.integers(0, 3)),
    st.dictionaries(st.sampled_from([P1, P2, D1]), st.integers(0, 3)),
)
def test_chosen_worker_failed_least(
    failures: dict[WorkerAddress, int], in_flight: dict[WorkerAddress, int]
) -> None:
    places = (P1, P2, D1)
    chosen = choose_worker(places, in_flight=in_flight, failures=failures, refusals={})
    assert failures.get(chosen, 0) == min(failures.get(place, 0) for place in places)
