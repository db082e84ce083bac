"""Conversations of several turns, shaped by the lengths of a real trace. No trace is read here.

The deciles are those of the 385 sessions of the Claude Code traces (github.com/callanjfox/
kv-cache-tester) whose first prompt has at most 32,768 tokens, sub-agents left out, of their
requests up to that length: tokens of first prompts, tokens that a turn adds beyond the answer
before it (1 where the prompt shrank), and tokens of answers; values at 5, 15, ... 95 %. A turn's
length is drawn among the ten. Everything is divided by `scale`; blocks are not, so a hit, which
ends 134 to 261 tokens before the prompt's end, is a smaller share of a prompt than in the trace.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_PROMPT_DECILES = (
    11_743,
    14_579,
    16_591,
    17_796,
    18_528,
    19_242,
    19_847,
    20_670,
    21_696,
    26_263,
)
ADDED_DECILES = (1, 2, 27, 56, 134, 230, 440, 935, 2_184, 6_092)
ANSWER_DECILES = (79, 101, 117, 133, 161, 202, 254, 320, 446, 1_097)
TURNS = 7
"""The mean of these sessions, up to 32,768 tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that a user adds, and tokens of the answer."""

    added_ids: tuple[int, ...]
    answer_tokens: int


def make_sessions(
    *, sessions: int, turns: int, scale: int, tokens_max: int, token_ids: Sequence[int], seed: int
) -> list[list[Turn]]:
    """Turns of each session; one ends before it would grow beyond `tokens_max`.

    Texts are drawn from `token_ids`; no two sessions share a prefix.
    """
    rng = random.Random(seed)
    return [
        _make_session(rng, turns=turns, scale=scale, tokens_max=tokens_max, token_ids=token_ids)
        for _ in range(sessions)
    ]


def _make_session(
    rng: random.Random, *, turns: int, scale: int, tokens_max: int, token_ids: Sequence[int]
) -> list[Turn]:
    session: list[Turn] = []
    total = 0
    for number in range(turns):
        deciles = ADDED_DECILES if number else FIRST_PROMPT_DECILES
        added = -(-rng.choice(deciles) // scale)
        answer = -(-rng.choice(ANSWER_DECILES) // scale)
        total += added + answer
        if total > tokens_max:
            break
        session.append(Turn(tuple(rng.choices(token_ids, k=added)), answer))
    return session
