"""What a client knows of an answer, and what it believes a worker. No sockets, no clock."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client.answer import AnswerProgress, WorkerLost
from engine.sampling import GREEDY
from engine.worker.messages import Finished, Tokens, unpack_tokens


def progress_of(max_tokens: int = 10, stop_ids: frozenset[int] = frozenset()) -> AnswerProgress:
    return AnswerProgress(
        prompt_ids=(1, 2),
        max_tokens=max_tokens,
        sampling=GREEDY,
        stop_ids=stop_ids,
        ttl_class="chat",
    )


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
        (2, (6, 5), "behind the end"),
        (2, (), "no token behind the first 2"),
        (1, (8,), "no token behind the first 2"),
    ],
)
def test_worker_that_says_what_cannot_be_is_lost(
    position: int, token_ids: tuple[int, ...], why: str
) -> None:
    progress = progress_of(4, frozenset({6}))
    progress.accept(Tokens(position=0, token_ids=(7, 8)))
    with pytest.raises(WorkerLost, match=why):
        progress.accept(Tokens(position=position, token_ids=token_ids))
    assert progress.token_ids == [7, 8]


def test_submission_goes_on_where_the_answer_is() -> None:
    progress = progress_of()
    progress.accept(Tokens(position=0, token_ids=(7,), replay_first=128))
    progress.accept(Tokens(position=0, token_ids=(7, 8), replay_first=256))
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
    longer.finish(Finished(reason="length"))


def test_answer_that_the_context_ends_is_whole_when_its_worker_says_so() -> None:
    progress = progress_of(9)
    progress.accept(Tokens(position=0, token_ids=(1, 2)))
    progress.finish(Finished(reason="length"))
    assert progress.finish_reason == "length"


@pytest.mark.parametrize(("known", "reason"), [((), "length"), ((), "stop"), ((1, 2), "stop")])
def test_worker_that_ends_an_answer_too_early_is_lost(
    known: tuple[int, ...], reason: Literal["length", "stop"]
) -> None:
    progress = progress_of(9, frozenset({3}))
    if known:
        progress.accept(Tokens(position=0, token_ids=known))
    with pytest.raises(WorkerLost, match=f"ended the answer after {len(known)} tokens"):
        progress.finish(Finished(reason=reason))
    assert progress.finish_reason is None
