"""A list of ids knows its parts, and whether its blocks lie together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.kv.block_list import BlockList

IDS = st.lists(st.integers(0, 40), min_size=1, unique=True)


@given(IDS)
def test_list_is_the_sequence_it_was_made_from(ids: list[int]) -> None:
    blocks = BlockList(ids)
    assert list(blocks) == ids
    assert [blocks[index] for index in range(len(blocks))] == ids
    assert (len(blocks), blocks.id_bound) == (len(ids), max(ids))
    assert BlockList.of(blocks) is blocks


@given(IDS, st.data())
def test_part_knows_where_it_stands_in_the_whole(ids: list[int], data: st.DataObject) -> None:
    whole = BlockList(ids)
    first = data.draw(st.integers(0, len(ids)))
    end = data.draw(st.integers(first, len(ids)))
    part = whole[first:end]
    assert list(part) == ids[first:end]
    again = part[1:] if len(part) else part
    assert list(again) == ids[first:end][1:]
    assert again.whole is whole
    assert list(whole)[again.first : again.first + len(again)] == list(again)
    assert again.on_device is whole.on_device


@given(IDS)
def test_blocks_lie_together_if_each_is_followed_by_the_next(ids: list[int]) -> None:
    is_run = ids == list(range(ids[0], ids[0] + len(ids)))
    assert BlockList(ids).first_of_run == (ids[0] if is_run else None)
    together = list(range(7, 7 + len(ids)))
    assert BlockList(together).first_of_run == 7
    backwards = BlockList(together[::-1])
    assert backwards.first_of_run == (7 if len(ids) == 1 else None)


@pytest.mark.parametrize("ids", [[1, 2, 1], [4, 4]])
def test_block_that_is_named_twice_is_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=f"block {ids[0]} more than once"):
        BlockList(ids)
