"""What a local cluster is to look like, before anything of it exists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.admin.local_plan import (
    NODES_MAX,
    LocalShape,
    LocalWishes,
    choose_code,
    choose_shape,
    find_differences,
    name_nodes,
    plan_local_map,
)
from kvstore.admin.quantities import make_code
from kvstore.cluster.map import parse_cluster_map, render_cluster_map
from kvstore.errors import InvalidArgument

CLUSTER = "5e" * 16


def test_shape_has_the_documented_defaults_when_nothing_is_said() -> None:
    shape = choose_shape(LocalWishes())
    assert (shape.nodes, shape.code.k, shape.code.m) == (12, 10, 2)
    assert shape.target_size_bytes == 4 << 30


@pytest.mark.parametrize(
    ("nodes", "advice"),
    [
        (11, "--code 9+2"),
        (6, "--code 4+2"),
        (4, "--code 2+2"),
        (3, "--code 2+1"),
        (2, "--code 1+1"),
        (1, "--code 1+0"),
    ],
)
def test_too_few_nodes_are_refused_with_a_code_that_fits(nodes: int, advice: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        choose_shape(LocalWishes(nodes=nodes))
    message = str(caught.value)
    assert message.startswith(f"nodes: given {nodes}, expected at least 12")
    assert message.endswith(f"say --nodes 12, or {advice}")
    assert "\n" not in message


@given(st.integers(1, NODES_MAX))
def test_advised_code_always_fits(nodes: int) -> None:
    assert choose_shape(LocalWishes(nodes=nodes, code=choose_code(nodes))).nodes == nodes


@pytest.mark.parametrize("nodes", [0, -1, NODES_MAX + 1])
def test_number_of_nodes_is_limited(nodes: int) -> None:
    with pytest.raises(InvalidArgument, match=f"expected 1 to {NODES_MAX}"):
        choose_shape(LocalWishes(nodes=nodes, code=make_code("code", 1, 0)))


@pytest.mark.parametrize("size_bytes", [1, 4, (256 << 10) - 1])
def test_target_size_without_its_unit_is_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="write 4GiB for 4 gibibytes"):
        choose_shape(LocalWishes(target_size_bytes=size_bytes))


@pytest.mark.parametrize("count", [1, 9, 12, 99, 100, 128])
def test_node_names_sort_as_they_count(count: int) -> None:
    names = name_nodes(count)
    assert len(set(names)) == count
    assert sorted(names) == names
    assert names[0] in ("n01", "n001")


@pytest.mark.parametrize(("nodes", "k", "m"), [(1, 1, 0), (6, 4, 2), (12, 10, 2), (15, 10, 2)])
def test_planned_map_is_valid_and_uses_every_port_once(nodes: int, k: int, m: int) -> None:
    shape = LocalShape(nodes=nodes, code=make_code("code", k, m), target_size_bytes=1 << 30)
    ports = [40000 + 7 * index for index in range(nodes)]
    planned = plan_local_map(shape, cluster=CLUSTER, ports=ports)
    assert parse_cluster_map(render_cluster_map(planned).encode(), "x") == planned
    assert [node.port for node in planned.nodes] == ports
    assert {node.host for node in planned.nodes} == {"127.0.0.1"}
    assert planned.cluster == CLUSTER
    assert planned.targets[0].path == "nodes/n01/target"
    assert {target.size_bytes for target in planned.targets} == {1 << 30}


def test_wishes_fit_the_map_that_was_planned_from_them() -> None:
    wishes = LocalWishes(nodes=6, code=make_code("code", 4, 2), target_size_bytes=1 << 30)
    planned = plan_local_map(choose_shape(wishes), cluster=CLUSTER, ports=range(1, 7))
    assert find_differences(wishes, planned) == []
    assert find_differences(LocalWishes(), planned) == []


def test_every_difference_is_named() -> None:
    shape = choose_shape(LocalWishes(nodes=6, code=make_code("code", 4, 2)))
    planned = plan_local_map(shape, cluster=CLUSTER, ports=range(1, 7))
    wishes = LocalWishes(nodes=7, code=make_code("code", 5, 1), target_size_bytes=1 << 20)
    assert find_differences(wishes, planned) == [
        "6 nodes, not 7",
        "code 4+2, not 5+1",
        "targets of 4.0 GiB, not 1.0 MiB",
    ]
