"""Tiles: where each row stands, whatever rows stand beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.tiles import TILE_ROWS, plan_tiles
from tests.kernels.row_invariance import normal

POSITIONS = st.lists(st.integers(0, 2**40), max_size=60)


@given(positions=POSITIONS)
def test_row_stands_at_its_position_modulo_the_rows_of_a_tile(positions: list[int]) -> None:
    tiles = plan_tiles(torch.tensor(positions, dtype=torch.int64))
    assert (tiles.slots_T % TILE_ROWS).tolist() == [p % TILE_ROWS for p in positions]


@given(positions=POSITIONS)
def test_rows_have_a_slot_each_in_as_few_tiles_as_their_places_allow(positions: list[int]) -> None:
    tiles = plan_tiles(torch.tensor(positions, dtype=torch.int64))
    slots = tiles.slots_T.tolist()
    assert len(set(slots)) == len(positions) == tiles.rows
    places = [p % TILE_ROWS for p in positions]
    assert tiles.count == max((places.count(place) for place in places), default=0)
    assert all(0 <= slot < tiles.count * TILE_ROWS for slot in slots)


@given(positions=POSITIONS, width=st.integers(0, 3))
def test_gather_gives_back_what_spread_laid_out(positions: list[int], width: int) -> None:
    tiles = plan_tiles(torch.tensor(positions, dtype=torch.int64))
    x = normal(len(positions), width)
    spread = tiles.spread(x)
    assert spread.shape == (tiles.count, TILE_ROWS, width)
    assert torch.equal(tiles.gather(spread), x)


def test_spread_leaves_zeros_where_there_is_no_row() -> None:
    tiles = plan_tiles(torch.tensor([3, 11, 4]))
    spread = tiles.spread(torch.ones(3, 5))
    assert spread.sum(-1).nonzero().tolist() == [[0, 3], [0, 4], [1, 3]]


@pytest.mark.parametrize("as_mask", [True, False])
def test_select_packs_some_rows_anew(as_mask: bool) -> None:
    tiles = plan_tiles(torch.arange(5, 30))
    chosen = torch.tensor([1, 9, 17])
    rows = torch.zeros(25, dtype=torch.bool).index_fill_(0, chosen, True) if as_mask else chosen
    some = tiles.select(rows)
    assert some.positions_T.tolist() == [6, 14, 22]
    assert some.slots_T.tolist() == [6, 14, 22]


def test_rows_of_several_sequences_share_tiles() -> None:
    tiles = plan_tiles(torch.tensor([100, 7, 33, 1]))
    assert tiles.count == 2
    assert tiles.slots_T.tolist() == [4, 7, 1, 9]
