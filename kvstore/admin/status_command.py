"""`cachalot status`: asks every node of a cluster what it is and does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .control_options import ClusterOption, ControlOption, JsonOption, TokenFileOption, WaitOption
from .exit_codes import ExitCode
from .output import write_json, write_result, write_table
from .quantities import format_duration, format_ratio, format_size

if TYPE_CHECKING:
    from ..cluster.entities import ClusterMap
    from .cluster_status import ClusterStatus, NodeStatus, TargetStatus
    from .web_address import WebPage
    from .worker_status import WorkersStatus

COLUMNS = (
    "node",
    "state",
    "pid",
    "address",
    "blocks",
    "used",
    "capacity",
    "fill",
    "reads",
    "rejected",
    "uptime",
    "worker",
    "counted",
)
LEFT_COLUMNS = frozenset({"node", "state", "address", "worker"})
WORKER_DEADLINE_S = 8.0
TARGET_COLUMNS = ("target", "node", "state", "blocks", "used", "capacity", "fill", "quarantined")
TARGET_LEFT_COLUMNS = frozenset({"target", "node", "state"})


def status(
    cluster: ClusterOption,
    with_targets: Annotated[
        bool, typer.Option("--targets", help="Also show each target (folder) of each node.")
    ] = False,
    wait_s: WaitOption = 2.0,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show nodes, redundancy, and how many may still fail.

    Works without any gc_worker, but only they count shards. Ends with exit code 6 if a node is
    down, or the folder of a target is gone. With --control one worker is asked for all others.
    """
    # Here, because the client and numpy take longer to load than `--help` should.
    import asyncio

    from .cluster_status import render_json
    from .web_address import find_web_page

    found, workers, cluster_map = asyncio.run(_ask(cluster, wait_s, token_file, control))
    page = find_web_page(cluster_map, cluster, token_file, workers, control)
    if is_json:
        write_json(render_json(found, workers) | {"web_page": page and page.render_json()})
    else:
        _write(found, workers, page, with_targets=with_targets)
    if found.nodes_alive < len(found.nodes) or found.lost_targets:
        raise typer.Exit(ExitCode.NODES_DOWN)


async def _ask(
    path: Path, deadline_s: float, token_file: Path | None, control: str | None
) -> "tuple[ClusterStatus, WorkersStatus, ClusterMap]":
    import asyncio

    from ..client import StoreClient
    from .cluster_status import describe_cluster
    from .worker_status import ask_workers

    async with StoreClient.connect(path) as store:
        # A worker loads its API when it is asked for the first time.
        worker_deadline_s = max(deadline_s, WORKER_DEADLINE_S)
        asked = ask_workers(store.map, path, token_file, worker_deadline_s, control)
        reports, workers = await asyncio.gather(store.node_reports(deadline_s=deadline_s), asked)
        return describe_cluster(store.map, reports).with_usage(workers), workers, store.map


def _write(
    found: "ClusterStatus",
    workers: "WorkersStatus",
    page: "WebPage | None",
    *,
    with_targets: bool,
) -> None:
    from .cluster_status import describe_classes, describe_policy, summarise

    rows = [
        render_row(node, workers.state_of(node.node).value, workers.count_age_s(node.node))
        for node in found.nodes
    ]
    write_table(COLUMNS, rows, left_columns=LEFT_COLUMNS)
    if with_targets:
        targets = [
            render_target(node.node, target) for node in found.nodes for target in node.targets
        ]
        write_result("")
        write_table(TARGET_COLUMNS, targets, left_columns=TARGET_LEFT_COLUMNS)
    problems = [f"{node.node}: {node.problem}" for node in found.nodes if node.problem]
    problems += [
        f"{target.target}: its folder was removed or replaced; it stores nothing until it is back"
        for node in found.nodes
        for target in node.targets
        if target.is_lost
    ]
    if workers.remark:
        problems.append(workers.remark)
    last = [describe_classes(found), workers.redundancy.describe(), describe_policy(found)]
    last.append(workers.describe())
    last += [] if page is None else [page.describe()]
    write_result("\n".join(["", *problems, *last, summarise(found)]))


def render_row(node: "NodeStatus", worker: str, count_age_s: float | None = None) -> list[str]:
    """The cells of one node, in the order of COLUMNS; "-" for what is not known."""
    return [
        node.node,
        node.state,
        _shown(node.pid),
        node.address,
        _shown(node.blocks),
        _size(node.used_bytes),
        _size(node.capacity_bytes),
        _ratio(node.fill_ratio),
        _shown(node.reads),
        _shown(node.rejected_shards),
        "-" if node.uptime_s is None else format_duration(node.uptime_s),
        worker,
        "-" if count_age_s is None else f"{format_duration(count_age_s)} ago",
    ]


def render_target(node: str, target: "TargetStatus") -> list[str]:
    """The cells of one target, in the order of TARGET_COLUMNS."""
    return [
        target.target,
        node,
        "lost" if target.is_lost else "serving",
        _shown(target.blocks),
        _size(target.used_bytes),
        _size(target.capacity_bytes),
        _ratio(target.fill_ratio),
        _shown(target.quarantined),
    ]


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(value: int | None) -> str:
    return "-" if value is None else format_size(value)


def _ratio(value: float | None) -> str:
    return "-" if value is None else format_ratio(value)
