"""The cluster map as an object: nodes, targets, groups, entrypoints, and look-ups among them.

Nothing here reads a file (`map`), checks a rule (`validation`) or places a block (`placement`).
A ClusterMap built by hand is not checked: `write_cluster_map` checks it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from .address import host_of, port_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeShape:
    """How a block is coded: k data shards, m parity shards, a write done at `write_acks`."""

    k: int
    m: int
    write_acks: int

    @property
    def width(self) -> int:
        """Shards of a block, so also targets of a group."""
        return self.k + self.m


def default_write_acks(k: int, m: int) -> int:
    """All shards but one; all of them where there is no parity."""
    return k + m - 1 if m else k


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One storage-node process. `address` is "host:port", an IPv6 host in brackets.

    `control`: where the worker beside it serves the control API, in the same form; None if nowhere.
    """

    name: str
    address: str
    control: str | None = None

    @property
    def host(self) -> str:
        """The host alone, without the brackets of IPv6."""
        return host_of(self.address)

    @property
    def port(self) -> int:
        return port_of(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A folder on one disk of one node; `path` is absolute or starts at the map's folder."""

    name: str
    node: str
    path: str
    size_bytes: int

    def folder(self, map_path: str | Path) -> Path:
        """The target's folder for a node that read its map at `map_path`."""
        return Path(map_path).absolute().parent / self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """k + m targets on as many nodes. `weight` None: the size of its smallest target."""

    name: str
    targets: tuple[str, ...]
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint:
    """An agent that holds a part of the window directory. `address`: where agents reach it.

    The part is chosen by the name, so an entrypoint may move to another address and keep its share.
    """

    name: str
    address: str

    @property
    def host(self) -> str:
        """The host alone, without the brackets of IPv6."""
        return host_of(self.address)

    @property
    def port(self) -> int:
        return port_of(self.address)


@dataclass(frozen=True, kw_only=True)
class ClusterMap:
    """Nodes, targets, groups and entrypoints of one cluster at one epoch.

    `cluster`: 32 hex digits, the same for the cluster's whole life. `epoch`: grows by every change.
    The number of a target (what frames carry) is its index in `targets`. Look-ups by a name that
    is not in the map raise KeyError.
    """

    cluster: str
    epoch: int
    code: CodeShape
    nodes: tuple[Node, ...]
    targets: tuple[Target, ...]
    groups: tuple[Group, ...]
    entrypoints: tuple[Entrypoint, ...] = ()

    @property
    def cluster_id(self) -> bytes:
        """The cluster's name as 16 bytes."""
        return bytes.fromhex(self.cluster)

    @property
    def width(self) -> int:
        """Targets of a group, k + m."""
        return self.code.width

    @cached_property
    def node_by_name(self) -> Mapping[str, Node]:
        return MappingProxyType({node.name: node for node in self.nodes})

    @cached_property
    def target_by_name(self) -> Mapping[str, Target]:
        return MappingProxyType({target.name: target for target in self.targets})

    @cached_property
    def target_number_by_name(self) -> Mapping[str, int]:
        """The u16 that frames carry in place of a target's name."""
        return MappingProxyType({target.name: i for i, target in enumerate(self.targets)})

    @cached_property
    def targets_by_node(self) -> Mapping[str, tuple[Target, ...]]:
        """Targets of each node in the map's order; an empty tuple for a node without one."""
        found: dict[str, list[Target]] = {node.name: [] for node in self.nodes}
        for target in self.targets:
            found[target.node].append(target)
        return MappingProxyType({name: tuple(targets) for name, targets in found.items()})

    @cached_property
    def entrypoint_by_name(self) -> Mapping[str, Entrypoint]:
        return MappingProxyType({point.name: point for point in self.entrypoints})

    def node_of(self, target: str) -> Node:
        """The node that serves a target."""
        return self.node_by_name[self.target_by_name[target].node]

    def weight_of(self, group: Group) -> float:
        """The group's share of the spans, relative to the weights of the other groups.

        The default is the size of the smallest target alone, not divided by the number of groups
        the target is in: with that division a new node would move spans between old groups.
        """
        if group.weight is not None:
            return group.weight
        return float(min(self.target_by_name[name].size_bytes for name in group.targets))
