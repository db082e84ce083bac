"""Code groups for a set of targets: every target and every pair of nodes equally often.

Pure and deterministic: the plan is made once, by the one who writes a cluster map. Sizes are not
looked at; a group takes as many spans as its smallest target can hold (`ClusterMap.weight_of`), so
targets of very different sizes belong on one node as several targets of one size.
"""

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from ..errors import InvalidArgument

PAIR_GROUPS = 24
"""Groups that two targets of different nodes share on average.

The shares of single pairs then lie within about a seventh of the average, so that a dead node's
reads fall on all others alike (docs/decisions/0003-placement-by-spans-and-groups.md).
"""

TARGET_GROUPS_MIN = 6
"""Groups of one target where a full balance would need more than GROUPS_MAX_BALANCED."""

GROUPS_MAX_BALANCED = 1024
"""Placing a span costs time in proportion to the groups: about 15 us at this number."""


def plan_groups(targets_by_node: Mapping[str, Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """Groups of `width` targets on as many nodes each, balanced over targets and pairs of nodes.

    One group if there are `width` nodes with one target each. Raises InvalidArgument if fewer
    than `width` nodes have a target, or if a target is named twice.
    """
    fleet = _Fleet(targets_by_node, width)
    if fleet.target_count == width:
        return [tuple(fleet.names)]
    # A group has one target of a node, so a node of many targets needs as many groups.
    wanted = group_count(fleet.target_count, fleet.node_count, width)
    for _ in range(max(wanted, fleet.targets_on_node_max)):
        fleet.add(_choose_members(fleet, width))
    return [tuple(fleet.names[member] for member in sorted(group)) for group in fleet.groups]


def group_count(target_count: int, node_count: int, width: int) -> int:
    """How many groups `plan_groups` makes: enough for PAIR_GROUPS, and each target equally often.

    Two targets of different nodes share G w (w - 1) / (T (T - T / N)) groups on average. A whole
    number of groups for each target needs G to be a multiple of T / gcd(T, w).
    """
    step = target_count // gcd(target_count, width)
    if width == 1 or target_count == width:
        return step
    pairs = target_count * (target_count - target_count / node_count)
    wanted = PAIR_GROUPS * pairs / (width * (width - 1))
    count = int(-(-wanted // step)) * step
    if count <= GROUPS_MAX_BALANCED:
        return count
    return max(GROUPS_MAX_BALANCED, -(-TARGET_GROUPS_MIN * target_count // width))


class _Fleet:
    """Targets by number, and the groups made so far with their counts."""

    def __init__(self, targets_by_node: Mapping[str, Sequence[str]], width: int) -> None:
        rows = [list(targets) for targets in targets_by_node.values() if targets]
        if not 1 <= width <= len(rows):
            raise InvalidArgument(
                "targets of a group (k + m)",
                given=width,
                expected=f"1 to {len(rows)}, the number of nodes that have a target",
            )
        # First targets of all nodes, then second ones: neighbours lie on different nodes.
        deepest = max(len(row) for row in rows)
        order = [
            (row[depth], node)
            for depth in range(deepest)
            for node, row in enumerate(rows)
            if depth < len(row)
        ]
        self.names = [name for name, _ in order]
        if len(set(self.names)) != len(self.names):
            raise InvalidArgument(
                "targets", given=f"{len(self.names)} names", expected="each name once"
            )
        self.node_of: npt.NDArray[np.int64] = np.array([node for _, node in order])
        self.node_count = len(rows)
        self.targets_on_node_max = deepest
        self.target_count = len(self.names)
        self.groups: list[list[int]] = []
        self.groups_of: list[list[int]] = [[] for _ in self.names]
        self.uses: npt.NDArray[np.int64] = np.zeros(self.target_count, dtype=np.int64)

    def add(self, members: list[int]) -> None:
        for member in members:
            self.groups_of[member].append(len(self.groups))
            self.uses[member] += 1
        self.groups.append(members)

    def shared_with(self, target: int) -> npt.NDArray[np.int64]:
        """Shape [targets]: how many groups each target has in common with `target`."""
        members = [member for group in self.groups_of[target] for member in self.groups[group]]
        return np.bincount(np.array(members, dtype=np.int64), minlength=self.target_count)


def _choose_members(fleet: _Fleet, width: int) -> list[int]:
    """The next group: least used targets first, among those the ones that met the least."""
    cost = np.zeros(fleet.target_count, dtype=np.int64)
    is_free = np.ones(fleet.target_count, dtype=np.bool_)
    # The last of the sort keys turns with the group, or ties would always favour low numbers.
    turn = (np.arange(fleet.target_count) - len(fleet.groups)) % fleet.target_count
    members: list[int] = []
    for _ in range(width):
        free = np.flatnonzero(is_free)
        free = free[fleet.uses[free] == fleet.uses[free].min()]
        free = free[cost[free] == cost[free].min()]
        member = int(free[turn[free].argmin()])
        members.append(member)
        is_free[fleet.node_of == fleet.node_of[member]] = False
        # Squares: two pairs that met once are better than one that met twice.
        cost += fleet.shared_with(member) ** 2
    return members
