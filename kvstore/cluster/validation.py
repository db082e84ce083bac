"""What makes a cluster map valid: from parsed TOML to a ClusterMap, or to all its mistakes.

Pure. Every rule here has a line in docs/formats/cluster-map.md. A faulty entry is left out while
checking goes on, so that one run reports everything a person has to fix.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable

from ..errors import shown
from ..layout import SHARDS_MAX
from .address import (
    ADDRESS_RULE,
    REACHABLE_RULE,
    canonical_address,
    is_address,
    is_reachable_address,
)
from .entities import ClusterMap, CodeShape, Entrypoint, Group, Node, Target, default_write_acks

MAP_FORMAT = 1
NODES_MAX = 4096
TARGETS_MAX = 16384
GROUPS_MAX = 65535
ENTRYPOINTS_MAX = 256
EPOCH_MAX = 2**32 - 1
SIZE_BYTES_MAX = 1 << 60
PATH_BYTES_MAX = 4096
WEIGHT_MIN, WEIGHT_MAX = 1e-18, 2.0**60

# A frame has 32 bytes for a target's name.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
CLUSTER_PATTERN = re.compile(r"[0-9a-f]{32}")
TOP_KEYS = ("format", "epoch", "cluster", "code", "nodes", "targets", "groups", "entrypoints")

NAME_RULE = "1 to 32 of A-Z a-z 0-9 . _ -, the first a letter or digit"


def check_cluster_map(document: dict[str, object]) -> tuple[ClusterMap | None, list[str]]:
    """The map a parsed TOML file describes and its mistakes: one of the two is empty."""
    given = document.get("format")
    if type(given) is not int or given != MAP_FORMAT:
        # The rules below are those of this format; they say nothing about another one.
        return None, [f"format: given {shown(given)}, expected {MAP_FORMAT}"]
    problems: list[str] = []
    top = _Table(document, "", problems)
    top.refuse_unknown(TOP_KEYS)
    epoch = top.integer("epoch", 1, EPOCH_MAX)
    cluster = top.text("cluster", "32 hex digits, lower case", CLUSTER_PATTERN.fullmatch)
    code = _check_code(top)
    nodes = [_check_node(table) for table in top.tables("nodes", NODES_MAX)]
    targets = [_check_target(table) for table in top.tables("targets", TARGETS_MAX)]
    groups = [_check_group(table) for table in top.tables("groups", GROUPS_MAX)]
    has_entrypoints = document.get("entrypoints", []) != []
    rows = top.tables("entrypoints", ENTRYPOINTS_MAX) if has_entrypoints else []
    entrypoints = [_check_entrypoint(table) for table in rows]
    _check_nodes(nodes, problems)
    _check_targets(targets, nodes, problems)
    _check_groups(groups, targets, code, problems)
    _check_entrypoints(entrypoints, nodes, problems)
    if problems:
        return None, problems
    assert epoch is not None
    assert cluster is not None
    assert code is not None
    return (
        ClusterMap(
            cluster=cluster,
            epoch=epoch,
            code=code,
            nodes=tuple(node for node in nodes if node is not None),
            targets=tuple(target for target in targets if target is not None),
            groups=tuple(group for group in groups if group is not None),
            entrypoints=tuple(point for point in entrypoints if point is not None),
        ),
        [],
    )


class _Table:
    """One TOML table that is read field by field; a wrong field is noted and read as None."""

    def __init__(self, values: dict[str, object], where: str, problems: list[str]) -> None:
        self.values = values
        self.where = where
        self.problems = problems

    def note(self, what: str) -> None:
        self.problems.append(f"{self.where}{what}")

    def refuse_unknown(self, known: Iterable[str]) -> None:
        known = list(known)
        for key in self.values:
            if key not in known:
                self.note(f"{key}: unknown key, expected one of {', '.join(known)}")

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.note(f"{key}: given {shown(value)}, expected a whole number from {low} to {high}")
        return None

    def text(self, key: str, rule: str, accepts: Callable[[str], object]) -> str | None:
        value = self.values.get(key)
        if isinstance(value, str) and accepts(value):
            return value
        self.note(f"{key}: given {shown(value)}, expected {rule}")
        return None

    def name(self, key: str = "name") -> str | None:
        return self.text(key, NAME_RULE, NAME_PATTERN.fullmatch)

    def tables(self, key: str, count_max: int) -> list["_Table"]:
        """The [[key]] tables, at least one; the place in each message is its name or its index."""
        rows = self.values.get(key)
        if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
            self.note(f"{key}: given {shown(rows)}, expected one or more [[{key}]] tables")
            return []
        if len(rows) > count_max:
            self.note(f"{key}: given {len(rows)} tables, expected at most {count_max}")
            return []
        return [
            _Table(row, f"{key}[{index}] ({shown(row.get('name'))}): ", self.problems)
            for index, row in enumerate(rows)
        ]


def _check_code(top: _Table) -> CodeShape | None:
    values = top.values.get("code")
    if not isinstance(values, dict):
        top.note(f"code: given {shown(values)}, expected a [code] table")
        return None
    table = _Table(values, "code: ", top.problems)
    table.refuse_unknown(("k", "m", "write_acks"))
    k = table.integer("k", 1, SHARDS_MAX)
    m = table.integer("m", 0, SHARDS_MAX - 1)
    if k is None or m is None:
        return None
    if k + m > SHARDS_MAX:
        table.note(f"k + m: given {k} + {m}, expected at most {SHARDS_MAX}")
        return None
    write_acks: int | None = default_write_acks(k, m)
    if "write_acks" in values:
        write_acks = table.integer("write_acks", k, k + m)
    return None if write_acks is None else CodeShape(k=k, m=m, write_acks=write_acks)


def _check_node(table: _Table) -> Node | None:
    table.refuse_unknown(("name", "address", "control"))
    name = table.name()
    address = table.text("address", ADDRESS_RULE, is_address)
    control = None
    if "control" in table.values:
        control = table.text("control", ADDRESS_RULE, is_address)
    if name is None or address is None:
        return None
    return Node(name=name, address=address, control=control)


def _check_target(table: _Table) -> Target | None:
    table.refuse_unknown(("name", "node", "path", "size_bytes"))
    name = table.name()
    node = table.name("node")
    path = table.text("path", "a path without control characters", _is_path)
    size_bytes = table.integer("size_bytes", 1, SIZE_BYTES_MAX)
    if name is None or node is None or path is None or size_bytes is None:
        return None
    return Target(name=name, node=node, path=path, size_bytes=size_bytes)


def _check_group(table: _Table) -> Group | None:
    table.refuse_unknown(("name", "targets", "weight"))
    name = table.name()
    targets = table.values.get("targets")
    if not isinstance(targets, list) or not all(isinstance(item, str) for item in targets):
        table.note(f"targets: given {shown(targets)}, expected a list of target names")
        return None
    weight = table.values.get("weight")
    if weight is not None and not _is_weight(weight):
        table.note(f"weight: given {shown(weight)}, expected a number above 0, at most 2^60")
        return None
    if name is None:
        return None
    given = float(weight) if isinstance(weight, (int, float)) else None
    return Group(name=name, targets=tuple(targets), weight=given)


def _check_entrypoint(table: _Table) -> Entrypoint | None:
    table.refuse_unknown(("name", "address"))
    name = table.name()
    address = table.text("address", REACHABLE_RULE, is_reachable_address)
    if name is None or address is None:
        return None
    return Entrypoint(name=name, address=address)


def _check_nodes(nodes: list[Node | None], problems: list[str]) -> None:
    known = [node for node in nodes if node is not None]
    _note_twice("nodes: name", [node.name for node in known], problems)
    _note_twice("nodes: address", _addresses_of(known), problems)


def _addresses_of(nodes: Iterable[Node]) -> list[str]:
    """Every address at which a process of the map's nodes listens, each spelled in one way."""
    nodes = list(nodes)
    controls = [node.control for node in nodes if node.control is not None]
    return [canonical_address(given) for given in [*(node.address for node in nodes), *controls]]


def _check_targets(
    targets: list[Target | None], nodes: list[Node | None], problems: list[str]
) -> None:
    known = [target for target in targets if target is not None]
    _note_twice("targets: name", [target.name for target in known], problems)
    places = [f"{target.node}:{posixpath.normpath(target.path)}" for target in known]
    _note_twice("targets: node and path", places, problems)
    if None in nodes:
        return  # the missing name may be that of the node with a mistake
    names = {node.name for node in nodes if node is not None}
    problems += [
        f"target {target.name}: node {target.node} is not in the map"
        for target in known
        if target.node not in names
    ]


def _check_groups(
    groups: list[Group | None],
    targets: list[Target | None],
    code: CodeShape | None,
    problems: list[str],
) -> None:
    known = [group for group in groups if group is not None]
    _note_twice("groups: name", [group.name for group in known], problems)
    node_of = {target.name: target.node for target in targets if target is not None}
    are_targets_whole = bool(targets) and None not in targets
    for group in known:
        where = f"group {group.name}"
        if code is not None and len(group.targets) != code.width:
            problems.append(
                f"{where}: given {len(group.targets)} targets, expected k + m = {code.width}"
            )
        if are_targets_whole:
            missing = sorted(set(group.targets) - node_of.keys())
            problems += [f"{where}: target {name} is not in the map" for name in missing]
        _note_twice(f"{where}: target", group.targets, problems)
        nodes = [node_of[name] for name in dict.fromkeys(group.targets) if name in node_of]
        _note_twice(f"{where}: node (one target of each at most)", nodes, problems)
    if None not in groups and groups:
        used = {name for group in known for name in group.targets}
        problems += [f"target {name}: is in no group" for name in node_of if name not in used]


def _check_entrypoints(
    entrypoints: list[Entrypoint | None], nodes: list[Node | None], problems: list[str]
) -> None:
    known = [point for point in entrypoints if point is not None]
    _note_twice("entrypoints: name", [point.name for point in known], problems)
    addresses = [canonical_address(point.address) for point in known]
    _note_twice("entrypoints: address", addresses, problems)
    of_nodes = set(_addresses_of(node for node in nodes if node is not None))
    problems += [
        f"entrypoints: address {address} is also an address of a node"
        for address in sorted(of_nodes & set(addresses))
    ]


def _note_twice(what: str, values: Iterable[str], problems: list[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            problems.append(f"{what} {value} is given {count} times")


def _is_path(path: str) -> bool:
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        return False
    return 1 <= length <= PATH_BYTES_MAX and not re.search(r"[\x00-\x1f\x7f]", path)


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return WEIGHT_MIN <= value <= WEIGHT_MAX
