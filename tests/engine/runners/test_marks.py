"""Marks say what can be of a sequence with these tokens, and nothing else is taken for marks."""

from __future__ import annotations

import pytest
import xxhash

from engine.errors import HandoverRefused
from engine.request import Request
from engine.runners.marks import FACTS, MAGIC, PREFIX, VERSION, read_marks, write_marks
from engine.sequence import Sequence
from kvstore.policy import MISS, HitPlan


def sequence_of(tokens: int, computed: int = 0, hit: HitPlan = MISS) -> Sequence:
    sequence = Sequence(Request(request_id="r", prompt_ids=[3] * tokens, max_tokens=9))
    sequence.computed_tokens, sequence.hit = computed, hit
    return sequence


def marks_of(*facts: int) -> bytes:
    rest = FACTS.pack(*facts)
    return PREFIX.pack(MAGIC, VERSION, xxhash.xxh3_64_intdigest(rest)) + rest


@pytest.mark.parametrize(
    "hit", [MISS, HitPlan(128, 0, None), HitPlan(256, 0, 256), HitPlan(128, 128, None)]
)
def test_marks_give_back_what_was_computed_and_the_hit(hit: HitPlan) -> None:
    marks = write_marks(sequence_of(300, 299, hit), b"of the family")
    computed, read, family = read_marks(marks, sequence_of(300))
    assert (computed, read, bytes(family)) == (299, hit, b"of the family")


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ((301, 0, 0, 0), "computed tokens"),
        ((299, 100, 0, 0), "hit tokens"),
        ((299, 128, 64, 0), "replay tokens"),
        ((299, 256, 128, 0), "hit and replay tokens"),
        ((255, 128, 128, 0), "hit and replay tokens"),
        ((299, 0, 0, 1), "whether there was a window"),
        ((299, 128, 128, 1), "whether there was a window"),
        ((299, 128, 0, 2), "whether there was a window"),
    ],
)
def test_marks_that_cannot_be_of_the_sequence_are_refused_by_name(
    facts: tuple[int, ...], what: str
) -> None:
    with pytest.raises(HandoverRefused) as refused:
        read_marks(marks_of(*facts), sequence_of(300))
    assert refused.value.what == what
