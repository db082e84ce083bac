"""What a store that lost nothing has of a prompt, and the reply of an engine in another process."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.replies import expect_hit_tokens, read_reply
from tests.demo.replies import make_reply


@pytest.mark.parametrize(
    ("prompt_tokens", "stored_tokens", "expected"),
    [
        (127, 1_000, 0),
        (128, 1_000, 0),
        (129, 1_000, 128),
        (256, 1_000, 128),
        (257, 1_000, 256),
        (257, 256, 256),
        (257, 255, 128),
        (1_000, 127, 0),
    ],
)
def test_hit_is_whole_blocks_and_leaves_the_last_token_of_a_prompt(
    prompt_tokens: int, stored_tokens: int, expected: int
) -> None:
    stored = make_reply(prompt_ids=range(stored_tokens), token_ids=())
    assert expect_hit_tokens(range(prompt_tokens), [stored]) == expected


def test_hit_reaches_into_an_earlier_answer() -> None:
    earlier = make_reply(prompt_ids=range(120), token_ids=range(120, 260))
    assert expect_hit_tokens([*range(260), 7, 8], [earlier]) == 256


def test_nothing_is_hit_when_nothing_was_asked_before() -> None:
    assert expect_hit_tokens(range(1_000), []) == 0


@given(st.lists(st.integers(0, 1), max_size=400), st.integers(0, 400), st.integers(0, 400))
def test_hit_never_goes_beyond_what_is_shared(tail: list[int], shared: int, own: int) -> None:
    earlier = make_reply(prompt_ids=[5] * shared + [0] + tail, token_ids=())
    prompt = [5] * shared + [1] * own
    hit = expect_hit_tokens(prompt, [earlier])
    assert hit % 128 == 0
    assert hit <= min(shared, max(len(prompt) - 1, 0)) < hit + 128


def test_reply_is_read_from_what_the_engine_prints() -> None:
    printed = {
        "answer": "Yes.",
        "token_ids": [4, 2],
        "prompt_token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "matched_tokens": 0,
        "hit_tokens": 0,
        "rejected_shards": 6,
        "timings": {
            "match_s": 0.1,
            "fetch_s": 0.2,
            "prefill_s": 0.3,
            "ttft_s": 0.7,
            "decode_s": 1.0,
        },
        "blocks": {"stored": 1, "known": 2, "failed": 3, "dropped": 4, "pending": 5},
        "store_errors": 9,
    }
    reply = read_reply(json.loads(json.dumps(printed)))
    assert (reply.text, reply.token_ids, reply.prompt_tokens) == ("Yes.", (4, 2), 3)
    assert (reply.match_s, reply.fetch_s, reply.prefill_s, reply.ttft_s) == (0.1, 0.2, 0.3, 0.7)
    assert (reply.blocks_stored, reply.blocks_failed) == (1, 12)
    assert (reply.rejected_shards, reply.store_errors) == (6, 9)
