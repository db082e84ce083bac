"""Placement: golden vectors, balance, what a dead node or a new group changes."""

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.groups import plan_groups
from kvstore.cluster.map import ClusterMap, Group
from kvstore.cluster.placement import (
    SPAN_BLOCKS,
    Placement,
    SpanPlacement,
    rotation,
)
from tests.kvstore.cluster.fleets import anchors, map_of, planned_map, targets_by_node

GOLDEN = Path(__file__).parents[2] / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "placement.json").read_text())

SPANS = 1000
READ_SHARDS = 11  # a client asks k + 1 of 12


def golden_map(reverse: bool = False) -> ClusterMap:
    """Twelve groups of one target, of the golden file's weights."""
    names = sorted(VECTORS["weights"], reverse=reverse)
    fleet = {f"n{name}": [f"n{name}-0"] for name in names}
    base = map_of(fleet, [(f"n{name}-0",) for name in names], m=0)
    groups = tuple(
        Group(name=name, targets=(f"n{name}-0",), weight=VECTORS["weights"][name]) for name in names
    )
    return ClusterMap(
        cluster=base.cluster,
        epoch=1,
        code=base.code,
        nodes=base.nodes,
        targets=base.targets,
        groups=groups,
    )


# --- golden vectors


def test_golden_file_is_what_its_writer_writes() -> None:
    assert runpy.run_path(str(GOLDEN / "write_placement.py"))["vectors"]() == VECTORS


@pytest.mark.parametrize("reverse", [False, True])
def test_group_choice_matches_golden_vectors_in_any_order_of_the_map(reverse: bool) -> None:
    placement = Placement(golden_map(reverse))
    for span in VECTORS["spans"]:
        assert placement.choose_group(bytes.fromhex(span["anchor"])).name == span["group"]


def test_rotation_matches_golden_vectors() -> None:
    for span in VECTORS["spans"]:
        anchor = bytes.fromhex(span["anchor"])
        assert rotation(anchor, 12) == span["rotation_of_12"]
        assert rotation(anchor, 3) == span["rotation_of_3"]


def test_worked_example_of_the_format_page_is_the_first_golden_vector() -> None:
    page = (GOLDEN.parents[1] / "docs/formats/cluster-map.md").read_text()
    span = VECTORS["spans"][0]
    assert all(f"`{span[name]}`" in page for name in ("anchor", "u_g0"))
    assert f"| group | {span['group']} |" in page
    assert f"| {span['rotation_of_12']}: shard 0 on target number 11" in page
    weights = ", ".join(f"{name} {weight:.0f}" for name, weight in VECTORS["weights"].items())
    assert f"| groups and weights | {weights} |" in page


# --- spans and shards


def test_span_is_as_long_as_the_format_page_says() -> None:
    page = (GOLDEN.parents[1] / "docs/formats/cluster-map.md").read_text()
    assert f"A *span* is {SPAN_BLOCKS} consecutive blocks of a chain" in page


@given(st.integers(1, 32), st.integers(0, 31), st.integers(0, 31))
def test_shards_lie_on_the_targets_turned_by_the_rotation(
    width: int, turn: int, shard: int
) -> None:
    group = Group(name="g", targets=tuple(f"t{number}" for number in range(width)))
    span = SpanPlacement(group, turn % width)
    shard %= width
    position = group.targets.index(span.targets_by_shard()[shard])
    assert position == (shard + turn) % width
    assert sorted(span.targets_by_shard()) == sorted(group.targets)


def test_place_joins_group_and_rotation() -> None:
    placement = Placement(planned_map(24))
    for anchor in anchors(50):
        span = placement.place(anchor)
        assert span.group == placement.choose_group(anchor)
        assert span.rotation == rotation(anchor, 12)


# --- balance


def busiest(counts: Counter[str], target_count: int) -> float:
    """Load of the busiest target over the mean of all targets."""
    return max(counts.values()) * target_count / sum(counts.values())


@pytest.mark.parametrize(
    ("node_count", "targets_each"), [(12, 1), (24, 1), (36, 1), (12, 2), (12, 3), (13, 1), (18, 2)]
)
def test_busiest_target_is_near_the_mean_over_a_thousand_spans(
    node_count: int, targets_each: int
) -> None:
    placement = Placement(planned_map(node_count, targets_each))
    stored: Counter[str] = Counter()
    read: Counter[str] = Counter()
    for anchor in anchors(SPANS):
        targets = placement.place(anchor).targets_by_shard()
        stored.update(targets)
        read.update(targets[:10])
    assert busiest(stored, node_count * targets_each) <= 1.15
    assert busiest(read, node_count * targets_each) <= 1.15


@pytest.mark.parametrize("node_count", [24, 36])
def test_what_is_uneven_is_chance_and_fades_with_more_spans(node_count: int) -> None:
    placement = Placement(planned_map(node_count))
    read: Counter[str] = Counter()
    for anchor in anchors(20 * SPANS):
        read.update(placement.place(anchor).targets_by_shard()[:10])
    assert busiest(read, node_count) <= 1.04


def test_spans_follow_the_weights_of_the_groups() -> None:
    placement = Placement(golden_map())
    won = Counter(placement.choose_group(anchor).name for anchor in anchors(24_000))
    for name, weight in VECTORS["weights"].items():
        # 1,000 spans for each unit of weight; five standard deviations of it are 150.
        assert abs(won[name] / weight - 1000) <= 150


def test_group_weight_is_the_size_of_the_smallest_target_when_none_is_given() -> None:
    cluster_map = planned_map(13)
    small = cluster_map.targets[0]
    halved = ClusterMap(
        cluster=cluster_map.cluster,
        epoch=2,
        code=cluster_map.code,
        nodes=cluster_map.nodes,
        targets=tuple(
            type(small)(name=t.name, node=t.node, path=t.path, size_bytes=t.size_bytes // 2)
            if t == small
            else t
            for t in cluster_map.targets
        ),
        groups=cluster_map.groups,
    )
    placement = Placement(halved)
    won = Counter(placement.choose_group(anchor).name for anchor in anchors(13_000))
    full = [group.name for group in halved.groups if small.name not in group.targets]
    half = [group.name for group in halved.groups if small.name in group.targets]
    mean_full = sum(won[name] for name in full) / len(full)
    mean_half = sum(won[name] for name in half) / len(half)
    assert (len(full), len(half)) == (3, 36)
    assert 0.45 <= mean_half / mean_full <= 0.55


# --- a dead node


def extra_reads(cluster_map: ClusterMap, dead: str, spans: int) -> Counter[str]:
    """What each other node reads more if `dead` does not answer and k + 1 shards are asked."""
    placement = Placement(cluster_map)
    extra: Counter[str] = Counter()
    for anchor in anchors(spans):
        nodes = [cluster_map.node_of(t).name for t in placement.place(anchor).targets_by_shard()]
        if dead in nodes[:READ_SHARDS]:
            asked = [node for node in nodes if node != dead][:READ_SHARDS]
            extra.update(asked)
            extra.subtract(node for node in nodes[:READ_SHARDS] if node != dead)
    return extra


@pytest.mark.parametrize(
    ("node_count", "bound"),
    # Of the mean. Among 11 others 92 reads come to each, among 35 others 9: chance is louder.
    [(12, 1.35), (24, 1.6), (36, 2.1)],
)
def test_reads_of_a_dead_node_spread_over_all_others_in_a_thousand_spans(
    node_count: int, bound: float
) -> None:
    extra = extra_reads(planned_map(node_count), "n3", SPANS)
    assert set(extra) == {f"n{node}" for node in range(node_count)} - {"n3"}
    assert min(extra.values()) >= 1
    assert max(extra.values()) <= bound * sum(extra.values()) / len(extra)


@pytest.mark.parametrize("node_count", [12, 24, 36])
@pytest.mark.parametrize("dead", ["n0", "n11"])
def test_no_node_takes_over_much_more_than_its_share_in_the_long_run(
    node_count: int, dead: str
) -> None:
    extra = extra_reads(planned_map(node_count), dead, 20 * SPANS)
    mean = sum(extra.values()) / (node_count - 1)
    assert min(extra.values()) >= 0.7 * mean
    assert max(extra.values()) <= 1.3 * mean


# --- a new group


def test_new_group_takes_spans_from_all_others_and_moves_no_other() -> None:
    fleet = targets_by_node(24)
    groups = plan_groups(fleet, 12)
    less, more = Placement(map_of(fleet, groups[:-1])), Placement(map_of(fleet, groups))
    moved = 0
    for anchor in anchors(20 * SPANS):
        before, after = less.choose_group(anchor), more.choose_group(anchor)
        if before != after:
            assert after.name == f"g{len(groups) - 1}"
            moved += 1
    assert 0.7 * 20 * SPANS / len(groups) <= moved <= 1.3 * 20 * SPANS / len(groups)
