"""The order of a fetch by layers: which shards hold which sections, and who is asked when."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.layered_plan import (
    Ask,
    count_leading,
    find_section_shards,
    find_slow,
    plan_layer_order,
)
from kvstore.layout import shard_bytes
from tests.kvstore.runs import ODD, SMOLLM2, V41_FLASH, layout_of


def test_owner_layers_of_v41_flash_are_two_two_two_and_four_shards() -> None:
    found = find_section_shards(V41_FLASH, 10)
    assert found.shards_by_section == ((0, 1), (2, 3), (4, 5), (6, 7, 8, 9))
    assert found.first_section_of_shard == (0, 0, 1, 1, 2, 2, 3, 3, 3, 3)
    assert found.first_shards == (0, 1)


def test_a_shard_of_smollm2_serves_three_sections() -> None:
    found = find_section_shards(SMOLLM2, 10)
    assert found.sections_of_shard[0] == (0, 1, 2)
    assert found.first_section_of_shard == tuple(range(0, 30, 3))
    assert found.shards_by_section[29] == (9,)


def test_a_shard_of_padding_only_belongs_to_no_section_and_comes_last() -> None:
    layout = layout_of(500, 560)
    assert shard_bytes(layout.block_bytes, 10) == 128
    found = find_section_shards(layout, 10)
    assert found.shards_by_section == ((0, 1, 2, 3), (3, 4, 5, 6, 7, 8))
    assert found.sections_of_shard[9] == ()
    assert found.first_section_of_shard[9] == 1


def test_every_section_of_an_odd_layout_has_the_shards_that_cover_it() -> None:
    for k in (4, 10):
        found = find_section_shards(ODD, k)
        size, at = shard_bytes(ODD.block_bytes, k), 0
        for section, shards in zip(ODD.sections, found.shards_by_section, strict=True):
            assert shards == tuple(range(at // size, (at + section.bytes - 1) // size + 1))
            at += section.bytes


def test_shards_of_the_first_section_of_all_units_come_first() -> None:
    plan = plan_layer_order(range(3), (0, 0, 1, 2))
    assert [(ask.unit, ask.shard) for ask in plan] == [
        *[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
        *[(0, 2), (1, 2), (2, 2)],
        *[(0, 3), (1, 3), (2, 3)],
    ]


@given(units=st.integers(0, 20), sections=st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_every_shard_of_every_unit_is_asked_for_once_and_sections_never_go_back(
    units: int, sections: list[int]
) -> None:
    plan = plan_layer_order(range(units), sections)
    assert len({(ask.unit, ask.shard) for ask in plan}) == len(plan) == units * len(sections)
    assert all(ask.section == sections[ask.shard] for ask in plan)
    order = [(ask.section, ask.unit) for ask in plan]
    assert order == sorted(order)


def test_a_unit_that_is_decoded_comes_after_its_shards_and_before_the_next_unit() -> None:
    """Shard k stands for decoding; k is larger than any data shard."""
    decoding = Ask(0, 1, 4)
    plan = sorted([*plan_layer_order(range(3), (0, 0, 1, 1)), decoding])
    at = plan.index(decoding)
    assert plan[at - 1] == Ask(0, 1, 1)
    assert plan[at + 1] == Ask(0, 2, 0)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_leading_equals_are_counted_up_to_the_first_difference(
    found: list[int], expected: list[int]
) -> None:
    count = count_leading(found, expected)
    assert found[:count] == expected[:count]
    assert found[count : count + 1] != expected[count : count + 1] or count == len(found)


def test_what_is_missing_is_equal_to_nothing(rng: random.Random) -> None:
    values = [rng.randrange(1 << 64) for _ in range(5)]
    assert count_leading([*values[:3], None, values[4]], values) == 3


def test_nodes_that_are_down_are_slow_and_so_are_those_far_behind_the_others() -> None:
    assert find_slow([0.0] * 4) == [False] * 4
    assert find_slow([0.001, None, 0.001, 0.019]) == [False, True, False, False]
    assert find_slow([0.001, 0.001, 0.001, 0.021]) == [False, False, False, True]
    assert find_slow([0.01, 0.01, 0.049, 0.051]) == [False, False, False, False]
    assert find_slow([0.01, 0.01, 0.01, 0.051]) == [False, False, False, True]
    assert find_slow([None, None]) == [True, True]
    assert find_slow([]) == []
