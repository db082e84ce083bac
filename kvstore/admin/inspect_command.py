"""`cachalot inspect`: where the shards of one block are, and what its header says."""

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .control_options import (
    ClusterOption,
    ControlOption,
    JsonOption,
    TokenFileOption,
    open_control,
)
from .exit_codes import ExitCode
from .output import write_json, write_result, write_table
from .quantities import format_duration, format_size

if TYPE_CHECKING:
    from .control_client import Answer, ControlPlane

COLUMNS = ("target", "node", "state", "shard", "version", "bytes", "last used")
LEFT_COLUMNS = frozenset({"target", "node", "state", "version"})
DEADLINE_S = 20.0
KEY_PATTERN = re.compile(r"[0-9a-fA-F]{64}")


def inspect(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A block's key: 64 hex digits.")],
    cluster: ClusterOption,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show where the shards of a block are.

    Also how old it is, and whether it can be read. Renews nothing. Ends with exit code 7 if the
    block cannot be read, also if nobody has it.
    """
    from ..errors import InvalidArgument, shown

    if not KEY_PATTERN.fullmatch(key):
        raise InvalidArgument("KEY", given=shown(key), expected="64 hex digits")
    _, plane = open_control(cluster, control, token_file)
    found = _ask(plane, key.lower())
    if is_json:
        write_json(found)
    else:
        _write(found)
    if not found.get("is_readable"):
        raise typer.Exit(ExitCode.NOT_WHOLE)


def _ask(plane: "ControlPlane", key: str) -> "Answer":
    """One worker's answer; of a node that holds a shard if there is one, which can say more."""
    from .control_client import ControlRefused, ControlUnreachable

    path = f"/api/inspect/{key}"
    found = plane.ask_any("GET", path, deadline_s=DEADLINE_S)
    if found.get("header") is not None:
        return found
    holders = {row.get("node") for row in _targets(found) if "version" in row}
    for endpoint in plane.endpoints:
        if endpoint.node in holders:
            try:
                return plane.ask(endpoint, "GET", path, deadline_s=DEADLINE_S)
            except (ControlUnreachable, ControlRefused):
                continue  # what is known already stays
    return found


def _targets(found: "Answer") -> list[dict[str, Any]]:
    rows = found.get("targets")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _write(found: "Answer") -> None:
    header = found.get("header")
    belongs_on = header.get("belongs_on", []) if isinstance(header, dict) else []
    rows = [render_row(row, belongs_on) for row in _targets(found) if is_of_interest(row, found)]
    if rows:
        write_table(COLUMNS, rows, left_columns=LEFT_COLUMNS)
        write_result("")
    write_result("\n".join(describe(found)))


def is_of_interest(row: dict[str, Any], found: "Answer") -> bool:
    """Whether a target holds a shard, should hold one, or cannot be asked."""
    header = found.get("header")
    belongs_on = header.get("belongs_on", []) if isinstance(header, dict) else []
    return "version" in row or not row.get("is_reachable") or row.get("target") in belongs_on


def render_row(row: dict[str, Any], belongs_on: list[str]) -> list[str]:
    """The cells of one target, in the order of COLUMNS."""
    names = [str(row.get("target", "?")), str(row.get("node", "?"))]
    if not row.get("is_reachable"):
        return [*names, f"no answer: {row.get('problem', '')}", "-", "-", "-", "-"]
    if "version" not in row:
        return [*names, "has none", "-", "-", "-", "-"]
    is_misplaced = bool(belongs_on) and names[0] not in belongs_on
    return [
        *names,
        "has it, not its place" if is_misplaced else "has it",
        str(row.get("shard", "?")),
        str(row.get("version", "?")),
        format_size(int(row.get("payload_bytes", 0))),
        f"{format_duration(float(row.get('age_s', 0)))} ago",
    ]


def describe(found: "Answer") -> list[str]:
    """What stands below the table."""
    shards, k, width = found.get("shards", 0), found.get("k", 0), found.get("width", 0)
    state = "can be read" if found.get("is_readable") else "cannot be read"
    lines = [f"{shards} of {width} shards; it {state} ({k} of one version are needed)"]
    versions = found.get("versions")
    if isinstance(versions, dict) and len(versions) > 1:
        counted = ", ".join(f"{count} of {version}" for version, count in sorted(versions.items()))
        lines.append(f"versions differ: {counted}")
    if not shards:
        lines = ["no node that answers has a shard of it"]
    header = found.get("header")
    if isinstance(header, dict):
        lines.append(
            f"class {header.get('ttl_class')}, block {header.get('block_index')} of its chain,"
            f" {header.get('block_bytes')} bytes, group {header.get('group')},"
            f" namespace {header.get('namespace_id')}"
        )
    return lines
