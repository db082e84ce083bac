"""Cluster maps for tests: any number of nodes, planned groups, no files."""

from hashlib import sha256

from kvstore.cluster.groups import plan_groups
from kvstore.cluster.map import (
    ClusterMap,
    CodeShape,
    Group,
    Node,
    Target,
    default_write_acks,
)

TARGET_BYTES = 4 << 30


def targets_by_node(node_count: int, targets_each: int = 1) -> dict[str, list[str]]:
    return {
        f"n{node}": [f"n{node}-{target}" for target in range(targets_each)]
        for node in range(node_count)
    }


def map_of(
    fleet: dict[str, list[str]], groups: list[tuple[str, ...]], *, m: int = 2, epoch: int = 1
) -> ClusterMap:
    """The map of these nodes and groups; groups are g0, g1, ... of equal weight."""
    k = len(groups[0]) - m
    return ClusterMap(
        cluster="00112233445566778899aabbccddeeff",
        epoch=epoch,
        code=CodeShape(k=k, m=m, write_acks=default_write_acks(k, m)),
        nodes=tuple(Node(name=name, address=f"{name}.example:7100") for name in fleet),
        targets=tuple(
            Target(name=target, node=node, path=target, size_bytes=TARGET_BYTES)
            for node, targets in fleet.items()
            for target in targets
        ),
        groups=tuple(
            Group(name=f"g{number}", targets=group) for number, group in enumerate(groups)
        ),
    )


def planned_map(node_count: int, targets_each: int = 1, width: int = 12) -> ClusterMap:
    fleet = targets_by_node(node_count, targets_each)
    return map_of(fleet, plan_groups(fleet, width))


def anchors(count: int) -> list[bytes]:
    """As evenly spread as real keys, which are sha256 too."""
    return [sha256(f"span {number}".encode()).digest() for number in range(count)]
