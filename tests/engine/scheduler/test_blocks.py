"""Blocks of a sequence: for the tokens known, and for the one that its next pass adds."""

import pytest

from engine.scheduler.blocks import blocks_needed, may_begin


@pytest.mark.parametrize(
    ("known", "tokens_max", "blocks"),
    [(1, 500, 1), (127, 500, 1), (128, 500, 2), (255, 500, 2), (256, 500, 3), (256, 256, 2)],
)
def test_token_in_flight_has_its_place_unless_none_comes(
    known: int, tokens_max: int, blocks: int
) -> None:
    assert blocks_needed(known, tokens_max) == blocks


@pytest.mark.parametrize(
    ("free", "needed", "growing", "may"),
    [(4, 4, 0, True), (3, 4, 0, False), (6, 4, 2, True), (5, 4, 2, False)],
)
def test_sequence_begins_only_beside_a_block_for_each_that_runs(
    free: int, needed: int, growing: int, may: bool
) -> None:
    found = may_begin(free_blocks=free, needed_blocks=needed, growing_sequences=growing)
    assert found is may
