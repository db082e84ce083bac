"""What a local cluster is to look like: pure decisions, no file, no process, no port is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cluster.entities import ClusterMap, CodeShape, Entrypoint, Group, Node, Target
from ..errors import InvalidArgument
from .quantities import count_of, format_size, make_code

NODES_DEFAULT = 12
CODE_DEFAULT = make_code("code", 10, 2)
TARGET_SIZE_BYTES_DEFAULT = 4 << 30
TARGET_SIZE_BYTES_MIN = 256 << 10
"""Less is a forgotten unit: such a target could hold a few shards, or none."""

NODES_MAX = 128
"""Processes on one machine; more than that belongs on more machines."""

AGENTS_MAX = 32
"""The same for agents, each with an arena of its own."""

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWishes:
    """What a caller asked for; None where it said nothing, which fits any cluster that is there."""

    nodes: int | None = None
    code: CodeShape | None = None
    target_size_bytes: int | None = None
    agents: int | None = None
    agents_min: int = 0
    """So many agents are needed at least, by the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShape:
    """A cluster that can be made: there is a node for each shard of a block."""

    nodes: int
    code: CodeShape
    target_size_bytes: int


def choose_shape(wishes: LocalWishes) -> LocalShape:
    """The shape of a new cluster, with defaults for what was not said. Raises InvalidArgument."""
    nodes = NODES_DEFAULT if wishes.nodes is None else wishes.nodes
    code = wishes.code or CODE_DEFAULT
    if not 1 <= nodes <= NODES_MAX:
        raise InvalidArgument("nodes", given=nodes, expected=f"1 to {NODES_MAX}")
    if nodes < code.width:
        smaller = choose_code(nodes)
        raise InvalidArgument(
            "nodes",
            given=nodes,
            expected=f"at least {code.width}, because code {code.k}+{code.m} puts each of its"
            f" shards on another node; say --nodes {code.width}, or --code {smaller.k}+{smaller.m}",
        )
    size_bytes = wishes.target_size_bytes
    if size_bytes is None:
        size_bytes = TARGET_SIZE_BYTES_DEFAULT
    if size_bytes < TARGET_SIZE_BYTES_MIN:
        raise InvalidArgument(
            "target size",
            given=format_size(size_bytes),
            expected=f"at least {format_size(TARGET_SIZE_BYTES_MIN)}; write 4GiB for 4 gibibytes",
        )
    return LocalShape(nodes=nodes, code=code, target_size_bytes=size_bytes)


def choose_agents(wishes: LocalWishes, known: int = 0) -> int:
    """How many agents the cluster is to have, of which `known` are in the map already.

    Raises InvalidArgument.
    """
    agents = known if wishes.agents is None else wishes.agents
    if not 0 <= agents <= AGENTS_MAX:
        raise InvalidArgument("agents", given=agents, expected=f"0 to {AGENTS_MAX}")
    if wishes.agents == 0 and wishes.agents_min:
        raise InvalidArgument("agents", given=0, expected="1 or more: the engines need one")
    return max(agents, wishes.agents_min)


def choose_code(nodes: int) -> CodeShape:
    """A code that fits so few nodes: two parity shards if that leaves two for data."""
    m = min(2, nodes // 2)
    return make_code("code", min(nodes - m, CODE_DEFAULT.k), m)


def find_differences(wishes: LocalWishes, cluster_map: ClusterMap) -> list[str]:
    """What was asked for and is not so in the cluster that is there, one text for each."""
    code = cluster_map.code
    differences = []
    if wishes.nodes is not None and wishes.nodes != len(cluster_map.nodes):
        differences.append(f"{count_of(len(cluster_map.nodes), 'node')}, not {wishes.nodes}")
    if wishes.code is not None and (wishes.code.k, wishes.code.m) != (code.k, code.m):
        differences.append(f"code {code.k}+{code.m}, not {wishes.code.k}+{wishes.code.m}")
    sizes = {target.size_bytes for target in cluster_map.targets}
    if wishes.target_size_bytes is not None and sizes != {wishes.target_size_bytes}:
        found = " and ".join(format_size(size) for size in sorted(sizes))
        differences.append(f"targets of {found}, not {format_size(wishes.target_size_bytes)}")
    agents = len(cluster_map.entrypoints)
    if wishes.agents is not None and wishes.agents < agents:
        # More is a wish that can be met; fewer would leave entrypoints that nobody serves.
        differences.append(
            f"{count_of(agents, 'agent')}, not {wishes.agents} (more can be added, and none taken"
            " away)"
        )
    return differences


def name_nodes(count: int) -> list[str]:
    """n01, n02 and so on, all of one length, so that they sort as they count."""
    digits = max(2, len(str(count)))
    return [f"n{number:0{digits}}" for number in range(1, count + 1)]


def target_path(node: str) -> str:
    """The folder of a node's only target, from the folder of the map."""
    return f"nodes/{node}/target"


def plan_local_map(
    shape: LocalShape, *, cluster: str, ports: Sequence[int], control_ports: Sequence[int] = ()
) -> ClusterMap:
    """The first map of a local cluster: node number i on `ports[i]`, one target on each.

    With `control_ports` the map says where the worker of each node serves the control API.
    """
    # numpy comes with it; a cluster that is there already does without.
    from ..cluster.groups import plan_groups

    names = name_nodes(shape.nodes)
    targets = [
        Target(name=f"{n}-t0", node=n, path=target_path(n), size_bytes=shape.target_size_bytes)
        for n in names
    ]
    members = plan_groups({target.node: [target.name] for target in targets}, shape.code.width)
    cluster_map = ClusterMap(
        cluster=cluster,
        epoch=1,
        code=shape.code,
        nodes=tuple(
            Node(name=name, address=f"{HOST}:{port}")
            for name, port in zip(names, ports, strict=True)
        ),
        targets=tuple(targets),
        groups=tuple(
            Group(name=f"g{number:04}", targets=group) for number, group in enumerate(members)
        ),
    )
    return add_control(cluster_map, control_ports) if control_ports else cluster_map


def name_agents(count: int) -> list[str]:
    """a01, a02 and so on; of AGENTS_MAX all names have one length."""
    return [f"a{number:02}" for number in range(1, count + 1)]


def add_entrypoints(cluster_map: ClusterMap, ports: Sequence[int]) -> ClusterMap:
    """The same map with one more agent of this machine on each port. The epoch stays."""
    names = name_agents(len(cluster_map.entrypoints) + len(ports))
    free = [name for name in names if name not in cluster_map.entrypoint_by_name]
    added = [
        Entrypoint(name=name, address=f"{HOST}:{port}")
        for name, port in zip(free, ports, strict=False)
    ]
    return replace(cluster_map, entrypoints=(*cluster_map.entrypoints, *added))


def grow_map(
    cluster_map: ClusterMap, *, control_ports: Sequence[int], agent_ports: Sequence[int]
) -> ClusterMap:
    """The map of the next epoch, with control addresses for all nodes if there are ports for
    them, and an agent more on each of `agent_ports`; the same map if there is nothing to add."""
    if not control_ports and not agent_ports:
        return cluster_map
    grown = add_control(cluster_map, control_ports) if control_ports else cluster_map
    return replace(add_entrypoints(grown, agent_ports), epoch=cluster_map.epoch + 1)


def add_control(cluster_map: ClusterMap, ports: Sequence[int]) -> ClusterMap:
    """The same map with a control address on this machine for each node. The epoch stays."""
    nodes = tuple(
        replace(node, control=f"{HOST}:{port}")
        for node, port in zip(cluster_map.nodes, ports, strict=True)
    )
    return replace(cluster_map, nodes=nodes)
