"""`cachalot status`: asks every node and agent of a cluster what it is and does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidArgument
from .control_options import ControlOption, JsonOption, TokenFileOption, WaitOption
from .exit_codes import ExitCode
from .output import write_json, write_result, write_table
from .quantities import count_of, format_duration, format_ratio, format_size

if TYPE_CHECKING:
    from ..cluster.entities import ClusterMap
    from .agent_status import AgentsStatus
    from .cluster_status import ClusterStatus, NodeStatus, TargetStatus
    from .engine_status import EnginesStatus
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
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="The cluster map.", metavar="FILE")
    ] = None,
    socket: Annotated[
        Path | None,
        # Not typer's own check of what is there, which answers with its usage and no reason.
        typer.Option(
            "--socket",
            help="Ask only the agent of this host there.",
            metavar="PATH",
            readable=False,
        ),
    ] = None,
    with_targets: Annotated[
        bool, typer.Option("--targets", help="Also show each target (folder) of each node.")
    ] = False,
    wait_s: WaitOption = 2.0,
    control: ControlOption = None,
    token_file: TokenFileOption = None,
    is_json: JsonOption = False,
) -> None:
    """Show nodes, agents, engines, redundancy, and how many may still fail.

    Engines: those of the map's folder. Works without any gc_worker, but only they count shards.
    Ends with exit code 6 if a node, an entrypoint or an engine is down, or the folder of a target
    is gone. With --control one worker is asked for all others; 4 if it does not answer.
    """
    if (cluster is None) == (socket is None):
        given = "neither of them" if cluster is None else "both"
        raise InvalidArgument("--cluster, --socket", given=given, expected="one of them")
    if cluster is None:
        assert socket is not None
        asked_too = {"--targets": with_targets, "--control": control, "--token-file": token_file}
        for option, value in asked_too.items():
            if value:
                raise InvalidArgument(option, given="--socket too", expected="--cluster with it")
        _show_agent(socket, wait_s, is_json=is_json)
        return
    # Here, because the client and numpy take longer to load than `--help` should.
    import asyncio

    from .cluster_status import render_json
    from .engine_status import find_engines
    from .web_address import find_web_page

    asked = asyncio.run(_ask(cluster, wait_s, token_file, control))
    found, workers, agents, cluster_map = asked
    page = find_web_page(cluster_map, cluster, token_file, workers, control)
    engines = find_engines(cluster, wait_s)
    if is_json:
        more = {
            "agents": agents.render_json(),
            "agents_unasked": agents.unasked,
            **engines.render_json(),
            "web_page": page and page.render_json(),
        }
        write_json(render_json(found, workers) | more)
    else:
        _write(found, workers, agents, engines, page, with_targets=with_targets)
    if workers.silent_control:
        raise typer.Exit(ExitCode.NODE)
    are_nodes_whole = found.nodes_alive == len(found.nodes) and not found.lost_targets
    if not are_nodes_whole or agents.entrypoints_down or not engines.are_all_alive:
        raise typer.Exit(ExitCode.NODES_DOWN)


def _show_agent(path: Path, deadline_s: float, *, is_json: bool) -> None:
    """Show the agent behind a socket. Raises AgentError."""
    from .agent_inquiry import AgentReport
    from .agent_socket import ask_agent_at
    from .agent_status import COLUMNS, LEFT_COLUMNS, describe_agents, render_row

    said = ask_agent_at(path, deadline_s)
    if is_json:
        write_json(said)
        return
    report = AgentReport(
        address=str(said.get("address", "")), entrypoint=None, is_alive=True, statistics=said
    )
    (agent,) = describe_agents([report]).agents
    write_table(COLUMNS, [render_row(agent)], left_columns=LEFT_COLUMNS)


async def _ask(
    path: Path, deadline_s: float, token_file: Path | None, control: str | None
) -> "tuple[ClusterStatus, WorkersStatus, AgentsStatus, ClusterMap]":
    import asyncio
    import time

    from ..client import StoreClient
    from .agent_inquiry import ask_agents
    from .agent_status import describe_agents
    from .cluster_status import describe_cluster
    from .worker_status import ask_workers

    async with StoreClient.connect(path) as store:
        # A worker loads its API when it is asked for the first time.
        worker_deadline_s = max(deadline_s, WORKER_DEADLINE_S)
        asked = ask_workers(store.map, path, token_file, worker_deadline_s, control)
        loop = asyncio.get_running_loop()
        agents, reports, workers = await asyncio.gather(
            ask_agents(store.map, deadline_s=deadline_s, loop=loop, clock=time.monotonic),
            store.node_reports(deadline_s=deadline_s),
            asked,
        )
        found = describe_cluster(store.map, reports).with_usage(workers)
        workers = workers.seen_beside(found.alive, found.silent_targets)
        return found, workers, describe_agents(agents), store.map


def _write(
    found: "ClusterStatus",
    workers: "WorkersStatus",
    agents: "AgentsStatus",
    engines: "EnginesStatus",
    page: "WebPage | None",
    *,
    with_targets: bool,
) -> None:
    from .agent_status import COLUMNS as AGENT_COLUMNS
    from .agent_status import LEFT_COLUMNS as AGENT_LEFT_COLUMNS
    from .agent_status import render_row as render_agent
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
    if agents.agents:
        write_result("")
        agent_rows = [render_agent(agent) for agent in agents.agents]
        write_table(AGENT_COLUMNS, agent_rows, left_columns=AGENT_LEFT_COLUMNS)
    _write_engines(engines)
    problems = [f"{node.node}: {node.problem}" for node in found.nodes if node.problem]
    problems += [
        f"{target.target}: its folder was removed or replaced; it stores nothing until it is back"
        for node in found.nodes
        for target in node.targets
        if target.is_lost
    ]
    problems += [
        f"{node.node}: {count_of(node.refused_shards, 'shard')} not stored since it started, for"
        " want of room"
        for node in found.nodes
        if node.refused_shards
    ]
    if workers.remark:
        problems.append(workers.remark)
    last = [describe_classes(found), workers.redundancy.describe(), describe_policy(found)]
    problems += agents.problems()
    problems += engines.problems()
    last.append(workers.describe())
    last += [agents.describe()] if agents.agents else []
    last += [engines.describe()] if engines.engines else []
    last += [] if page is None else [page.describe()]
    write_result("\n".join(["", *problems, *last, summarise(found)]))


def _write_engines(engines: "EnginesStatus") -> None:
    from .engine_status import COLUMNS, LEFT_COLUMNS

    if engines.engines:
        write_result("")
        write_table(
            COLUMNS, [one.render_row() for one in engines.engines], left_columns=LEFT_COLUMNS
        )


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
