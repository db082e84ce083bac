"""`cachalot status`: asks every node of a cluster what it is and does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .exit_codes import ExitCode
from .output import write_json, write_result, write_table
from .quantities import format_duration, format_size

if TYPE_CHECKING:
    from .cluster_status import ClusterStatus, NodeStatus

COLUMNS = (
    "node",
    "state",
    "pid",
    "address",
    "blocks",
    "used",
    "capacity",
    "reads",
    "rejected",
    "uptime",
)
LEFT_COLUMNS = frozenset({"node", "state", "address"})


def status(
    cluster: Annotated[Path, typer.Option(help="The cluster map.", metavar="FILE")],
    wait_s: Annotated[
        float, typer.Option(help="How long to wait for answers.", metavar="S", min=0.01, max=60.0)
    ] = 2.0,
    is_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show each node of a cluster, and how many may still fail.

    Ends with exit code 6 if a node is down.
    """
    # Here, because the client and numpy take longer to load than `--help` should.
    import asyncio

    from .cluster_status import render_json, summarise

    found = asyncio.run(_ask(cluster, wait_s))
    if is_json:
        write_json(render_json(found))
    else:
        rows = [render_row(node) for node in found.nodes]
        write_table(COLUMNS, rows, left_columns=LEFT_COLUMNS)
        problems = [f"{node.node}: {node.problem}" for node in found.nodes if node.problem]
        write_result("\n".join(["", *problems, summarise(found)]))
    if found.nodes_alive < len(found.nodes):
        raise typer.Exit(ExitCode.NODES_DOWN)


async def _ask(path: Path, deadline_s: float) -> "ClusterStatus":
    from ..client import StoreClient
    from .cluster_status import describe_cluster

    async with StoreClient.connect(path) as store:
        reports = await store.node_reports(deadline_s=deadline_s)
        return describe_cluster(store.map, reports)


def render_row(node: "NodeStatus") -> list[str]:
    """The cells of one node, in the order of COLUMNS; "-" for what is not known."""

    def shown(value: int | None) -> str:
        return "-" if value is None else str(value)

    def size(value: int | None) -> str:
        return "-" if value is None else format_size(value)

    return [
        node.node,
        "alive" if node.is_alive else "down",
        shown(node.pid),
        node.address,
        shown(node.blocks),
        size(node.used_bytes),
        size(node.capacity_bytes),
        shown(node.reads),
        shown(node.rejected_shards),
        "-" if node.uptime_s is None else format_duration(node.uptime_s),
    ]
