"""What a client knows of an answer, and whom it asks next. No sockets, no clock."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client_answer import AnswerProgress, Route, WorkerLost
from engine.client_places import EnginePlaces, choose_worker, find_places
from engine.errors import EnginesUnavailable, InvalidRequest
from engine.sampling import GREEDY
from engine.worker.address import WorkerAddress, parse_address
from engine.worker.messages import (
    Failed,
    HandedOver,
    Refused,
    Resume,
    Submit,
    Tokens,
    unpack_tokens,
)

P1, P2, D1, D2, B1 = (WorkerAddress(host=name, port=1) for name in ("p1", "p2", "d1", "d2", "b1"))
NOBODY: Counter[WorkerAddress] = Counter()


def progress_of(max_tokens: int = 10, stop_ids: frozenset[int] = frozenset()) -> AnswerProgress:
    return AnswerProgress(
        prompt_ids=(1, 2),
        max_tokens=max_tokens,
        sampling=GREEDY,
        stop_ids=stop_ids,
        ttl_class="chat",
    )


def route_of(*, failures_max: int = 6) -> Route:
    places = EnginePlaces(prefill=(P1, P2), decode=(D1, D2))
    return Route(places=places, failures_max=failures_max)


def busy() -> Refused:
    return Refused(reason="busy", cause="busy")


# --- the answer so far


@given(st.data())
def test_no_position_is_skipped_or_given_twice_whatever_workers_say(data: st.DataObject) -> None:
    right = list(range(100, 112))
    progress, given_out = progress_of(len(right)), list[int]()
    for _ in range(data.draw(st.integers(1, 20))):
        position = data.draw(st.integers(0, 14))
        tokens = tuple(right[position : position + data.draw(st.integers(0, 5))])
        if data.draw(st.integers(0, 9)) == 0:
            tokens = (*tokens[:-1], 7)
        try:
            given_out += progress.accept(Tokens(position=position, token_ids=tokens))
        except WorkerLost:
            continue
        assert progress.token_ids == given_out
        wrong = given_out.index(7) if 7 in given_out else len(given_out)
        assert given_out[:wrong] == right[:wrong]
        if 7 in given_out:
            return


@pytest.mark.parametrize(
    ("position", "token_ids", "why"),
    [
        (3, (5,), "it gave token 3 of the answer, expected 2"),
        (0, (9,), "its tokens from 0 on differ"),
        (1, (9, 5), "its tokens from 1 on differ"),
        (2, (5, 5, 5), "behind the end"),
    ],
)
def test_worker_that_says_what_cannot_be_is_lost(
    position: int, token_ids: tuple[int, ...], why: str
) -> None:
    progress = progress_of(4)
    progress.accept(Tokens(position=0, token_ids=(7, 8)))
    with pytest.raises(WorkerLost, match=why):
        progress.accept(Tokens(position=position, token_ids=token_ids))
    assert progress.token_ids == [7, 8]


def test_submission_goes_on_where_the_answer_is() -> None:
    progress = progress_of()
    progress.accept(Tokens(position=0, token_ids=(7,), replay_first=128))
    progress.accept(Tokens(position=0, token_ids=(7, 8)))
    asked = progress.submission()
    assert unpack_tokens(asked.answered_ids) == (7, 8)
    assert asked.replay_first == 128


def test_end_of_an_answer_is_seen_in_its_tokens() -> None:
    progress = progress_of(3, frozenset({9}))
    assert progress.finish_reason is None
    progress.accept(Tokens(position=0, token_ids=(9,)))
    assert progress.finish_reason == "stop"
    longer = progress_of(2)
    longer.accept(Tokens(position=0, token_ids=(1, 2)))
    assert longer.finish_reason == "length"


# --- the route


def test_prompt_goes_to_a_prefill_worker_and_its_ticket_to_a_decode_worker() -> None:
    route, progress = route_of(), progress_of()
    assert route.next_worker(NOBODY) == P1
    assert isinstance(route.next_message(progress), Submit)
    route.note_hand_over(P1, HandedOver(ticket=b"t"))
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
    route.note_hand_over(P1, HandedOver(ticket=b"t"))
    route.note_refusal(D1, busy())
    assert route.next_worker(NOBODY) == D2
    route.note_fault(D2, WorkerLost("no connection"), was_begun=False)
    assert route.next_worker(NOBODY) == D1
    assert isinstance(route.next_message(progress), Resume)


@pytest.mark.parametrize("how", ["lost", "failed", "refused"])
def test_request_is_run_again_when_its_ticket_is_no_good(how: str) -> None:
    route, progress = route_of(), progress_of()
    route.note_hand_over(P1, HandedOver(ticket=b"t"))
    if how == "refused":
        route.note_refusal(D1, Refused(reason="used", cause="ticket"))
    else:
        error = WorkerLost("gone") if how == "lost" else Failed(reason="drained")
        route.note_fault(D1, error, was_begun=True)
    assert route.next_worker(NOBODY) in (P1, P2)
    assert isinstance(route.next_message(progress), Submit)


def test_worker_that_sends_a_sequence_away_is_not_the_first_to_get_it_back() -> None:
    route = route_of()
    route.note_hand_over(P1, HandedOver(ticket=b"t"))
    route.note_hand_over(D1, HandedOver(ticket=b"u"))
    assert route.next_worker(Counter({D2: 9})) == D2


def test_decode_worker_takes_the_prompt_when_it_cannot_be_handed_over() -> None:
    route, progress = route_of(), progress_of()
    route.note_hand_over(P1, HandedOver(ticket=None))
    assert route.next_worker(NOBODY) == D1
    assert isinstance(route.next_message(progress), Submit)


def test_decode_worker_takes_the_prompt_when_all_prefill_workers_are_lost() -> None:
    route = route_of()
    for place in (P1, P2):
        route.note_fault(place, WorkerLost("gone"), was_begun=False)
    assert route.next_worker(NOBODY) == D1


def test_request_is_given_up_after_too_many_faults_and_says_what_was_tried() -> None:
    route = route_of(failures_max=2)
    route.note_refusal(P1, busy())
    route.note_fault(P1, WorkerLost("gone"), was_begun=False)
    route.note_fault(P2, Failed(reason="no room"), was_begun=True)
    with pytest.raises(EnginesUnavailable) as caught:
        route.next_worker(NOBODY)
    assert caught.value.tried == ["p1:1: busy", "p1:1: gone", "p2:1: no room"]


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


# --- places


@pytest.mark.parametrize(
    "places", [{}, {"prefill": (P1,)}, {"decode": (D1,)}, {"prefill": (), "both": ()}]
)
def test_places_without_a_way_to_an_answer_are_refused(
    places: dict[str, tuple[WorkerAddress, ...]],
) -> None:
    with pytest.raises(InvalidRequest, match="one for each role"):
        EnginePlaces(**places)


def test_places_are_found_in_a_folder_of_sockets_or_at_an_address(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    for name in ("p01.sock", "p02.sock", "d01.sock", "b01.sock", "p01.sock.lock", "x.sock"):
        (folder / name).touch()
    found = find_places(str(folder))
    roles = (found.prefill, found.decode, found.both)
    names = [[place.path.name for place in role if place.path] for role in roles]
    assert names == [["p01.sock", "p02.sock"], ["d01.sock"], ["b01.sock"]]
    assert find_places("host:80").both == (WorkerAddress(host="host", port=80),)
    with pytest.raises(InvalidRequest, match="engine workers: given 0 prefill, 0 decode, 0 both"):
        find_places(str(tmp_path_factory.mktemp("empty")))


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:65536", "host:-1", "h:1x"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a path with a / in it"):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:80", "/a/b.sock", "host.name:65535"])
def test_address_is_written_as_it_was_read(text: str) -> None:
    assert str(parse_address(text)) == text


def test_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a path of 201 bytes"):
        parse_address("/" + "d" * 200)
