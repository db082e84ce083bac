"""Plans of code groups: balance over targets and over pairs of nodes."""

from collections import Counter
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.groups import group_count, plan_groups
from kvstore.errors import InvalidArgument
from tests.kvstore.cluster.fleets import targets_by_node

Groups = list[tuple[str, ...]]


def uses_of(groups: Groups) -> Counter[str]:
    return Counter(target for group in groups for target in group)


def node_pairs_of(groups: Groups) -> Counter[tuple[str, str]]:
    """How many groups each pair of nodes shares. Target names are "node-number"."""
    pairs: Counter[tuple[str, str]] = Counter()
    for group in groups:
        nodes = sorted(target.split("-")[0] for target in group)
        pairs.update(combinations(nodes, 2))
    return pairs


def assert_valid(groups: Groups, fleet: dict[str, list[str]], width: int) -> None:
    node_of = {target: node for node, targets in fleet.items() for target in targets}
    for group in groups:
        assert len(group) == width
        assert len({node_of[target] for target in group}) == width
    assert uses_of(groups).keys() == node_of.keys()


@pytest.mark.parametrize("width", [1, 2, 6, 12])
def test_one_group_holds_all_when_there_are_as_many_targets_as_shards(width: int) -> None:
    fleet = targets_by_node(width)
    assert plan_groups(fleet, width) == [tuple(f"n{node}-0" for node in range(width))]


@pytest.mark.parametrize(
    ("node_count", "targets_each", "width"),
    [
        *((13, 1, 12), (14, 1, 12), (20, 1, 12), (24, 1, 12), (25, 1, 12), (36, 1, 12)),
        *((37, 1, 12), (60, 1, 12), (12, 2, 12), (12, 4, 12), (18, 3, 12), (7, 1, 6), (9, 2, 6)),
    ],
)
def test_targets_and_pairs_of_nodes_are_used_alike(
    node_count: int, targets_each: int, width: int
) -> None:
    fleet = targets_by_node(node_count, targets_each)
    groups = plan_groups(fleet, width)
    assert_valid(groups, fleet, width)
    uses = uses_of(groups)
    assert max(uses.values()) - min(uses.values()) <= (0 if targets_each == 1 else 3)
    pairs = node_pairs_of(groups)
    assert len(pairs) == comb(node_count, 2)
    mean = sum(pairs.values()) / len(pairs)
    assert max(pairs.values()) <= 1.2 * mean
    assert min(pairs.values()) >= 0.75 * mean


def test_disks_of_one_node_meet_all_disks_of_the_others() -> None:
    groups = plan_groups(targets_by_node(12, 2), 12)
    pairs = Counter(pair for group in groups for pair in combinations(sorted(group), 2))
    assert len(pairs) == comb(24, 2) - 12
    assert max(pairs.values()) <= 1.2 * sum(pairs.values()) / len(pairs)


def test_every_target_alone_is_a_group_when_there_is_no_parity() -> None:
    groups = plan_groups(targets_by_node(5, 2), 1)
    assert sorted(groups) == sorted((f"n{node}-{disk}",) for node in range(5) for disk in (0, 1))


def test_nodes_with_few_targets_are_not_left_out() -> None:
    fleet = {**targets_by_node(12), "big": [f"big-{disk}" for disk in range(10)]}
    groups = plan_groups(fleet, 12)
    assert_valid(groups, fleet, 12)
    uses = uses_of(groups)
    assert (
        max(uses[f"n{node}-0"] for node in range(12))
        - min(uses[f"n{node}-0"] for node in range(12))
        <= 1
    )
    disks = [uses[f"big-{disk}"] for disk in range(10)]
    assert max(disks) - min(disks) <= 1


def test_plan_is_the_same_each_time() -> None:
    assert plan_groups(targets_by_node(17), 12) == plan_groups(targets_by_node(17), 12)


def test_nodes_without_targets_take_no_part() -> None:
    fleet = {**targets_by_node(12), "empty": []}
    assert len(plan_groups(fleet, 12)) == 1


@pytest.mark.parametrize(
    ("target_count", "node_count", "width", "count"),
    [(12, 12, 12, 1), (13, 13, 12, 39), (24, 24, 12, 102), (36, 36, 12, 231), (100, 100, 12, 1024)],
)
def test_group_count_is_known(target_count: int, node_count: int, width: int, count: int) -> None:
    assert group_count(target_count, node_count, width) == count


@given(st.integers(1, 4096), st.integers(1, 8), st.integers(2, 32))
def test_group_count_is_bounded(node_count: int, targets_each: int, width: int) -> None:
    target_count = min(16384, node_count * targets_each)
    count = group_count(target_count, node_count, min(width, node_count))
    if min(width, node_count) > 1:
        assert 1 <= count <= max(1024, -(-6 * target_count // min(width, node_count)))
    assert count <= 65535


def test_large_cluster_is_planned_in_bounded_time() -> None:
    fleet = targets_by_node(600, 2)
    groups = plan_groups(fleet, 12)
    assert_valid(groups, fleet, 12)
    assert len(groups) == 1024
    uses = uses_of(groups)
    assert max(uses.values()) - min(uses.values()) <= 2


@pytest.mark.parametrize("width", [0, -1, 13])
def test_plan_is_refused_when_there_are_too_few_nodes(width: int) -> None:
    with pytest.raises(InvalidArgument, match="expected 1 to 12, the number of nodes"):
        plan_groups(targets_by_node(12, 4), width)


def test_plan_is_refused_when_a_target_is_named_twice() -> None:
    with pytest.raises(InvalidArgument, match="each name once"):
        plan_groups({"a": ["t"], "b": ["t"]}, 2)
