"""Conversations of the load: their lengths are those of the deciles, and they stay in bounds."""

import statistics

from benchmarks.session_load import (
    ADDED_DECILES,
    ANSWER_DECILES,
    FIRST_PROMPT_DECILES,
    make_sessions,
)

TOKEN_IDS = range(300, 1_000)


def test_lengths_are_the_deciles_divided_by_the_scale() -> None:
    sessions = make_sessions(
        sessions=400, turns=7, scale=16, tokens_max=10**6, token_ids=TOKEN_IDS, seed=1
    )
    firsts = [len(session[0].added_ids) for session in sessions]
    assert set(firsts) == {-(-tokens // 16) for tokens in FIRST_PROMPT_DECILES}
    later = [turn for session in sessions for turn in session[1:]]
    assert {len(turn.added_ids) for turn in later} == {-(-n // 16) for n in ADDED_DECILES}
    assert {turn.answer_tokens for turn in later} == {-(-n // 16) for n in ANSWER_DECILES}
    assert abs(statistics.mean(firsts) - statistics.mean(FIRST_PROMPT_DECILES) / 16) < 40


def test_sessions_end_before_they_are_too_long_and_share_no_prefix() -> None:
    sessions = make_sessions(
        sessions=50, turns=9, scale=16, tokens_max=2_048, token_ids=TOKEN_IDS, seed=2
    )
    lengths = [sum(len(turn.added_ids) + turn.answer_tokens for turn in s) for s in sessions]
    assert max(lengths) <= 2_048
    assert {len(session) for session in sessions} > {9}
    assert len({session[0].added_ids[:8] for session in sessions}) == 50


def test_equal_seeds_give_equal_sessions() -> None:
    one, other, third = (
        make_sessions(
            sessions=3, turns=3, scale=32, tokens_max=2_048, token_ids=TOKEN_IDS, seed=seed
        )
        for seed in (5, 5, 6)
    )
    assert one == other
    assert one != third
